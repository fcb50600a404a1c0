"""What learning costs: shares of time, an update, a token; and what shapes say of arithmetic, traffic and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tracedraft.analysis import statistics
from tracedraft.analysis.paper import COUNTS, INNER, ordered, pair_name, temperatures, with_adapters
from tracedraft.analysis.pooling import Pools, by_tokens, counted, flattened, paired, speedup, tau_gain, timed, where
from tracedraft.analysis.schema import Runs
from tracedraft.analysis.tables import Cell, Column, Row, Table, cell, text
from tracedraft.errors import UserError
from tracedraft.report import varied

PHASES = ("prefill", "propose", "verify", "observe", "update", "other")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GAINS = (0.01, 0.02, 0.05, 0.1)


@dataclass(frozen=True)
class Shape:
    """A decoder as its published config has it, and the vocabulary of the EAGLE-3 draft that goes with it."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    draft_vocab: int
    tied: bool = False

    def layer(self, inputs: int) -> int:
        """Weights of one layer whose attention reads vectors of this size."""
        attention = inputs * self.head * (self.heads + 2 * self.kv_heads) + self.heads * self.head * self.hidden
        return attention + 3 * self.hidden * self.mlp

    @property
    def target_pass(self) -> int:
        """Weights that a pass of the target reads: layers and head."""
        return self.layers * self.layer(self.hidden) + self.hidden * self.vocab

    @property
    def draft_slot(self) -> int:
        """Weights between taps and output: three taps to one vector, and a layer over that and a token's."""
        return 3 * self.hidden * self.hidden + self.layer(2 * self.hidden)

    @property
    def draft_head(self) -> int:
        return self.hidden * self.draft_vocab

    @property
    def kv_row(self) -> int:
        """Numbers that a token takes in the caches of both."""
        return 2 * (self.layers + 1) * self.kv_heads * self.head


_LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256, 32000)
_LLAMA_7B = Shape(32, 4096, 11008, 32, 32, 128, 32000, 32000)
SHAPES = {
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49152, 12288, tied=True),
    "llama3.1-8b": _LLAMA_8B,
    "r1-distill-llama-8b": _LLAMA_8B,
    "vicuna-7b": _LLAMA_7B,
    "llama2-7b-chat": _LLAMA_7B,
    "vicuna-13b": Shape(40, 5120, 13824, 40, 40, 128, 32000, 32000),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936, 32000),
}


@dataclass(frozen=True)
class Work:
    """Of one arm, from counts: what a generated token needs of each."""

    rounds: float
    updates: float
    positions: float  # of an update


def arithmetic(shape: Shape, decode: dict[str, Any], work: Work) -> float | None:
    """Floating-point operations a token, attention over the cache left out; None where the drafted shape is unknown.

    Two for each weight and row; an update of the head is its logits and its gradient.
    """
    drafted = _drafted(decode)
    if drafted is None:
        return None
    width, steps, beams = drafted
    # A token more than is accepted enters the draft's cache each round; nothing is padded in this sum.
    extend = 1 / work.rounds * shape.draft_slot
    propose = beams * ((steps - 1) * shape.draft_slot + steps * shape.draft_head)
    update = 2 * work.positions * shape.draft_head
    return 2 * (work.rounds * (width * shape.target_pass + extend + propose) + work.updates * update)


def traffic(shape: Shape, decode: dict[str, Any], work: Work, size: int) -> float | None:
    """Bytes of weights read and written a token; caches left out.

    Args:
        size: bytes of a weight. An update reads the head for its logits, and reads and writes its fp32 master.
    """
    drafted = _drafted(decode)
    if drafted is None:
        return None
    _, steps, _ = drafted
    propose = steps * (shape.draft_slot + shape.draft_head)
    update = (2 * size + 8) * shape.draft_head
    return work.rounds * size * (shape.target_pass + propose) + work.updates * update


def _drafted(decode: dict[str, Any]) -> tuple[int, int, int] | None:
    """(rows verified a round, steps of the draft, ways followed in each) of a chain or a tree."""
    if "chain_length" in decode:
        return decode["chain_length"] + 1, decode["chain_length"], 1
    if "tree_nodes" in decode:
        return decode["tree_nodes"], decode["tree_depth"], decode["tree_top_k"]
    return None


