"""From frames to the numbers of one cell: which conversations belong together, and what they say.

A *pool* is a frame of conversations, with the columns of their runs, that share a setting: one target, draft,
workload, adapter, decoding. Runs of a pool differ in seed, order, length, and in whether they were timed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tracedraft import statistics
from tracedraft.analysis.check import development, unread
from tracedraft.analysis.packed import ENDING
from tracedraft.analysis.schema import Runs
from tracedraft.errors import UserError
from tracedraft.statistics import Estimate

LENGTHS = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, float("inf"))
FREE = ("seed", "measure", "plain", "threads")  # of a config: what may differ between runs of one pool
FREE_OF_WORKLOAD = ("seed", "limit")
PAIR = ("target", "draft", "decode")
OF_RUNS = (
    "run", "name", "experiment", "target", "draft", "adapter", "workload", "decode", "temperature", "max_new_tokens",
    "seed", "order", "split", "measure", "stateful", "learning_rate", "switches",
)  # fmt: skip


def chosen(data: Runs, *experiments: str | tuple[str, ...], tuning: bool = False) -> Runs:
    """Finished runs on prompts that chose nothing; ``left_out`` names the others.

    Args:
        experiments: names, or beginnings of names, in the order of preference; those of a tuple together. The first
            that there are such runs of counts; all runs if there are none of any, such or others.
        tuning: on any prompts, for a table of settings.
    """
    reasons = _reasons(data, tuning)
    usable, asked = ~data.runs["run"].isin(reasons), pd.Series(False, index=data.runs.index)
    for names in experiments:
        named = data.runs["experiment"].map(lambda name: str(name).startswith(names))  # noqa: B023
        asked |= named
        if (usable & named).any():
            usable &= named
            break
    asked |= not asked.any()
    usable &= asked
    runs = data.runs[asked].sort_values(["experiment", "name", "run"])
    dropped = [(path, reasons[run]) for run, path in zip(runs["run"], runs["path"], strict=True) if run in reasons]
    others = set(data.runs["experiment"]) - set(runs["experiment"])
    lost = [(path, why) for path, why in unread(data) if _experiment(path) not in others]
    return dataclasses.replace(where(data, usable), left_out=(*lost, *dropped))


def _reasons(data: Runs, tuning: bool) -> dict[str, str]:
    """Why runs have no place in a table."""
    found = dict.fromkeys(data.runs.loc[~data.runs["complete"], "run"], "did not finish")
    if not tuning:
        asked = dict.fromkeys(data.runs.loc[data.runs["split"] == "dev", "run"], "on the development split")
        held = {run: f"{count} prompts of the development split" for run, count in development(data).items()}
        controls = dict.fromkeys(data.runs.loc[~data.runs["config"].map(sound), "run"], "a negative control")
        found = controls | asked | held | found
    return found


def sound(config: dict[str, Any]) -> bool:
    """Whether a learner between requests was taught what the target says."""
    return config["adapter"].get("outer", {}).get("fault", "none") == "none"


def _experiment(path: str) -> str:
    """Of a run that could not be read: the name of its packed file, or of the folder that its own lies in."""
    packed, ending, _ = path.partition(ENDING)
    return Path(packed).name if ending else Path(path).parent.name


def where(data: Runs, mask: pd.Series) -> Runs:
    """The part of all frames that belongs to some runs."""
    runs = data.runs[mask.astype(bool)]
    kept = set(runs["run"])
    return dataclasses.replace(
        data,
        runs=runs,
        conversations=data.conversations[data.conversations["run"].isin(kept)],
        updates=data.updates[data.updates["run"].isin(kept)],
    )


class Pools:
    """The pools of some runs, by what their runs have in common."""

    def __init__(self, data: Runs):
        # On the order depend sums of floats, and which of two repetitions counts.
        self.runs = data.runs.sort_values(["experiment", "name", "run"])
        rows = data.conversations.merge(data.runs[list(OF_RUNS)], on="run", how="inner", validate="many_to_one")
        self.rows = rows.sort_values(["run", "index"], ignore_index=True)

    def of(self, **equal: Any) -> pd.DataFrame:
        """Conversations of runs whose columns have these values; those of a list, any of them.

        Raises:
            UserError: they differ in more than runs of one adapter may.
        """
        runs = self.runs_of(**equal)
        for _, alike in runs.groupby(["adapter", "workload"]):
            check_one_setting(alike)
        return self.rows[self.rows["run"].isin(set(runs["run"]))]

    def runs_of(self, **equal: Any) -> pd.DataFrame:
        """Runs whose columns have these values, whatever else they differ in."""
        return self.runs[_matches(self.runs, equal)]

    def values(self, column: str, **equal: Any) -> list[Any]:
        """Different values of a column of runs, sorted."""
        return sorted(self.runs_of(**equal)[column].unique())

    def pairs(self) -> list[dict[str, str]]:
        """Target, draft and decoding of each pair that was measured; one of dashes if none was."""
        found = self.runs[list(PAIR)].drop_duplicates().sort_values(list(PAIR)).to_dict("records")
        return [{str(k): v for k, v in pair.items()} for pair in found] or [dict.fromkeys(PAIR, "—")]


def compared(data: Runs) -> Pools:
    """The pools of runs that are set side by side.

    Raises:
        UserError: runs of one pair, workload and temperature differ in more than their adapters.
    """
    for _, alike in data.runs.groupby([*PAIR, "workload", "temperature"]):
        check_one_setting(alike, any_adapter=True)
    return Pools(data)


def _matches(runs: pd.DataFrame, equal: dict[str, Any]) -> pd.Series:
    mask = pd.Series(True, index=runs.index)
    for column, value in equal.items():
        mask &= runs[column].isin(value if isinstance(value, list | tuple) else [value])
    return mask


def check_one_setting(runs: pd.DataFrame, any_adapter: bool = False) -> None:
    """Raises UserError when runs of one pool differ in more than they may, by the key that does.

    Args:
        any_adapter: adapters may differ, too.
    """
    if len(runs) < 2:
        return
    settings = [
        _setting(config, attempts[0]) for config, attempts in zip(runs["config"], runs["attempts"], strict=True)
    ]
    for key in sorted(set().union(*settings)):
        if any_adapter and key.startswith("adapter."):
            continue
        values = list(dict.fromkeys(json.dumps(setting.get(key)) for setting in settings))
        if len(values) > 1:
            first = runs.iloc[0]
            adapters, experiments = (", ".join(sorted(set(runs[name]))) for name in ("adapter", "experiment"))
            raise UserError(
                f"{key}={', '.join(values)}: runs of {first['workload']} at temperature {first['temperature']:g} "
                f"(adapters {adapters}; experiments {experiments}) differ in it, and can't stand side by side: give "
                "the folder of one of them by DIR=…"
            )


def setting_of(config: dict[str, Any], keys: Iterable[str]) -> Any:
    """The value under the first dotted key that a config has; None without one."""
    flat = flattened(config)
    return next((flat[key] for key in keys if flat.get(key) is not None), None)


def _setting(config: dict[str, Any], attempt: dict[str, Any]) -> dict[str, Any]:
    """What may not differ inside a pool, by dotted key."""
    # Of a stream the prompts served, and so their hash, depend on order and length.
    hashed = ("target_weights", "draft_weights", *(() if "sources" in config["workload"] else ("data",)))
    contents = {key: (attempt.get(key) or {}).get("sha256") for key in hashed}
    return settings({**config, "sha256": contents})


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """A config by dotted key, without what runs of one pool may differ in.

    A stream's sources take its seed and its limit for theirs.
    """
    free = tuple(f".{key}" for key in FREE_OF_WORKLOAD)
    return {
        key: value
        for key, value in flattened(config).items()
        if key not in FREE and not (key.startswith("workload.") and key.endswith(free))
    }


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """A config by dotted key."""
    return dict(_flat(config, ""))


def _flat(node: dict[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def counted(pool: pd.DataFrame) -> pd.DataFrame:
    """Conversations whose counts are measurements of their own: repetitions of a deterministic run are not."""
    if pool.empty:
        return pool
    keys = ["workload", "seed", "id", "occurrence"] + (["order", "position"] if pool["stateful"].any() else [])
    return pool.drop_duplicates(keys)


def fixed(pool: pd.DataFrame) -> pd.DataFrame:
    """The same conversations, each for itself: the fixed arm keeps nothing, whatever the other one does."""
    return pool.assign(stateful=False)


def paired_seconds(pool: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Timed conversations of which an arm said the same."""
    found = timed(pool)
    return found[found[f"paired_{arm}_seconds"] > 0]


