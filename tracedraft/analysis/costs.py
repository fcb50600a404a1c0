"""What learning costs: shares of time, an update, a token; and how many conversations a gain needs to be seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from tracedraft import statistics
from tracedraft.analysis.paper import COUNTS, INNER, ordered, pair_name, temperatures, with_adapters
from tracedraft.analysis.pooling import (
    Pools,
    by_tokens,
    counted,
    flattened,
    paired,
    sound,
    speedup,
    tau_gain,
    timed,
    where,
)
from tracedraft.analysis.schema import SERVING, Runs
from tracedraft.analysis.shapes import BYTES, SHAPES, Training, Work, arithmetic, cache, memory, traffic
from tracedraft.analysis.tables import Cell, Column, Row, Table, cell, text
from tracedraft.report import varied

CACHED = 1024  # tokens, of which the size of the caches is shown
GAINS = (0.01, 0.02, 0.05, 0.1)


def cost_table(data: Runs) -> Table:
    """Where the time of each adapter goes, over all its timed workloads, and what its shapes come to."""
    data = where(data, data.runs["measure"] == "time")
    pools, rows = Pools(data), []
    for pair in pools.pairs():
        for temperature in temperatures(pools):
            place = pair | {"temperature": temperature}
            for name in ordered(pools.values("adapter", **place)):
                for settings, runs in _alike(pools.runs_of(**place, adapter=name)):
                    pool, updates = (
                        frame[frame["run"].isin(set(runs["run"]))] for frame in (pools.rows, data.updates)
                    )
                    labels = (pair_name(pair, pools), f"{temperature:g}", f"{name} {settings}".strip())
                    rows.append(Row(labels, _cost_cells(pair["target"], runs, pool, updates), " ".join(labels[:2])))
    columns = (
        Column("n timed"), Column("fixed", "milliseconds", "ms a token"),
        Column("adapted", "milliseconds", "ms a token"),
        *(Column(phase, "share", "share of the adapted arm's time") for phase in SERVING),
        Column("ms", "milliseconds", "update"), Column("tokens between", "rate", "update"),
        Column("outer, ms a token", "milliseconds"),
        Column("MFLOP a token", "count", "from shapes"), Column("MB moved a token", "rate", "from shapes"),
        Column("weights", "bytes", "memory from shapes"), Column("learner", "bytes", "memory from shapes"),
        Column(f"KV cache of {CACHED:,} tokens", "bytes", "memory from shapes"),
    )  # fmt: skip
    notes = (
        "From shapes: weights times what was counted, learning between requests included, attention over caches and "
        "padding not; a low-rank head has as many rows as it may keep. A learner's memory: its copies of what it "
        "trains, and its window of positions; the turns that one between requests keeps not.",
    )
    title = "What learning costs"
    return Table("costs", title, ("pair", "T", "adapter"), columns, tuple(rows), data.runs, notes)


def _alike(runs: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Runs of one adapter, apart by settings of it and of decoding, and what tells those from the others."""
    kept = [{key: config[key] for key in ("adapter", "decode")} for config in runs["config"]]
    told = varied([{"workload": "", "adapter": "", "config": flattened(config)} for config in kept])
    return [(str(settings), alike) for settings, alike in runs.groupby(pd.Series(told, index=runs.index))]


def _cost_cells(target: str, runs: pd.DataFrame, pool: pd.DataFrame, updates: pd.DataFrame) -> tuple[Cell, ...]:
    took, whole = timed(pool), timed(pool)["adapted_seconds"].sum()
    shares = [_ratio(took[f"adapted_s_{phase}"].sum(), whole, len(took)) for phase in SERVING]
    spent, tokens = took["adapted_s_update"].sum(), took["adapted_tokens"].sum()
    attempts = took["updates_attempted"].sum()
    return (
        text(len(took)),
        _ratio(1e3 * took["fixed_seconds"].sum(), took["fixed_tokens"].sum(), len(took)),
        _ratio(1e3 * whole, tokens, len(took)),
        *shares,
        _ratio(1e3 * spent, attempts, len(took)),
        _ratio(counted(pool)["adapted_tokens"].sum(), counted(pool)["updates_attempted"].sum(), len(counted(pool))),
        _ratio(1e3 * took["adapted_outer_seconds"].sum(), tokens, len(took)),
        *_shape_cells(target, runs, counted(pool), updates),
    )


def _ratio(part: float, whole: float, n: int) -> Cell:
    return Cell(float(part / whole), n=n) if whole else Cell(None, n=n, reason="nothing was measured")


