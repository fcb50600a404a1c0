"""What goes into which panel of a figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from tracedraft.analysis.paper import ordered, pair_name, temperatures, with_adapters
from tracedraft.analysis.pooling import Pools, where
from tracedraft.analysis.related import varied
from tracedraft.analysis.schema import Runs
from tracedraft.errors import UserError

MOST = 6  # panels, beyond which a figure can't be read

STEPS = ("adapter.lr", "adapter.outer.lr")
PLACE = ("workload", "adapter", "temperature")

Panel = dict[str, pd.DataFrame]  # pool by adapter


def by_temperature(data: Runs, adapters: Sequence[str]) -> dict[str, Panel]:
    """A panel a pair and temperature, all workloads together."""
    pools, panels = Pools(data), {}
    for pair in pools.pairs():
        for temperature in temperatures(pools):
            place = pair | {"temperature": temperature, "workload": pools.values("workload")}
            of = {name: pools.of(**place, adapter=name) for name in adapters}
            if of := {name: pool for name, pool in of.items() if len(pool)}:
                panels[f"{pair_name(pair, pools)}, T = {temperature:g}"] = of
    return panels


def by_stream(data: Runs, adapters: Sequence[str]) -> dict[str, Panel]:
    """A panel a stream whose domain changes, pair and temperature; the first ``MOST``."""
    pools, panels = Pools(with_adapters(data, adapters)), {}
    for pair in pools.pairs():
        for stream in pools.values("workload"):
            for temperature in temperatures(pools):
                place = pair | {"workload": stream, "temperature": temperature}
                of = {name: pools.of(**place, adapter=name) for name in ordered(pools.values("adapter", **place))}
                if of and pd.concat(of.values())["domain"].nunique() > 1:
                    panels[f"{stream}, {pair_name(pair, pools)}, T = {temperature:g}"] = of
    return dict(list(panels.items())[:MOST])


def by_step(data: Runs) -> dict[str, dict[str, dict[float, pd.DataFrame]]]:
    """Pools by step size, by workload; a panel an experiment and adapter in which that alone varies.

    One whose runs differ in more is there without pools.
    """
    panels: dict[str, dict[str, dict[float, pd.DataFrame]]] = {}
    runs, places = varied(data, STEPS)
    pools, mixed = Pools(dataclasses.replace(where(data, data.runs["run"].isin(runs["run"])), runs=runs)), set()
    for place, value in places:
        title = f"{place['experiment']}: {place['adapter']}, T = {place['temperature']:g}"
        panel = panels.setdefault(title, {})
        for workload in pools.values("workload", **place):
            try:
                pool = pools.of(**place, _value=value, workload=workload)
            except UserError:
                mixed.add(title)
                continue
            if len(pool):
                panel.setdefault(workload, {})[float(value)] = pool
    return {title: {} if title in mixed else panel for title, panel in list(panels.items())[:MOST]}


def with_base_learners(data: Runs) -> Panel:
    """The conversations of runs that had base learners, one of each workload, adapter and temperature."""
    found: Panel = {}
    for (workload, adapter, temperature, *_), pool in Pools(data).rows.groupby([*PLACE, "order", "seed", "run"]):
        if any(isinstance(block, dict) and block.get("learners") for block in pool["outer"]):
            found.setdefault(f"{workload}, {adapter}, T = {temperature:g}", pool)
    return dict(list(found.items())[:MOST])


def learned_blocks(pool: pd.DataFrame) -> list[dict[str, Any]]:
    """What a run's learner recorded after its blocks, of those with base learners."""
    ordered = pool.sort_values("position")["outer"]
    return [block for block in ordered if isinstance(block, dict) and block.get("learners")]


def block_losses(pool: pd.DataFrame) -> tuple[list[int], np.ndarray, np.ndarray, Sequence[float]]:
    """(blocks [n], loss of what is served [n], of each base learner [n, K], step sizes [K]), before learning it."""
    blocks = learned_blocks(pool)
    base = [block["learners"]["losses"] for block in blocks]
    learner = [block["loss"] for block in blocks]
    numbers = [block["block"] for block in blocks]
    return numbers, np.array(learner, dtype=float), np.array(base, dtype=float), blocks[0]["learners"]["lrs"]
