"""Settings side by side, in whatever sweeps vary them."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tracedraft.analysis.pooling import Pools, settings, speedup, tau, tau_gain, where
from tracedraft.analysis.schema import Runs
from tracedraft.analysis.tables import Cell, Column, Row, Table, cell
from tracedraft.report import varied


def settings_table(data: Runs) -> Table:
    """A line a learner with its settings, in experiments that vary or try some; a group of columns a workload."""
    runs = pd.concat([_told(alike) for _, alike in data.runs.groupby("experiment")] or [data.runs.assign(told="")])
    tried = runs.groupby("experiment")["told"].transform(lambda told: (told != "").any()) | (runs["split"] == "dev")
    runs = runs[tried.astype(bool)].sort_values(
        ["experiment", "target", "adapter", "temperature", "learning_rate", "told"]
    )
    pools = Pools(where(data, data.runs["run"].isin(set(runs["run"]))))
    workloads, rows = pools.values("workload"), []
    keys = ["experiment", "target", "adapter", "temperature", "told"]
    for place, alike in runs.groupby(keys, sort=False):
        cells: list[Cell] = []
        for workload in workloads:
            pool = pools.rows[pools.rows["run"].isin(set(alike[alike["workload"] == workload]["run"]))]
            cells += [cell(tau(pool)), cell(tau_gain(pool)), cell(speedup(pool))]
        experiment, target, adapter, temperature, told = place
        labels = (str(experiment), str(target), str(adapter), f"{temperature:g}", str(told))
        rows.append(Row(labels, tuple(cells), str(experiment)))
    columns = [
        column
        for w in workloads
        for column in (
            Column("tau", "tau", w, f"{w} tau"),
            Column("gain", "gain", w),
            Column("speedup", "ratio", w),
        )
    ]
    notes = (f"Prompts: {', '.join(sorted(set(runs['split']))) or '—'}. Best of an experiment.",)
    labels = ("experiment", "target", "adapter", "T", "settings")
    return Table("settings", "Settings", labels, tuple(columns), tuple(rows), runs, notes, best_down=True)


def _told(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs of an experiment, with what tells each from others of its workload and adapter."""
    rows: list[dict[str, Any]] = []
    for workload, adapter, config in zip(runs["workload"], runs["adapter"], runs["config"], strict=True):
        kept = {key: value for key, value in settings(config).items() if key != "decode.temperature"}
        rows.append({"workload": workload, "adapter": adapter, "config": kept})
    return runs.assign(told=varied(rows))
