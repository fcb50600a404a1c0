"""The tables of the TraceDraft paper: eight workloads, learners between requests, and streams that change domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from tracedraft import statistics
from tracedraft.analysis.pooling import (
    Pools,
    compared,
    counted,
    fixed,
    macro_tau,
    over,
    rate,
    rate_beside,
    repeated,
    speedup,
    tau,
    tau_gain,
    timed,
    where,
)
from tracedraft.analysis.schema import Runs
from tracedraft.analysis.tables import Cell, Column, Row, Table, cell, text
from tracedraft.statistics import Estimate

EIGHT = ("aime24", "aime25", "math500", "livecodebench", "olympiad_math", "olympiad_physics", "longwrite", "mtbench")
LONG = EIGHT[:-1]  # reasoning, code and long writing; answers to chat are shorter
INNER = ("reset", "persistent")
OUTER = ("osd", "optimistic", "ensemble")
TEMPERATURES = (0.7, 0.0)
TAU_AND_SPEEDUP = (
    "tau counts the bonus token; macro tau: the mean of the conversations' own. Speedup: Σ seconds of the fixed arm "
    "over Σ seconds of the adapted one, timed side by side over the same tokens, learning inside responses included; "
    "from timed runs only."
)
RATES = "tokens/s of a learner: the fixed draft's, over all runs, times the learner's speedup."
UNCHARGED = "Speedups leave out what learning between requests takes; onlinespec_training_time counts it."
COUNTS = "n: conversations that differ in prompt, in seed or, where a learner keeps what it learns, in order."


def eight_workloads(data: Runs, inner: Sequence[str] = INNER) -> Table:
    """Per pair and workload: tau and throughput of the fixed and the adapted drafts, gains, and means of those."""
    data = with_adapters(data, ["fixed", *inner])
    data = where(data, data.runs["switches"].isna() & ~data.runs["workload"].str.startswith("stream"))
    pools, rows = compared(data), []
    extra = [name for name in pools.values("workload") if name not in EIGHT]
    workloads = (*EIGHT, *extra)
    for pair in pools.pairs():
        found: dict[tuple[str, float], list[Estimate]] = {}
        for workload in workloads:
            for temperature in temperatures(pools):
                place = pair | {"workload": workload, "temperature": temperature}
                all_arms = pools.of(**place, adapter=["fixed", *inner])
                estimates = _eight(all_arms, inner)
                found[workload, temperature] = estimates
                cells = (_sizes(all_arms, inner), *_cells(estimates, inner), cell(repeated(fixed(all_arms))))
                rows.append(
                    Row((pair_name(pair, pools), workload, f"{temperature:g}"), cells, pair_name(pair, pools))
                )
        for title, members in (("mean of long outputs", LONG), ("mean of the eight", EIGHT)):
            for temperature in temperatures(pools):
                label, cells = _mean_cells(title, [found[name, temperature] for name in members], inner)
                labels = (pair_name(pair, pools), label, f"{temperature:g}")
                rows.append(Row(labels, cells, f"{labels[0]} means"))
    columns = (
        Column("n, timed"),
        *_of_arms(inner, "tau", "tau", fixed=True),
        *_of_arms(inner, "tau", "macro tau", fixed=True),
        *_of_arms(inner, "gain", "gain in tau"),
        *_of_arms(inner, "rate", "tokens/s", fixed=True),
        *_of_arms(inner, "ratio", "speedup over fixed"),
        Column("repeated 8-grams", "share"),
    )
    return Table(
        "eight_workloads",
        "Accepted length and throughput on eight workloads",
        ("pair", "workload", "T"),
        columns,
        tuple(rows),
        data.runs,
        (
            TAU_AND_SPEEDUP,
            RATES,
            f"Long outputs: {', '.join(LONG)}. Means are plain, over the workloads that their label counts.",
            COUNTS,
        ),
    )


def _eight(pool: pd.DataFrame, inner: Sequence[str]) -> list[Estimate]:
    """Tau of all arms, both ways, gains in it, tokens/s of the fixed arm, speedups."""
    of = [pool[pool["adapter"] == name] for name in inner]
    return [
        tau(fixed(pool), "fixed"), *map(tau, of), macro_tau(fixed(pool), "fixed"), *map(macro_tau, of),
        *map(tau_gain, of), rate(pool, "fixed"), *map(speedup, of),
    ]  # fmt: skip


def _cells(estimates: Sequence[Estimate], inner: Sequence[str]) -> tuple[Cell, ...]:
    """What ``_eight`` measured, in the order of the table's columns."""
    *before, fixed_rate = estimates[: -len(inner)]
    ratios = estimates[-len(inner) :]
    rates = [fixed_rate, *(rate_beside(fixed_rate, ratio) for ratio in ratios)]
    return tuple(map(cell, (*before, *rates, *ratios)))


