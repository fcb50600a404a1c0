"""TraceDraft: learning inside a response from the target's logits that verification computes anyway.

Only the draft's output norm and head are trained, so the features that reach them are constants and every KV
cache stays valid. One class serves Reset (what is learnt is forgotten at each conversation) and Persistent
(it is kept, with a pull towards the initial weights and a replay). Loss and gradient: ``objective``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tracedraft.adapters.choices import Inputs, Optimizer, Scope, Selection, Supervision, Trained
from tracedraft.adapters.memory import Replay, Window
from tracedraft.adapters.objective import (
    Batch,
    Factors,
    Rows,
    gain_gradient,
    kl_gradient,
    served_kl,
    weighted,
)
from tracedraft.adapters.optim import Master, Rule
from tracedraft.errors import UserError
from tracedraft.interfaces import InnerAdapter, InnerAdapterSpec
from tracedraft.types import Evidence, OutputHead, Update

GUARD_TOLERANCE = 1e-6  # of the published code
HELD_OUT = 5  # the guard holds out one position in this many


@dataclass(frozen=True)
class TraceSpec(InnerAdapterSpec):
    """Settings of TraceDraft.

    Attributes:
        scope: how long what was learnt is kept.
        every: update after each ``every`` rounds of a response; 0: off.
        at_rounds: update after these rounds of a response.
        at_prefill: update before the first round, from the prompt.
        source: where supervision comes from; ``balanced`` averages prompt and response apart.
        inputs: what a response's positions are predicted from in training: ``slots``, the target's true features;
            ``chain``, what the chain that was verified had there, so that deeper steps learn from their own
            inputs; ``both``.
        prompt_weight: weight of the prompt's average under ``balanced``.
        selection: which positions of the response are kept, the latest or a uniform sample.
        window: positions kept of a response.
        prompt_positions: positions kept of a prompt, a uniform sample.
        optimizer, lr, beta1, beta2, eps: the step; the betas and eps are Adam's.
        steps: training steps an update.
        train: the tensors that change.
        temperature: T of the loss T²·KL.
        clip: bound on the global gradient norm; None: off.
        drift_cap: bound on an update's relative step per tensor, beyond which it is rolled back; None: off.
        guard: roll back if the KL at held-out positions rises.
        min_positions: fewer positions that carry loss: no update.
        anchor_half_life: updates in which W - W₀ halves, were there no gradient; None: off.
        replay_mib: bound on the memory of earlier responses' positions; 0: off.
        replay_positions: positions drawn from it for an update.
        replay_weight: weight of their average; the other sources' weights sum to 1.
    """

    name: str
    scope: Scope
    every: int
    at_rounds: list[int]
    at_prefill: bool
    source: Supervision
    inputs: Inputs
    prompt_weight: float
    selection: Selection
    window: int
    prompt_positions: int
    optimizer: Optimizer
    lr: float
    beta1: float
    beta2: float
    eps: float
    steps: int
    train: Trained
    temperature: float
    clip: float | None
    drift_cap: float | None
    guard: bool
    min_positions: int
    anchor_half_life: float | None
    replay_mib: float
    replay_positions: int
    replay_weight: float

    def __post_init__(self) -> None:
        """Raises UserError for settings that cannot work."""
        _check(self)

    def build(self, head: OutputHead | None, seed: int) -> TraceAdapter:
        """Raises UserError if the draft has no head."""
        if head is None:
            raise UserError(
                f"adapter={self.name}: the draft has no output head to train; use adapter=fixed, or another draft"
            )
        return TraceAdapter(self, head, seed)


def _check(spec: TraceSpec) -> None:
    """One rule a line: key, whether its value works, what would."""
    prompt = spec.source is not Supervision.response
    response = spec.source is not Supervision.prompt
    ever = spec.every or spec.at_rounds or spec.at_prefill
    optional = {key: getattr(spec, key) for key in ("clip", "drift_cap", "anchor_half_life")}
    rules = [
        ("every", spec.every >= 0, "at least 0"),
        ("every", ever, "every, at_rounds or at_prefill; adapter=fixed never updates"),
        ("at_rounds", all(r >= 1 for r in spec.at_rounds), "rounds from 1; at_prefill is before the first"),
        ("at_prefill", prompt or not spec.at_prefill, "false with source=response: it has no position then"),
        ("prompt_weight", 0 < spec.prompt_weight < 1, "between 0 and 1; see source"),
        ("window", spec.window >= 1, "at least 1"),
        ("prompt_positions", spec.prompt_positions >= 1, "at least 1; see source=response"),
        ("lr", 0 <= spec.lr < math.inf, "a finite number, at least 0"),
        ("beta1", 0 <= spec.beta1 < 1, "in [0, 1)"),
        ("beta2", 0 <= spec.beta2 < 1, "in [0, 1)"),
        ("eps", spec.eps > 0, "above 0"),
        ("steps", spec.steps >= 1, "at least 1"),
        ("temperature", 0 < spec.temperature < math.inf, "above 0"),
        ("min_positions", spec.min_positions >= 1, "at least 1"),
        ("replay_mib", 0 <= spec.replay_mib < math.inf, "at least 0"),
        ("replay_mib", response or not spec.replay_mib, "0 with source=prompt: it replays responses"),
        ("replay_positions", spec.replay_positions >= 1, "at least 1; see replay_mib=0"),
        ("replay_weight", 0 < spec.replay_weight < math.inf, "above 0; see replay_mib=0"),
        *((key, value is None or value > 0, "above 0, or null") for key, value in optional.items()),
    ]
    for key, works, want in rules:
        if not works:
            raise UserError(f"adapter.{key}={getattr(spec, key)!r}: expected {want}")


@dataclass
class _Trial:
    """A candidate in the making: why it must not stand ("" if it may) and what was measured."""

    reason: str
    count: int
    loss: float | None = None
    grad_norm: float | None = None


class TraceAdapter(InnerAdapter):
    """One draft's learner. The tensors of ``head`` stay the same objects; values are written in place."""

    def __init__(self, spec: TraceSpec, head: OutputHead, seed: int) -> None:
        self.spec = spec
        self.head = head
        rule = Rule(spec.optimizer is Optimizer.adam, spec.lr, spec.beta1, spec.beta2, spec.eps)
        trained = {"norm": head.norm, "weight": head.weight}
        if spec.train is Trained.norm:
            del trained["weight"]
        if spec.train is Trained.head:
            del trained["norm"]
        self.masters = {key: Master(tensor, rule) for key, tensor in trained.items()}
        self.windows: dict[str, Window] = {}
        if spec.source is not Supervision.response:
            self.windows["prompt"] = Window(head, spec.prompt_positions, False, spec.temperature)
        if spec.source is not Supervision.prompt:
            recent = spec.selection is Selection.recent
            self.windows["response"] = Window(head, spec.window, recent, spec.temperature)
        self.replay = Replay(head, spec.replay_mib)
        if spec.replay_mib and not self.replay.capacity:
            raise UserError(f"adapter.replay_mib={spec.replay_mib}: too little for one position; 0 is off")
        self._seed = seed
        self.draws = torch.Generator().manual_seed(seed)
        self.count = 0  # committed training steps: Adam's bias correction
        self._collecting = True

    def begin_conversation(self) -> None:
        """Reset: back to the initial draft, optimiser and draws, so that no conversation knows another."""
        if self.spec.scope is Scope.stream:
            return
        for master in self.masters.values():
            master.restore()
        self.replay.clear()
        self.draws.manual_seed(self._seed)
        self.count = 0

    def begin_response(self) -> None:
        """A turn's prompt holds the turns before it, so positions start anew."""
        for window in self.windows.values():
            window.clear()
        self._collecting = True

    @torch.no_grad()
    def observe(self, evidence: Evidence) -> None:
        unwanted = {"response": Inputs.chain, "chain": Inputs.slots}.get(evidence.source)
        window = self.windows.get("response" if evidence.source == "chain" else evidence.source)
        if window is not None and self._collecting and self.spec.inputs is not unwanted:
            window.observe(evidence, self.draws)

    @torch.no_grad()
    def maybe_update(self, round: int) -> Update | None:
        """One transaction: everything is as it was unless the update is committed."""
        if not self._scheduled(round):
            return None
        spec = self.spec
        # Nothing that comes later can be used, unless a replay wants it.
        later = spec.every or any(r > round for r in spec.at_rounds) or self.replay.capacity
        self._collecting = bool(later)
        slots = {source: window.index() for source, window in self.windows.items()}
        enough = max(spec.min_positions, HELD_OUT if spec.guard else 1)
        if sum(len(index) for index in slots.values()) < enough:
            return self._report(round, _Trial("too few positions", 0), {s: len(i) for s, i in slots.items()})
        drawn = self.draws.get_state()
        train, held = self._draw(slots)
        trial = self._train(weighted(train))
        drift = {key: master.drift() for key, master in self.masters.items()} if trial.grad_norm is not None else {}
        kl = self._guard(trial, held) if held is not None and not trial.reason else (None, None)
        self._settle(trial)
        if trial.reason:
            self.draws.set_state(drawn)
        return self._report(round, trial, {s: len(rows) for s, (rows, _) in train.items()}, drift, kl)

    def end_response(self) -> None:
        window = self.windows.get("response")
        if window is not None and self.replay.capacity:
            self.replay.push(window.take(window.index()))

    def state(self) -> dict[str, Any] | None:
        """Persistent's weights, optimiser, replay and draws; Reset starts each conversation anew."""
        if self.spec.scope is Scope.conversation:
            return None
        masters = {key: master.state() for key, master in self.masters.items()}
        return {
            "masters": masters,
            "replay": self.replay.state(),
            "draws": self.draws.get_state(),
            "count": self.count,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        for key, master in self.masters.items():
            master.load_state(state["masters"][key])
        self.replay.load_state(state["replay"])
        self.draws.set_state(state["draws"])
        self.count = state["count"]

    def drift(self) -> dict[str, float]:
        """‖W - W₀‖ / ‖W₀‖ of each trained tensor."""
        return {key: master.distance() for key, master in self.masters.items()}

    def anchor_lambda(self) -> dict[str, float]:
        """The λ of λ·‖W - W₀‖²/‖W₀‖² under plain SGD that pulls as the half-life does, by trained tensor.

        Its gradient shrinks W - W₀ by 2·lr·λ/‖W₀‖² a step, so λ = (1 - 2^(-1/half-life))·‖W₀‖²/(2·lr).
        """
        if self.spec.anchor_half_life is None or not self.spec.lr:
            return {}
        decay = 1 - 2 ** (-1 / self.spec.anchor_half_life)
        return {key: decay * m.initial_norm**2 / (2 * self.spec.lr) for key, m in self.masters.items()}

    def _scheduled(self, round: int) -> bool:
        if round == 0:
            return self.spec.at_prefill
        return round in self.spec.at_rounds or (self.spec.every > 0 and round % self.spec.every == 0)

    def _draw(self, slots: dict[str, torch.Tensor]) -> tuple[dict[str, tuple[Rows, float]], Batch | None]:
        """Rows and weight of each source to train on, and the batch held out for the guard."""
        weight = {"prompt": self.spec.prompt_weight, "response": 1 - self.spec.prompt_weight}
        if len(slots) == 1:
            weight = dict.fromkeys(slots, 1.0)
        train, held = {}, {}
        for source, index in slots.items():
            if self.spec.guard:
                index = index[torch.randperm(len(index), generator=self.draws)]
                out = len(index) // HELD_OUT
                held[source] = (self.windows[source].take(index[:out]), weight[source])
                index = index[out:]
            train[source] = (self.windows[source].take(index), weight[source])
        if len(self.replay):
            # Against sources that sum to 1, also where one of them has no position yet.
            present = sum(w for rows, w in train.values() if len(rows))
            rows = self.replay.sample(self.spec.replay_positions, self.draws)
            train["replay"] = (rows, self.spec.replay_weight * present)
        return train, weighted(held) if any(len(rows) for rows, _ in held.values()) else None

    def _train(self, batch: Batch) -> _Trial:
        """Make a candidate: the pull towards the initial weights, then the steps.

        The first gradient is taken at the weights as served: in bf16 its two products with the head cost a
        third of what fp32 masters cost, and it is the served draft that should improve.
        """
        trial = _Trial("", self.count)
        at = {"norm": self.head.norm, "weight": self.head.weight}
        if self.spec.anchor_half_life is not None:
            for master in self.masters.values():
                master.pull(2 ** (-1 / self.spec.anchor_half_life))
        for step in range(self.spec.steps):
            if step:
                at |= {key: master.weights.latest for key, master in self.masters.items()}
            loss, gradients = self._gradients(batch, at["norm"].flatten(), at["weight"])
            if not math.isfinite(loss):
                trial.reason = "non-finite loss"
                return trial
            norms = {key: gradient.norm() for key, gradient in gradients.items()}
            total = math.hypot(*norms.values())
            if not math.isfinite(total):
                trial.reason = "non-finite gradient"
                return trial
            if step == 0:
                trial.loss, trial.grad_norm = loss, total
            scale = min(1.0, self.spec.clip / total) if self.spec.clip and total else 1.0
            trial.count += 1
            for key, master in self.masters.items():
                master.step(gradients[key], norms[key], scale, trial.count)
        cap = self.spec.drift_cap
        if not all(master.finite() for master in self.masters.values()):
            trial.reason = "non-finite weights"
        elif cap is not None and any(master.drift() > cap for master in self.masters.values()):
            trial.reason = "drift over cap"
        return trial

    def _gradients(self, batch: Batch, gain: torch.Tensor, weight: torch.Tensor) -> tuple[float, dict[str, Factors]]:
        """Loss and gradients at the gain [H] and head [D, H]."""
        loss, residual, normed, unit = kl_gradient(batch, gain, weight, self.head.eps, self.spec.temperature)
        gradients = {}
        if "weight" in self.masters:
            gradients["weight"] = Factors(residual, normed)
        if "norm" in self.masters:
            row = gain_gradient(residual, weight, unit).unsqueeze(0)
            gradients["norm"] = Factors(row.new_ones(1, 1), row)
        return loss, gradients

    def _guard(self, trial: _Trial, held: Batch) -> tuple[float, float]:
        """KL at held-out positions of the served head, before and after the candidate is published."""
        before = served_kl(held, self.head, self.spec.temperature)
        for master in self.masters.values():
            master.publish()
        after = served_kl(held, self.head, self.spec.temperature)
        if not after <= before + GUARD_TOLERANCE:
            trial.reason = "held-out KL rose"
        return before, after

    def _settle(self, trial: _Trial) -> None:
        keep = not trial.reason
        for master in self.masters.values():
            master.settle(keep)
            if keep or self.spec.guard:
                master.publish()
        if keep:
            self.count = trial.count

    def _report(
        self,
        round: int,
        trial: _Trial,
        positions: dict[str, int],
        drift: dict[str, float] | None = None,
        held_out: tuple[float | None, float | None] = (None, None),
    ) -> Update:
        mass = torch.cat([window.mass() for window in self.windows.values()])
        mean = mass.mean().item() if len(mass) else math.nan
        finite = [x if x is not None and math.isfinite(x) else None for x in (mean, *held_out)]
        return Update(
            round=round,
            committed=not trial.reason,
            reason=trial.reason,
            positions=positions,
            loss=trial.loss,
            grad_norm=trial.grad_norm,
            drift={key: x for key, x in (drift or {}).items() if math.isfinite(x)},
            vocab_mass=finite[0],
            held_out_before=finite[1],
            held_out_after=finite[2],
        )