def timed(pool: pd.DataFrame) -> pd.DataFrame:
    """Conversations with seconds, both arms saying the same in some turn."""
    return pool[(pool["measure"] == "time") & (pool["paired_fixed_seconds"] > 0)]


def paired(pool: pd.DataFrame) -> pd.DataFrame:
    """Conversations with counts that can be compared."""
    found = counted(pool)
    return found[found["paired_fixed_rounds"] > 0]


def by_tokens(pool: pd.DataFrame) -> list[tuple[tuple[float, float], pd.DataFrame]]:
    """Conversations by how many tokens they have: (above, up to), the last without end, and those in between."""
    tokens = pool["paired_fixed_tokens"]
    return [((low, high), pool[(tokens > low) & (tokens <= high)]) for low, high in pairwise(LENGTHS)]


def measure(rows: pd.DataFrame, columns: Iterable[str], ratio: statistics.Ratio) -> Estimate:
    """A ratio of summed columns, with an interval that respects how the learner connects conversations.

    A learner with a memory in fewer than ``ORDERS`` orders gets an interval over blocks, but no p-value.
    """
    counts = rows[list(columns)].to_numpy(float)
    prompts = rows["workload"] + "/" + rows["id"]
    if rows.empty or not rows["stateful"].iloc[0]:
        seeds = rows["seed"] if rows["seed"].nunique() > 1 else None
        return statistics.estimate(counts, ratio, prompts, seeds)
    streams = rows["workload"] + "/" + rows["seed"].astype(str) + "/" + rows["order"].astype(str)
    units = statistics.blocks(streams.tolist(), prompts.tolist(), rows["position"].tolist())
    orders = int(streams.groupby(rows["workload"]).nunique().min())
    found = statistics.estimate(counts, ratio, units, streams if orders > 1 else None)
    if found.low is None or orders >= statistics.ORDERS:
        return found
    return dataclasses.replace(found, p=None, reason=f"{orders} of {statistics.ORDERS} orders of the stream")