def _shape_cells(target: str, runs: pd.DataFrame, pool: pd.DataFrame, updates: pd.DataFrame) -> list[Cell]:
    config, shape, tokens = runs.iloc[0]["config"], SHAPES.get(target), float(pool["adapted_tokens"].sum())
    size = BYTES.get(config["target"].get("dtype", ""))
    if shape is None or size is None or not tokens or config["draft"]["name"] != "eagle3":
        return [Cell(None, n=len(pool), reason="no shapes are known of this pair")] * 5
    adapter, decode = config["adapter"], config["decode"]
    positions = float(updates["positions"].mean()) if len(updates) else 0.0
    rounds, attempts = (float(pool[name].sum()) for name in ("adapted_rounds", "updates_attempted"))
    work = Work(rounds / tokens, attempts / tokens, positions, _training(adapter, pool, tokens))
    operations = arithmetic(shape, decode, adapter, work)
    moved = traffic(shape, decode, adapter, work, size)
    found = (operations and operations / 1e6, moved and moved / 1e6, *memory(shape, size, adapter),
             float(cache(shape, size, CACHED)))  # fmt: skip
    return [
        Cell(value, n=len(pool), reason=None if value is not None else "not known from shapes") for value in found
    ]


def _training(adapter: dict[str, Any], pool: pd.DataFrame, tokens: float) -> Training:
    """What was learnt between requests, a token; of a block every step covers ``batch`` of its turns, or all."""
    batch = adapter.get("outer", {}).get("batch")
    steps = passes = predictions = 0.0
    for block in pool["outer"]:
        if isinstance(block, dict) and block.get("steps") and block.get("lessons"):
            turns = min(batch or block["lessons"], block["lessons"])
            steps += block["steps"]
            passes += block["steps"] * turns
            predictions += block["steps"] * block["predictions"] * turns / block["lessons"]
    return Training(steps / tokens, passes / tokens, predictions / tokens)


def length_table(data: Runs, adapters: Sequence[str] = INNER) -> Table:
    """Where an update pays for itself: gains of conversations by their length, all workloads together."""
    data = with_adapters(data, adapters)
    pools, rows = Pools(data), []
    for pair in pools.pairs():
        for temperature in temperatures(pools):
            for name in ordered(pools.values("adapter", **pair, temperature=temperature)):
                pool = pools.of(**pair, temperature=temperature, adapter=name, workload=pools.values("workload"))
                for (low, high), held in by_tokens(pool):
                    if len(held):
                        tokens = f"{low + 1:g} to {high:g}" if high < float("inf") else f"more than {low:g}"
                        labels = (pair_name(pair, pools), f"{temperature:g}", name, tokens)
                        cells = (
                            text(f"{len(counted(held))}, {len(timed(held))}"),
                            cell(tau_gain(held)),
                            cell(speedup(held)),
                        )
                        rows.append(Row(labels, cells, " ".join(labels[:3])))
    columns = (Column("n, timed"), Column("gain in tau", "gain"), Column("speedup over fixed", "ratio"))
    labels, title = ("pair", "T", "adapter", "tokens"), "Gain by length of the conversation"
    return Table("lengths", title, labels, columns, tuple(rows), data.runs, (COUNTS,))


def power_table(data: Runs, gains: Sequence[float] = GAINS) -> Table:
    """How many conversations show a gain of each size, on the noise that the runs of each workload had.

    Negative controls have noise of their own, and stay out.
    """
    data = where(data, data.runs["config"].map(sound))
    pools, rows = Pools(data), []
    for pair in pools.pairs():
        for workload in pools.values("workload"):
            for temperature in temperatures(pools):
                place = pair | {"workload": workload, "temperature": temperature}
                names = pools.values("adapter", **place)
                for name in [*(["fixed"] if "fixed" in names else []), *ordered(names)]:
                    for settings, runs in _alike(pools.runs_of(**place, adapter=name)):
                        learner = f"{name} {settings}".strip()
                        labels = (pair_name(pair, pools), workload, f"{temperature:g}", learner)
                        cells = _power_cells(pools.rows[pools.rows["run"].isin(set(runs["run"]))], gains)
                        rows.append(Row(labels, cells, " ".join(labels[:3])))
    columns = [
        column
        for group in ("gain in tau", "speedup")
        for column in (Column("sd", "tau", group), *(Column(f"+{100 * g:g} %", "count", group) for g in gains))
    ]
    notes = (
        "Conversations after which a gain of that size is seen with probability 0.8 at two-sided 5 %. sd: of what "
        "one conversation says of the logarithm, in one seed and order. Adapter fixed: the machine's noise alone.",
    )
    title = "How many conversations a gain needs"
    return Table("power", title, ("pair", "workload", "T", "adapter"), tuple(columns), tuple(rows), data.runs, notes)


def _power_cells(pool: pd.DataFrame, gains: Sequence[float]) -> tuple[Cell, ...]:
    counts = [f"paired_{arm}_{name}" for arm in ("fixed", "adapted") for name in ("accepted", "rounds")]
    seconds = ["paired_fixed_seconds", "paired_adapted_seconds"]
    cells: list[Cell] = []
    for rows, names, ratio in (
        (paired(pool), counts, statistics.tau_gain),
        (timed(pool), seconds, statistics.first_over_second),
    ):
        deviation, n = statistics.spread(rows[names].to_numpy(float), ratio), len(rows)
        if deviation is None:
            cells += [Cell(None, n=n, reason=f"{n} of {statistics.FEWEST} conversations")] * (1 + len(gains))
            continue
        needed = [statistics.conversations_needed(deviation, gain) for gain in gains]
        cells += [Cell(deviation, n=n), *(Cell(float(count), n=n) for count in needed)]
    return tuple(cells)