def memory(shape: Shape, size: int, adapter: dict[str, Any]) -> tuple[float, float | None]:
    """Bytes of the weights of target and draft, and of what a learner holds beside them; None where unknown."""
    embedding = 0 if shape.tied else shape.hidden * shape.vocab
    weights = size * (shape.target_pass + embedding + shape.draft_slot + shape.draft_head)
    if "outer" not in adapter:
        return weights, _inner_memory(shape, size, adapter)
    inner, outer = _inner_memory(shape, size, adapter["inner"]), _outer_memory(shape, adapter)
    return weights, None if inner is None or outer is None else inner + outer


def _inner_memory(shape: Shape, size: int, adapter: dict[str, Any]) -> float | None:
    if adapter.get("name") == "fixed":
        return 0.0
    if "optimizer" not in adapter:
        return None
    window = 4 * adapter["window"] * (shape.hidden + shape.draft_vocab)
    if adapter["form"] == "lowrank":
        return window + size * adapter["max_rows"] * (shape.hidden + shape.draft_vocab)
    moments = 3 if adapter["optimizer"] == "adam" else 0  # two, and the step
    return window + (4 * (1 + moments) + size) * shape.draft_head


def _outer_memory(shape: Shape, adapter: dict[str, Any]) -> float | None:
    """What learning between requests asks for before it starts, less the turns that it keeps."""
    from omegaconf import OmegaConf

    from tracedraft.config import build_spec

    try:
        copies = build_spec(OmegaConf.create(adapter), "adapter").outer.copies + 2
    except UserError:  # recorded by another version
        return None
    return 4.0 * copies * (shape.draft_slot + shape.draft_head)


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
        *(Column(phase, "share", "share of the adapted arm's time") for phase in PHASES),
        Column("ms", "milliseconds", "update"), Column("tokens between", "rate", "update"),
        Column("outer, ms a token", "milliseconds"),
        Column("MFLOP a token", "count", "from shapes"), Column("MB moved a token", "rate", "from shapes"),
        Column("weights", "bytes", "memory from shapes"), Column("learner", "bytes", "memory from shapes"),
    )  # fmt: skip
    notes = (
        "From shapes: weights times what was counted, without attention over caches and padding. A learner's memory: "
        "its copies of what it trains, and its window of positions; the turns that one between requests keeps not.",
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
    shares = [_ratio(took[f"adapted_s_{phase}"].sum(), whole, len(took)) for phase in PHASES]
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
    config, shape, tokens = runs.iloc[0]["config"], SHAPES.get(target), pool["adapted_tokens"].sum()
    size = BYTES.get(config["target"].get("dtype", ""))
    if shape is None or size is None or not tokens or config["draft"]["name"] != "eagle3":
        return [Cell(None, n=len(pool), reason="no shapes are known of this pair")] * 4
    positions = float(updates["positions"].mean()) if len(updates) else 0.0
    work = Work(pool["adapted_rounds"].sum() / tokens, pool["updates_attempted"].sum() / tokens, positions)
    operations = arithmetic(shape, config["decode"], work)
    moved = traffic(shape, config["decode"], work, size)
    weights, learner = memory(shape, size, config["adapter"])
    found = (operations and operations / 1e6, moved and moved / 1e6, weights, learner)
    return [
        Cell(value, n=len(pool), reason=None if value is not None else "not known from shapes") for value in found
    ]


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
                        labels = (pair_name(pair, pools), f"{temperature:g}", name, f"{low + 1} to {high}")
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
    """How many conversations show a gain of each size, on the noise that the runs of each workload had."""
    pools, rows = Pools(data), []
    for pair in pools.pairs():
        for workload in pools.values("workload"):
            for temperature in temperatures(pools):
                place = pair | {"workload": workload, "temperature": temperature}
                names = pools.values("adapter", **place)
                for name in [*(["fixed"] if "fixed" in names else []), *ordered(names)]:
                    runs = set(pools.runs_of(**place, adapter=name)["run"])
                    labels = (pair_name(pair, pools), workload, f"{temperature:g}", name)
                    cells = _power_cells(pools.rows[pools.rows["run"].isin(runs)], gains)
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