def _mean_cells(title: str, members: Sequence[list[Estimate]], inner: Sequence[str]) -> tuple[str, tuple[Cell, ...]]:
    """Label and cells of a row of means."""
    # A workload counts where nothing at all is missing, or columns would be means of different workloads.
    whole = [of for of in members if all(estimate.value is not None for estimate in of)]
    counts = [of for of in members if any(estimate.value is not None for estimate in of)]
    kept = whole or counts
    none = [Estimate(None, reason="no workload")] * len(members[0])
    means = [statistics.mean(column) for column in zip(*kept, strict=True)] if kept else none
    return f"{title} ({len(kept)} of {len(members)})", (text(""), *_cells(means, inner), text(""))


def combinations(data: Runs, outer: Sequence[str] = OUTER, inner: Sequence[str] = INNER) -> Table:
    """Each learner between requests alone and with learning inside them; gains over itself alone."""
    names = [*outer, *(f"{o}_{i}" for o in outer for i in inner)]
    data = with_adapters(data, names)
    pools, rows = compared(data), []
    for pair in pools.pairs():
        for workload in pools.values("workload") or ["—"]:
            for temperature in temperatures(pools):
                for learner in outer:
                    place = pair | {"workload": workload, "temperature": temperature}
                    alone = pools.of(**place, adapter=learner)
                    both = [pools.of(**place, adapter=f"{learner}_{name}") for name in inner]
                    if workload != "—" and alone.empty and all(pool.empty for pool in both):
                        continue
                    cells = (
                        text(_count(alone)), cell(tau(alone)), *(cell(tau(p)) for p in both),
                        *(cell(over(p, alone, seconds=False)) for p in both), cell(speedup(alone)),
                        *(cell(over(p, alone, seconds=True)) for p in both),
                    )  # fmt: skip
                    labels = (pair_name(pair, pools), workload, f"{temperature:g}", learner)
                    rows.append(Row(labels, cells, f"{labels[0]} {workload} {temperature:g}"))
    with_inner = [f"+ {name}" for name in inner]
    columns = (
        Column("n, timed"),
        *(Column(title, "tau", "tau", "tau") for title in ("alone", *with_inner)),
        *(Column(title, "gain", "gain in tau over alone", "gain") for title in with_inner),
        Column("over fixed", "ratio", "speedup"),
        *(Column(f"{title} over alone", "ratio", "speedup", "speedup") for title in with_inner),
    )
    note = "Speedup over alone: the ratio of two speedups, each timed beside its own fixed arm."
    labels = ("pair", "workload", "T", "learner")
    title = "Learning between requests and inside them"
    return Table("combinations", title, labels, columns, tuple(rows), data.runs, (note, UNCHARGED))


