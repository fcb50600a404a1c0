"""Tables in the layouts of the OnlineSPEC and OSD papers, filled as far as there are runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from tracedraft.analysis.paper import INNER, OUTER, RATES, ordered, pair_name, temperatures
from tracedraft.analysis.pooling import (
    Pools,
    alpha,
    compared,
    counted,
    fixed,
    over_plain,
    paired_seconds,
    rate,
    rate_beside,
    setting_of,
    speedup,
    tau,
    tau_gain,
    where,
)
from tracedraft.analysis.schema import Runs
from tracedraft.analysis.tables import Cell, Column, Row, Table, cell, text
from tracedraft.errors import UserError

SHORT = ("gsm8k", "spider", "code_search", "finance")  # what both papers report on
METHODS = (*INNER, *OUTER)
SD = "AvgLen is tau, ± its standard deviation over runs; speedup over the fixed draft, timed side by side."


def benchmarks(data: Runs, workloads: Sequence[str] = SHORT) -> Table:
    """OnlineSPEC's table 1: AvgLen and speedup by benchmark and method; a row group a pair and temperature."""
    data = where(data, data.runs["workload"].isin(workloads))
    pools, rows = compared(data), []
    for pair in pools.pairs():
        for temperature in temperatures(pools):
            group = (pair_name(pair, pools), f"{temperature:g}")
            places = [pair | {"workload": name, "temperature": temperature} for name in workloads]
            everything = [pools.of(**place) for place in places]
            first = (Cell(1.0) if len(fixed(p)) else _none() for p in everything)
            cells = [c for p, one in zip(everything, first, strict=True) for c in (_avg_len(fixed(p), "fixed"), one)]
            rows.append(Row((*group, "fixed"), tuple(cells), " ".join(group)))
            for method in methods(pools):
                of = [pools.of(**place, adapter=method) for place in places]
                cells = [c for p in of for c in (_avg_len(p), cell(speedup(p)))]
                rows.append(Row((*group, method), tuple(cells), " ".join(group)))
    columns = [
        c for name in workloads for c in (Column("AvgLen", "tau", name, name), Column("speedup", "ratio", name, name))
    ]
    columns = [dataclasses.replace(c, compare=f"{c.group} {c.title}") for c in columns]
    return Table("onlinespec_benchmarks", "OnlineSPEC's benchmarks: AvgLen and speedup by method",
                 ("pair", "T", "method"), tuple(columns), tuple(rows), data.runs, (SD,), best_down=True)  # fmt: skip


def methods(pools: Pools) -> list[str]:
    """Those of the papers, and whatever else was run."""
    return ordered([*METHODS, *(set(pools.values("adapter")) - set(METHODS))])


def _none() -> Cell:
    return Cell(None, reason="no run")


def _avg_len(pool: pd.DataFrame, arm: str = "adapted") -> Cell:
    """tau, with the standard deviation of the runs' own."""
    found = cell(tau(pool, arm))
    each = [tau(rows, arm).value for _, rows in counted(pool).groupby("run")]
    values = [value for value in each if value is not None]
    return dataclasses.replace(found, spread=float(np.std(values, ddof=1))) if len(values) > 1 else found


def targets(data: Runs, workload: str = "gsm8k") -> Table:
    """OnlineSPEC's tables 3, 4, 7: targets side by side on one benchmark, plain decoding first."""
    data = where(data, data.runs["workload"] == workload)
    pools, rows = compared(data), []
    for pair in pools.pairs():
        for temperature in temperatures(pools):
            place = pair | {"workload": workload, "temperature": temperature}
            group = (pair_name(pair, pools), f"{temperature:g}")
            every = fixed(pools.of(**place))
            plain_runs = len(paired_seconds(every, "plain"))
            plain = tuple(Cell(1.0, n=n) if n else _none() for n in (len(every), plain_runs))
            lines: list[tuple[str, tuple[Cell, ...]]] = [("plain", (*plain, cell(rate(every, "plain")), _none()))]
            level = rate(every, "fixed")
            own = (tau(every, "fixed"), over_plain(every, "fixed"), level)
            lines += [("fixed", (*map(cell, own), Cell(1.0) if len(every) else _none()))]
            for method in methods(pools):
                pool = pools.of(**place, adapter=method)
                ratio = speedup(pool)
                numbers = (tau(pool), over_plain(pool), rate_beside(level, ratio), ratio)
                lines.append((method, tuple(map(cell, numbers))))
            rows += [Row((*group, method), cells, " ".join(group)) for method, cells in lines]
    columns = (
        Column("AvgLen", "tau", compare="AvgLen"),
        Column("over plain decoding", "ratio", "speedup"),
        Column("tokens/s", "rate", compare="tokens/s"),
        Column("over fixed", "ratio", "speedup", "over fixed"),
    )
    title = f"Targets side by side: {workload}"
    labels = ("pair", "T", "method")
    notes = ("Plain decoding is timed with plain=true only.", RATES)
    return Table("onlinespec_targets", title, labels, columns, tuple(rows), data.runs, notes, best_down=True)


def training_time(data: Runs) -> Table:
    """OnlineSPEC's table 6: seconds with what learning between requests took counted."""
    data = where(data, data.runs["adapter"].str.startswith(OUTER) & (data.runs["measure"] == "time"))
    pools, rows = compared(data), []
    for pair in pools.pairs():
        for workload in pools.values("workload") or ["—"]:
            for temperature in temperatures(pools):
                place = pair | {"workload": workload, "temperature": temperature}
                for method in pools.values("adapter", **place) or ([*OUTER] if workload == "—" else []):
                    pool = paired_seconds(pools.of(**place, adapter=method), "adapted")
                    rows.append(_time_row((pair_name(pair, pools), workload, f"{temperature:g}", method), pool))
    columns = (
        Column("n"), Column("fixed", "seconds", "seconds"), Column("serving", "seconds", "seconds"),
        Column("training", "seconds", "seconds"), Column("serving", "ratio", "speedup over fixed"),
        Column("with training", "ratio", "speedup over fixed"),
    )  # fmt: skip
    labels = ("pair", "workload", "T", "method")
    return Table("onlinespec_training_time", "Time with training counted", labels, columns, tuple(rows), data.runs)