def tau(pool: pd.DataFrame, arm: str = "adapted") -> Estimate:
    rows = counted(pool)
    return _point(rows, [f"{arm}_accepted", f"{arm}_rounds"], statistics.tau)


def macro_tau(pool: pd.DataFrame, arm: str = "adapted") -> Estimate:
    """The mean of the conversations' own, in which a short one weighs as much as a long one."""
    rows = counted(pool)
    rows = rows[rows[f"{arm}_rounds"] > 0]
    if rows.empty:
        return Estimate(None, reason="no conversation")
    own = statistics.tau(rows[[f"{arm}_accepted", f"{arm}_rounds"]].to_numpy(float))
    return Estimate(float(own.mean()), n=len(rows))


def tau_gain(pool: pd.DataFrame) -> Estimate:
    """The adapted arm's tau over the fixed one's, on the same tokens."""
    names = [f"paired_{arm}_{name}" for arm in ("fixed", "adapted") for name in ("accepted", "rounds")]
    return measure(paired(pool), names, statistics.tau_gain)


def rate(pool: pd.DataFrame, arm: str = "adapted") -> Estimate:
    """Tokens a second."""
    return _point(timed(pool), [f"{arm}_tokens", f"{arm}_seconds"], statistics.first_over_second)


def rate_beside(fixed: Estimate, ratio: Estimate) -> Estimate:
    """Tokens a second of a learner: those of the fixed draft times its speedup.

    Fixed arms of different runs met a machine that was faster or slower; of each run only the ratio can be compared.
    """
    if fixed.value is None or ratio.value is None:
        return Estimate(None, n=ratio.n, reason=ratio.reason or fixed.reason)
    return Estimate(fixed.value * ratio.value, n=ratio.n)


