"""What learning costs: an update and an observation by form and window, and their share of decoding's time.

    python analysis/update_cost.py [OVERRIDE …]      writes analysis/tables/update_cost.md, in two to three minutes

Forms are timed in turn in one process, on the draft's own head and the features and teachers of one response.
Before each timed update the target verifies, so that it finds no more in the processor's cache than it does in a run.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir

import tracedraft.cli  # noqa: F401 - registers what configs are composed of
from tracedraft import chat
from tracedraft.adapters.fixed import FixedAdapter
from tracedraft.config import build_spec, shipped_dir
from tracedraft.decode import ChainSpec, respond
from tracedraft.interfaces import InnerAdapter
from tracedraft.measure import loaded
from tracedraft.meter import Meter
from tracedraft.provenance import provenance
from tracedraft.target import Served
from tracedraft.types import Evidence, OutputHead, Response
from tracedraft.verify import noise_key

OUT = Path(__file__).parent / "tables" / "update_cost.md"
SETTINGS = ("workload=sample_chat", "decode.temperature=0.7", "decode.top_p=0.95", "decode.max_new_tokens=512")
LOW = ("adapter=reset_lowrank",)
FORMS = {
    "Adam, norm and head": ("adapter=reset", "adapter.train=both", "adapter.optimizer=adam", "adapter.lr=3e-4"),
    "SGD, norm and head": ("adapter=reset", "adapter.train=both"),
    "SGD, head": ("adapter=reset", "adapter.train=head"),
    "SGD, head, every row": ("adapter=reset", "adapter.train=head", "adapter.skip=0"),
    **{f"low-rank, up to {n} rows": (*LOW, f"adapter.max_rows={n}") for n in (64, 128, 256, 512)},
}
WINDOWS = (32, 64, 128)
ROUNDS = 192  # replayed for each form and window, with an update after every eighth
REPEATS = 30  # of a draft step's head


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        return compose("config", [*SETTINGS, *overrides])


class Recorder(FixedAdapter):
    """Learns nothing and keeps what it is shown of a response."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def observe(self, evidence: Evidence) -> None:
        if evidence.source == "chain":  # what the shipped adapters learn from
            rows = torch.arange(len(evidence.features), device=evidence.features.device)
            self.seen.append((evidence.features, evidence.teacher(rows)))


@dataclasses.dataclass(frozen=True)
class Bench:
    """A target, a maker of fresh drafts, and one prompt to answer."""

    served: Served
    draft: Callable[[], Any]
    decode: ChainSpec
    prompt: list[int]
    key: int

    def answer(self, draft: Any, adapter: InnerAdapter) -> Response:
        adapter.begin_conversation()
        meter = Meter(self.served.target.device)
        return respond(self.served.target, draft, adapter, self.prompt, self.decode, self.key, meter)


def bench(overrides: Iterable[str]) -> tuple[Bench, list[tuple[torch.Tensor, torch.Tensor]]]:
    """On the prompt of the workload that has the longest answer, and what a learner sees of that answer."""
    cfg = composed(*overrides)
    specs = {group: build_spec(cfg[group], group) for group in ("target", "draft", "workload", "decode")}
    served = loaded(specs["target"])
    longest, best = 0, None
    for conversation in specs["workload"].load()[0]:
        prompt = chat.encode(served.tokenizer, [{"role": "user", "content": conversation.turns[0]}])
        made = Bench(served, lambda: specs["draft"].build(served.target)[0], specs["decode"], prompt,
                     noise_key(cfg.seed, conversation, 0))  # fmt: skip
        recorder = Recorder()
        size = len(made.answer(made.draft(), recorder).tokens)
        if size > longest:
            longest, best = size, (made, recorder.seen)
        if size == specs["decode"].max_new_tokens:
            break
    assert best is not None, "the workload is empty"
    return best