def cross_domain(data: Runs) -> Table:
    """Each stream whose domain changes: over all of it, and after the change."""
    pools, rows = compared(data), []
    domains = pools.rows.groupby("workload")["domain"].nunique()
    streams = [name for name in pools.values("workload") if domains.get(name, 0) > 1]
    for pair in pools.pairs():
        for stream in streams or ["—"]:
            for temperature in temperatures(pools):
                place = pair | {"workload": stream, "temperature": temperature}
                for name in ordered(pools.values("adapter", **place)) or ([*INNER] if stream == "—" else []):
                    whole = pools.of(**place, adapter=name)
                    after, at = after_switch(whole)
                    cells = (text(_count(whole)), *_stream_cells(whole), text(at), *_stream_cells(after))
                    labels = (pair_name(pair, pools), stream, f"{temperature:g}", name)
                    rows.append(Row(labels, cells, " ".join(labels[:3])))

    def part(group: str) -> list[Column]:
        return [
            Column("fixed tau", "tau", group), Column("tau", "tau", group, f"{group} tau"),
            Column("gain", "gain", group), Column("fixed tokens/s", "rate", group),
            Column("tokens/s", "rate", group), Column("speedup", "ratio", group, f"{group} speedup"),
        ]  # fmt: skip

    columns = (Column("n, timed"), *part("full stream"), Column("switch at"), *part("after the switch"))
    after_it = "After the switch: from the place on at which a stream first passes from one source to the next."
    labels = ("pair", "stream", "T", "adapter")
    return Table(
        "cross_domain", "Streams that change domain", labels, columns, tuple(rows), data.runs,
        (after_it, "tokens/s: the fixed draft's in each learner's own runs, and that times the speedup.", UNCHARGED),
        best_down=True,
    )  # fmt: skip


def _stream_cells(pool: pd.DataFrame) -> list[Cell]:
    own, ratio = rate(pool, "fixed"), speedup(pool)
    found = (tau(fixed(pool), "fixed"), tau(pool), tau_gain(pool), own, rate_beside(own, ratio), ratio)
    return [cell(each) for each in found]


def after_switch(pool: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Conversations from the first switch of their stream on, and at which positions those are.

    Empty, and a dash, where a stream mixes its domains: it has no such place.
    """
    starts = {run: switch(places) for run, places in zip(pool["run"], pool["switches"], strict=True)}
    if not starts or None in starts.values():
        return pool.iloc[:0], "—"
    found = sorted({at for at in starts.values() if at is not None})
    return pool[pool["position"] >= pool["run"].map(starts)], ", ".join(map(str, found))


def switch(places: list[int] | None) -> int | None:
    return min(places) if isinstance(places, list) and places else None


def with_adapters(data: Runs, names: Sequence[str]) -> Runs:
    return where(data, data.runs["adapter"].isin(names))


def temperatures(pools: Pools) -> list[float]:
    return sorted(pools.values("temperature"), reverse=True) or list(TEMPERATURES)


def _of_arms(inner: Sequence[str], kind: Any, group: str, fixed: bool = False) -> list[Column]:
    return [Column(name, kind, group, group) for name in (*(["fixed"] if fixed else []), *inner)]


def pair_name(pair: dict[str, str], pools: Pools) -> str:
    """The target, and what else tells this pair from others of it."""
    several = [key for key in ("draft", "decode") if len(pools.values(key, target=pair["target"])) > 1]
    return " ".join([pair["target"], *(pair[key] for key in several)])


def _sizes(pool: pd.DataFrame, inner: Sequence[str]) -> Cell:
    """Conversations of each adapter, and how many of them were timed."""
    found = dict.fromkeys(_count(pool[pool["adapter"] == name]) for name in inner)
    return text(" / ".join(found))


def _count(pool: pd.DataFrame) -> str:
    return f"{len(counted(pool))}, {len(timed(pool))}"


def ordered(adapters: Sequence[str]) -> list[str]:
    """Learners, those of the paper first, in its order; ``fixed`` is none."""
    known = [*INNER, *(name for o in OUTER for name in (o, *(f"{o}_{i}" for i in INNER)))]
    rest = [name for name in adapters if name not in known and name != "fixed"]
    return [name for name in known if name in adapters] + rest