def speedup(pool: pd.DataFrame, training: bool = False) -> Estimate:
    """Σ fixed seconds / Σ adapted seconds over the same tokens.

    Args:
        training: count what learning between requests took, too.
    """
    rows = timed(pool)
    if training:
        spent = rows["paired_adapted_seconds"] + rows["paired_adapted_outer_seconds"].fillna(0)
        rows = rows.assign(paired_adapted_seconds=spent)
    return measure(rows, ["paired_fixed_seconds", "paired_adapted_seconds"], statistics.first_over_second)


def over_plain(pool: pd.DataFrame, arm: str = "adapted") -> Estimate:
    """Σ seconds of plain decoding / Σ seconds of an arm, over the same tokens."""
    names = ["paired_plain_seconds", f"paired_{arm}_seconds"]
    return measure(paired_seconds(pool, "plain"), names, statistics.first_over_second)


def repeated(pool: pd.DataFrame) -> Estimate:
    """Share of the adapted arm's 8-grams that stood earlier in the same response."""
    return _point(counted(pool), ["repeated_8gram", "ngrams"], statistics.first_over_second)


def alpha(pool: pd.DataFrame, arm: str = "adapted") -> Estimate:
    """Share of tested drafted tokens that were accepted: what OSD's token acceptance rate is the expectation of."""
    rows = counted(pool)
    rows = rows[rows[f"{arm}_trials"].notna()]
    tested, survived = (float(rows[f"{arm}_{name}"].map(sum).sum()) for name in ("trials", "survivals"))
    return Estimate(survived / tested, n=len(rows)) if tested else Estimate(None, n=len(rows), reason=NOTHING)


NOTHING = "nothing was counted"


def over(pool: pd.DataFrame, baseline: pd.DataFrame, seconds: bool) -> Estimate:
    """What a learner gains over another learner on the same conversations, seeds and orders.

    Each was timed beside its own fixed arm, so the ratio of their speedups is taken: the machine's drift cancels.
    """
    keys = ["workload", "seed", "order", "position", "id", "occurrence"]
    first, second = (timed(p) if seconds else paired(p) for p in (baseline, pool))
    rows = first.drop_duplicates(keys).merge(second.drop_duplicates(keys), on=keys, suffixes=("_base", ""))
    if seconds:
        names = [f"paired_{arm}_seconds{of}" for of in ("_base", "") for arm in ("fixed", "adapted")]
        return measure(rows, names, _speedup_over)
    names = [f"paired_adapted_{name}{of}" for of in ("_base", "") for name in ("accepted", "rounds")]
    return measure(rows, names, statistics.tau_gain)


def _speedup_over(sums: Any) -> Any:
    """Of sums [..., (baseline's fixed, baseline's adapted, fixed, adapted)] seconds."""
    return (sums[..., 2] / sums[..., 3]) / (sums[..., 0] / sums[..., 1])


def _point(rows: pd.DataFrame, columns: list[str], ratio: Callable[[Any], Any]) -> Estimate:
    """A ratio of sums without an interval."""
    rows = rows[rows[columns].notna().all(axis=1)]
    if rows.empty:
        return Estimate(None, reason="no conversation")
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(ratio(rows[columns].to_numpy(float).sum(axis=0)))
    return Estimate(value, n=len(rows)) if np.isfinite(value) else Estimate(None, n=len(rows), reason=NOTHING)