def milliseconds(action: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    meter = Meter(device)
    meter.start()
    result = action()
    return 1e3 * sum(meter.stop().values()), result


def verify(made: Bench) -> None:
    """One pass after the last answer: what it leaves in the processor's cache is what a run's rounds leave there."""
    made.served.target.verify(torch.zeros(1, dtype=torch.long))


def replay(
    made: Bench, seen: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Milliseconds of each observation and update, by form and window."""
    head, device = made.draft().head, made.served.target.device
    learners = {}
    for form, overrides in FORMS.items():
        for window in WINDOWS:
            if window > int(composed(*overrides).adapter.max_rows) and "low-rank" in form:
                continue
            spec = build_spec(composed(*overrides, f"adapter.window={window}").adapter, "adapter")
            own = OutputHead(head.norm.clone(), head.weight.clone(), head.eps, head.vocab)
            learners[form, window] = spec.build(own, 0)
    spent: dict[tuple[str, int], dict[str, list[float]]] = {key: defaultdict(list) for key in learners}
    for learner in learners.values():
        learner.begin_conversation()
        learner.begin_response()
    for round in range(1, ROUNDS + 1):
        features, teacher = seen[(round - 1) % len(seen)]
        for key, learner in learners.items():
            piece = Evidence("chain", features, teacher.__getitem__)
            took, _ = milliseconds(lambda: learner.observe(piece), device)  # noqa: B023 - called at once
            spent[key]["observe"].append(took)
            if round % 8 == 0:
                verify(made)
            took, update = milliseconds(lambda: learner.maybe_update(round), device)  # noqa: B023
            compiled = round > ROUNDS // 4  # the first ones compile their products
            if update is not None and update.committed and compiled:
                spent[key]["update"].append(took)
    return spent


def step_costs(made: Bench) -> dict[int, list[float]]:
    """Milliseconds that the head of a draft step takes longer for rows served as factors, by their number."""
    head, device = made.draft().head, made.served.target.device
    feature = head.weight[:1].clone()
    spent: dict[int, list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        for rows in (0, 64, 128, 256, 512):
            factors = head.weight.new_zeros(rows, len(head.weight)), head.weight.new_zeros(rows, len(head.norm))
            served = dataclasses.replace(head, low_rank=factors if rows else None)
            verify(made)
            served.logits(feature)  # the steps of a chain follow each other
            spent[rows].append(milliseconds(lambda: served.logits(feature), device)[0])  # noqa: B023
    base = statistics.median(spent.pop(0))
    return {rows: [took - base for took in times] for rows, times in spent.items()}


def shares(made: Bench) -> dict[str, list[Response]]:
    """Two answers of each form and of the fixed draft, the second ones in turned order."""
    arms = {}
    for form, overrides in {"fixed": ("adapter=fixed",), **FORMS}.items():
        draft = made.draft()
        arms[form] = draft, build_spec(composed(*overrides).adapter, "adapter").build(draft.head, 0)
    answers: dict[str, list[Response]] = {form: [] for form in arms}
    for order in (list(arms), list(arms)[::-1]):
        for form in order:
            answers[form].append(made.answer(*arms[form]))
    return answers


def quartiles(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def replay_table(spent: dict[tuple[str, int], dict[str, list[float]]]) -> list[str]:
    lines = ["| form | window | observe, ms a round | update, ms |", "| --- | ---: | ---: | ---: |"]
    for (form, window), times in spent.items():
        lines.append(f"| {form} | {window} | {quartiles(times['observe'])} | {quartiles(times['update'])} |")
    return lines


def step_table(spent: dict[int, list[float]]) -> list[str]:
    lines = ["| rows served as factors | more for each drafted token, ms |", "| ---: | ---: |"]
    return lines + [f"| {rows} | {quartiles(times)} |" for rows, times in spent.items()]


def share_table(answers: dict[str, list[Response]]) -> list[str]:
    """Per round of the faster answer of each form: the machine only ever adds to a time."""
    titles = ("form", "tokens", "rounds", "updates", "verify", "propose", "observe", "update", "observe + update")
    lines = [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
    for form, made in answers.items():
        one = min(made, key=lambda answer: sum(answer.seconds.values()))
        per_round = {phase: 1e3 * spent / one.rounds for phase, spent in one.seconds.items()}
        decoding = sum(per_round.values()) - per_round["prefill"]
        committed = sum(update.committed for update in one.updates)
        numbers = " | ".join(f"{per_round[phase]:.2f}" for phase in ("verify", "propose", "observe", "update"))
        share = (per_round["observe"] + per_round["update"]) / decoding
        lines.append(f"| {form} | {len(one.tokens)} | {one.rounds} | {committed} | {numbers} | {share:.1%} |")
    return lines


def main(overrides: list[str], out: Path) -> None:
    began = time.monotonic()
    made, seen = bench(overrides)
    origin = provenance()
    machine = origin["hardware"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    parts = [
        "# What an update costs",
        f"Made by `{' '.join(['python analysis/update_cost.py', *overrides])}` at commit {origin['git']['commit']} "
        f"on {machine['logical_cores']} cores of {machine['cpu']}, {gpus}; torch {origin['versions']['torch']}, "
        f"{origin['torch_threads']} threads. Medians and quartiles; forms timed in turn in one process.",
        "Replayed on the head, features and teachers of one response:",
        "\n".join(replay_table(replay(made, seen))),
        "The low-rank form serves its rows beside the head:",
        "\n".join(step_table(step_costs(made))),
        f"Whole answers at temperature {made.decode.temperature:g}, a chain of {made.decode.chain_length}, window 64 "
        "and an update after every eighth round; ms a round, the faster of two answers. The share is of decoding's "
        "time, without prefill; what low-rank rows cost a drafted token is in `propose`, and not in the share.",
        "\n".join(share_table(shares(made))),
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"{out} written in {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:], OUT)
