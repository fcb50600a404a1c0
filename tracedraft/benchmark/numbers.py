"""What is made of the times and tokens of a bench: numbers of arms, ratios between them, and where they parted."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tracedraft.decode import mismatch
from tracedraft.interfaces import Target
from tracedraft.statistics import estimate
from tracedraft.summary import summarise_arm
from tracedraft.types import Response
from tracedraft.verify import Sampling

PLAIN = "plain"
ALL = "all"  # workloads together
LEARNING = ("observe", "update")  # the phases that a draft which never changes could do without

Answers = dict[str, list[Response]]  # by arm, in the order of the prompts
Pair = tuple[str, str]


@dataclass(frozen=True)
class Question:
    """A prompt [L], with the key of its sampling noise."""

    id: str
    prompt: list[int]
    key: int


def learner(mode: str, adapter: str) -> str:
    """The arm of an adapter in a decode mode."""
    return f"{mode}_{adapter}"


def pairs(engines: Iterable[str], modes: Iterable[str], adapters: Iterable[str]) -> dict[str, Pair]:
    """Which arms are compared, by the ratio's name: ours and the other, whose speed ours is divided by."""
    modes, adapters = list(modes), list(adapters)
    found = [(ours, engine) for engine in engines for ours in (PLAIN, *modes)]
    found += [(mode, PLAIN) for mode in modes]
    found += [(later, earlier) for earlier, later in combinations(modes, 2)]
    found += [(learner(mode, adapter), mode) for mode in modes for adapter in adapters]
    return {f"{ours}_over_{other}": (ours, other) for ours, other in found}


def ms_per_token(answers: list[Response]) -> float:
    """Of prefill and decoding together."""
    return 1e3 * sum(sum(answer.seconds.values()) for answer in answers) / sum(len(a.tokens) for a in answers)


def spread(values: list[float]) -> dict[str, Any]:
    """Median and quartiles of the repetitions; one alone has no quartiles."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive")[::2] if len(values) > 1 else None
    return {"median": statistics.median(values), "quartiles": quartiles, "values": values}


def arm_numbers(repetitions: list[list[Response]]) -> dict[str, Any]:
    """One arm's times and counts; what does not apply to it is None."""
    rows = [summarise_arm([dataclasses.asdict(answer) for answer in answers])[0] for answers in repetitions]
    accepted, rounds = (sum(row[name] for row in rows) for name in ("accepted", "rounds"))
    learning = [sum(row["seconds"][p] for p in LEARNING) / sum(row["seconds"].values()) for row in rows]
    return {
        "ms_per_token": spread([ms_per_token(answers) for answers in repetitions]),
        "tau": (accepted + rounds) / rounds if rounds else None,
        "learning_share": spread(learning) if any(learning) else None,
        "repetitions": [{name: row[name] for name in ("tokens", "rounds", "accepted", "seconds")} for row in rows],
    }


def ratio(done: list[Answers], ours: str, other: str) -> dict[str, Any] | None:
    """How many times as fast as the other arm ours made a token, by repetition; None without one of them.

    Its ``interval``, of 95 %, is over prompts, all repetitions of one together: how far other prompts would move it,
    which repetitions of the same ones can't show. None for too few. Of a learner that keeps what it learns it is too
    narrow, since each prompt comes after the same others.
    """
    if not {ours, other} <= done[0].keys():
        return None
    counts, prompts = [], []
    for answers in done:
        for prompt, pair in enumerate(zip(answers[other], answers[ours], strict=True)):
            counts.append([x for answer in pair for x in (sum(answer.seconds.values()), len(answer.tokens))])
            prompts.append(prompt)
    found = estimate(counts, _times_as_fast, prompts)
    interval = None if found.low is None or found.high is None else [found.low, found.high]
    times = [ms_per_token(answers[other]) / ms_per_token(answers[ours]) for answers in done]
    return {**spread(times), "interval": interval}


def _times_as_fast(sums: Any) -> Any:
    """Of sums [..., (seconds, tokens, our seconds, our tokens)]."""
    return sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3])


def together(by_workload: dict[str, Answers]) -> Answers:
    """The answers to all workloads as one."""
    arms = next(iter(by_workload.values()))
    return {arm: [answer for answers in by_workload.values() for answer in answers[arm]] for arm in arms}


def by_workload(done: list[dict[str, Answers]], compared: dict[str, Pair]) -> dict[str, Any]:
    """Arms and ratios of each workload, and of all of them together, from what each repetition answered."""
    groups = {name: [answers[name] for answers in done] for name in done[0]}
    groups[ALL] = [together(answers) for answers in done]
    return {
        name: {
            "arms": {arm: arm_numbers([answers[arm] for answers in made]) for arm in made[0]},
            "ratios": {key: ratio(made, *pair) for key, pair in compared.items()},
        }
        for name, made in groups.items()
    }


def verdict(aim: dict[str, Any], name: str, found: dict[str, Any], temperature: float) -> dict[str, Any]:
    """Whether the median reached the aim; None, with the reason, where that can't be said.

    Args:
        name: of the ratio; found: what ``by_workload`` made.
    """
    over = found.get(aim["workload"] or ALL)
    measured = over["ratios"][name] if over else None
    reason = None
    if over is None:
        reason = f"stated for {aim['workload']}"
    elif measured is None:
        reason = "not measured"
    elif temperature != 0:
        reason = "stated for temperature 0"
    met = measured["median"] >= aim["ratio"] if measured is not None and reason is None else None
    return {**aim, "met": met, "reason": reason}


def parted(
    target: Target, asked: dict[str, list[Question]], answers: dict[str, Answers], pair: Pair, sampling: Sampling
) -> dict[str, Any] | None:
    """Where two arms first chose different tokens, both scored at a higher precision; None without one of them."""
    ours, other = pair
    if any(not {ours, other} <= made.keys() for made in answers.values()):
        return None
    first, prompts = [], 0
    for workload, questions in asked.items():
        for question, a, b in zip(questions, answers[workload][ours], answers[workload][other], strict=True):
            prompts += 1
            at = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
            if at is None:
                continue
            own = dataclasses.replace(sampling, key=question.key)
            found = mismatch(target, [*question.prompt, *a.tokens[:at]], at, b.tokens[at], a.tokens[at], own)
            first.append({"id": question.id, **dataclasses.asdict(found), "near_tie": found.near_tie})
    ties = sum(found["near_tie"] for found in first)
    return {"prompts": prompts, "parted": len(first), "near_ties": ties, "first": first}
