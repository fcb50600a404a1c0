"""TraceDraft: learning inside a response from the target's logits that verification computes anyway.

Only the draft's output norm and head are trained, so the features that reach them are constants and every KV
cache stays valid. One class serves Reset (what is learnt is forgotten at each conversation) and Persistent
(it is kept, with a pull towards the initial weights and a replay). Loss and gradient: ``objective``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from tracedraft.adapters.choices import (
    Inputs,
    Optimizer,
    Scope,
    Selection,
    Supervision,
    Trained,
    Weights,
    check,
    positions,
)
from tracedraft.adapters.dense import Dense
from tracedraft.adapters.form import Form
from tracedraft.adapters.lowrank import LowRank
from tracedraft.adapters.memory import Replay, Window
from tracedraft.adapters.objective import Batch, Rows, served_kl, warm_up, weighted
from tracedraft.adapters.optim import Rule
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
        form: how the trained tensors are held: ``dense``, fp32 masters; ``lowrank``, the head alone as factors, for
            which see ``lowrank``.
        max_rows: lowrank only: positions kept as factors, beyond which they are folded into dense weights.
        optimizer, lr, beta1, beta2, eps: the step; the betas and eps are Adam's.
        skip: SGD only: share of the squared gradient that rows of the head left out of a step may hold together;
            0: none is left out.
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
    form: Weights
    max_rows: int
    optimizer: Optimizer
    lr: float
    beta1: float
    beta2: float
    eps: float
    skip: float
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
        check(self)

    def build(self, head: OutputHead | None, seed: int) -> TraceAdapter:
        """Raises UserError if the draft has no head."""
        if head is None:
            raise UserError(
                f"adapter={self.name}: the draft has no output head to train; use adapter=fixed, or another draft"
            )
        return TraceAdapter(self, head, seed)


def build_form(spec: TraceSpec, head: OutputHead) -> Form:
    # One step without a guard is judged before it is written, so it can be written in place.
    undo = spec.steps > 1 or spec.guard
    if spec.form is Weights.lowrank:
        return LowRank(head, spec.lr, spec.temperature, spec.max_rows, positions(spec), undo)
    rule = Rule(spec.optimizer is Optimizer.adam, spec.lr, spec.beta1, spec.beta2, spec.eps)
    trained = {Trained.norm: {"norm"}, Trained.head: {"weight"}, Trained.both: {"norm", "weight"}}[spec.train]
    return Dense(head, trained, rule, spec.temperature, spec.skip, in_place=not undo)


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
        self.form = build_form(spec, head)
        warm_up(head, spec.temperature)
        numbers = itertools.count()
        self.windows: dict[str, Window] = {}
        if spec.source is not Supervision.response:
            self.windows["prompt"] = Window(head, spec.prompt_positions, False, spec.temperature, numbers)
        if spec.source is not Supervision.prompt:
            recent = spec.selection is Selection.recent
            self.windows["response"] = Window(head, spec.window, recent, spec.temperature, numbers)
        self.replay = Replay(head, spec.replay_mib, numbers)
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
        self.form.restore()
        self.replay.clear()
        self.draws.manual_seed(self._seed)
        self.count = 0

    def begin_response(self) -> None:
        """A turn's prompt holds the turns before it, so positions start anew."""
        for window in self.windows.values():
            window.clear()
        self.form.begin_response()
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
        before = served_kl(held, self.head, spec.temperature) if held is not None else None
        trial = self._train(weighted(train))
        drift = self.form.drift() if trial.grad_norm is not None else {}
        kl = self._guard(trial, held, before)
        self.form.settle(not trial.reason)
        if trial.reason:
            self.draws.set_state(drawn)
        else:
            self.count = trial.count
        return self._report(round, trial, {s: len(rows) for s, (rows, _) in train.items()}, drift, kl)

    def end_response(self) -> None:
        window = self.windows.get("response")
        if window is not None and self.replay.capacity:
            self.replay.push(window.take(window.index()))

    def state(self) -> dict[str, Any] | None:
        """Persistent's weights, optimiser, replay and draws; Reset starts each conversation anew."""
        if self.spec.scope is Scope.conversation:
            return None
        return {
            "form": self.form.state(),
            "replay": self.replay.state(),
            "draws": self.draws.get_state(),
            "count": self.count,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.form.load_state(state["form"])
        self.replay.load_state(state["replay"])
        self.draws.set_state(state["draws"])
        self.count = state["count"]

    def drift(self) -> dict[str, float]:
        """‖W - W₀‖ / ‖W₀‖ of each trained tensor."""
        return self.form.distance()

    def anchor_lambda(self) -> dict[str, float]:
        """The λ of λ·‖W - W₀‖²/‖W₀‖² under plain SGD that pulls as the half-life does, by trained tensor.

        Its gradient shrinks W - W₀ by 2·lr·λ/‖W₀‖² a step, so λ = (1 - 2^(-1/half-life))·‖W₀‖²/(2·lr).
        """
        if self.spec.anchor_half_life is None or not self.spec.lr:
            return {}
        decay = 1 - 2 ** (-1 / self.spec.anchor_half_life)
        return {key: decay * norm**2 / (2 * self.spec.lr) for key, norm in self.form.initial_norms.items()}

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
        """Make a candidate: the pull towards the initial weights with the first step, then the other steps.

        Each step is measured before it is written, so one that must not stand leaves nothing to undo.
        """
        spec, form, trial = self.spec, self.form, _Trial("", self.count)
        keep = 2 ** (-1 / spec.anchor_half_life) if spec.anchor_half_life is not None else 1.0
        for _ in range(spec.steps):
            loss, gradients = form.gradients(batch)
            if not math.isfinite(loss):
                trial.reason = "non-finite loss"
                return trial
            total = math.hypot(*(gradient.norm for gradient in gradients.values()))
            if not math.isfinite(total):
                trial.reason = "non-finite gradient"
                return trial
            if trial.grad_norm is None:
                trial.loss, trial.grad_norm = loss, total
            scale = min(1.0, spec.clip / total) if spec.clip and total else 1.0
            trial.count += 1
            form.prepare(gradients, scale, trial.count)
            if not form.finite():
                trial.reason = "non-finite weights"
                return trial
            if spec.drift_cap is not None and any(drift > spec.drift_cap for drift in form.drift().values()):
                trial.reason = "drift over cap"
                return trial
            form.write(keep)
            keep = 1.0
        return trial

    def _guard(self, trial: _Trial, held: Batch | None, before: float | None) -> tuple[float | None, float | None]:
        """KL at held-out positions of the head as served, before and after; what raises it must not stand."""
        if held is None or before is None or trial.reason:
            return None, None
        after = served_kl(held, self.head, self.spec.temperature)
        if not after <= before + GUARD_TOLERANCE:
            trial.reason = "held-out KL rose"
        return before, after

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