def _time_row(labels: tuple[str, ...], pool: pd.DataFrame) -> Row:
    if pool.empty:
        return Row(labels, (text(0), *(_none() for _ in range(5))), labels[1])
    seconds = [float(pool[f"paired_{name}"].sum()) for name in ("fixed_seconds", "adapted_seconds")]
    training = float(pool["adapted_outer_seconds"].fillna(0).sum())
    n = len(pool)
    numbers = (*(Cell(s, n=n) for s in (*seconds, training)), cell(speedup(pool)), cell(speedup(pool, training=True)))
    return Row(labels, (text(n), *numbers), labels[1])


def sensitivity(data: Runs, title: str, keys: Sequence[str]) -> Table:
    """What a setting does where it alone varies, on any prompts: OnlineSPEC's tables 5 and 8, OSD's ablations.

    Args:
        keys: dotted keys of a config that mean the same; the first one that a run has counts.
    """
    runs, places = varied(data, keys)
    pools = Pools(dataclasses.replace(where(data, data.runs["run"].isin(set(runs["run"]))), runs=runs))
    workloads, rows, mixed = pools.values("workload") or list(SHORT), [], set()
    for place, value in places:
        try:
            of = [pools.of(**place, _value=value, workload=name) for name in workloads]
        except UserError:
            mixed.add(f"{place['experiment']} with {place['adapter']}")
            continue
        cells = [cell(measured) for p in of for measured in (tau(p), tau_gain(p), speedup(p))]
        labels = (place["experiment"], place["target"], place["adapter"], f"{place['temperature']:g}", _shown(value))
        rows.append(Row(labels, tuple(cells), " ".join(labels[:-1])))
    if not rows:
        rows = [Row(("—",) * 5, tuple(_none() for _ in range(3 * len(workloads))))]
    columns = [
        column
        for w in workloads
        for column in (
            Column("tau", "tau", w, f"{w} tau"),
            Column("gain", "gain", w),
            Column("speedup", "ratio", w, f"{w} speed"),
        )
    ]
    labels = ("experiment", "target", "adapter", "T", keys[0].rpartition(".")[2])
    notes = [f"Runs that differ in {' or '.join(keys)}; prompts: {', '.join(sorted(set(runs['split']))) or '—'}."]
    if mixed:
        notes.append(f"Left out, since they differ in more than that: {', '.join(sorted(mixed))}.")
    return Table("sensitivity", title, labels, tuple(columns), tuple(rows), runs, tuple(notes), best_down=True)


Places = list[tuple[dict[str, Any], Any]]


def varied(data: Runs, keys: Sequence[str]) -> tuple[pd.DataFrame, Places]:
    """Runs of experiments that vary a setting of an adapter, with it as ``_value``.

    Returns:
        those runs, and in order what tells them apart but for the workload: columns of runs, and the setting.
    """
    runs = data.runs.assign(_value=[setting_of(config, keys) for config in data.runs["config"]])
    runs = runs[runs["_value"].notna()]
    groups = [alike for _, alike in runs.groupby(["experiment", "adapter"]) if alike["_value"].map(str).nunique() > 1]
    runs = pd.concat(groups) if groups else runs.iloc[:0]
    return runs, _places(runs)


def _places(runs: pd.DataFrame) -> Places:
    keys = ["experiment", "target", "draft", "decode", "adapter", "temperature"]
    found = {}
    for row in runs[[*keys, "_value"]].to_dict("records"):
        place = {str(key): row[key] for key in keys}
        found[(*place.values(), str(row["_value"]))] = (place, row["_value"])
    return [found[key] for key in sorted(found, key=lambda key: (key[:-1], _number(key[-1])))]


def _number(text: str) -> tuple[float, str]:
    try:
        return float(text), ""
    except ValueError:
        return float("inf"), text


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def alphas(data: Runs, workloads: Sequence[str] = SHORT) -> Table:
    """OSD's first table: acceptance rate of the fixed and of the learning draft by data set."""
    data = where(data, data.runs["workload"].isin(workloads))
    pools, rows = compared(data), []
    for pair in pools.pairs():
        for temperature in temperatures(pools):
            places = [pair | {"workload": name, "temperature": temperature} for name in workloads]
            group = (pair_name(pair, pools), f"{temperature:g}")
            every = [alpha(fixed(pools.of(**place)), "fixed") for place in places]
            rows.append(Row((*group, "fixed"), tuple(map(cell, every)), " ".join(group)))
            for method in methods(pools):
                found = [alpha(pools.of(**place, adapter=method)) for place in places]
                rows.append(Row((*group, method), tuple(map(cell, found)), " ".join(group)))
    columns = tuple(Column(name, "tau", "alpha", name) for name in workloads)
    notes = (
        "alpha: accepted over tested drafted tokens; with decode.acceptance=rejection OSD's sum of min(p, q) in "
        "expectation, with exact acceptance the target's share of the drafted token. The sum over the vocabulary, "
        "Σ min(p, q), is in no record.",
    )
    labels = ("pair", "T", "method")
    return Table(
        "osd_alpha",
        "OSD's acceptance rate by data set",
        labels,
        columns,
        tuple(rows),
        data.runs,
        notes,
        best_down=True,
    )
