"""Runs made up for tests of tables and figures, with gains that are known."""

from __future__ import annotations

from itertools import count, islice
from typing import Any

import numpy as np

from tracedraft.analysis.frames import Counted, frames, joined, tables_of
from tracedraft.analysis.schema import Runs
from tracedraft.workloads.prompts import is_dev

PHASES = {"prefill": 0.1, "propose": 0.3, "verify": 0.5, "observe": 0.02, "update": 0.05, "other": 0.03}
HARDWARE = {"cpu": "CPU A", "logical_cores": 2, "gpus": []}
DEPTH = 5


def run(
    workload: str = "aime24",
    adapter: str = "reset",
    *,
    experiment: str = "eight_workloads",
    target: str = "smollm2-135m",
    temperature: float = 0.7,
    seed: int = 0,
    order: int = 0,
    n: int = 12,
    measure: str = "time",
    gain: float = 1.1,
    speedup: float = 1.05,
    noise: float = 0.02,
    domains: list[str] | None = None,
    switches: list[int] | None = None,
    outer: list[dict[str, Any] | None] | None = None,
    hardware: dict[str, Any] = HARDWARE,
    versions: dict[str, str] | None = None,
    mismatches: int = 0,
    settings: dict[str, Any] | None = None,
    split: str = "test",
    complete: bool = True,
    plain: bool = False,
    tokens: int = 256,
    threads: int = 2,
    commit: str = "0123456789abcdef",
    dirty: bool = False,
) -> Counted:
    """One run whose arms differ by these gains, give or take the noise.

    Args:
        settings: of the adapter.
        domains: of the conversations, in order.
        switches: where the stream passes from one source to the next.
    """
    random = np.random.default_rng([len(workload) + 7 * seed + 31 * order, len(adapter), int(10 * temperature)])
    scope = {"scope": "stream" if "persistent" in adapter else "conversation"}
    inner = {"lr": 0.03, "optimizer": "sgd", "form": "dense", "window": 64, "max_rows": 256, **scope}
    has_outer = adapter.split("_")[0] in ("osd", "optimistic", "ensemble")
    own = {"outer": {"lr": 1e-4, "warm_up": 0}, "inner": inner} if has_outer else inner
    config = {
        "target": {"name": target, "dtype": "bfloat16"},
        "draft": {"name": "eagle3"},
        "adapter": {"name": adapter, **own, **(settings or {})},
        "workload": {"name": workload, "seed": order, "split": split, "limit": n},
        "decode": {"name": "chain", "chain_length": DEPTH, "top_p": 0.95, "max_new_tokens": tokens}
        | {"temperature": temperature},
        "seed": seed,
        "measure": measure,
        "plain": plain,
        "threads": 2,
    }  # fmt: skip
    attempt = {
        "fingerprint": " ".join(
            map(str, (workload, adapter, temperature, seed, order, measure, experiment, settings))
        ),
        "hardware": hardware,
        "git": {"commit": commit, "dirty": dirty},
        "versions": versions or {"python": "3.11", "torch": "2.13"},
        "torch_threads": threads,
        "started": "2026-01-01T00:00:00+00:00",
        "target_weights": {"sha256": "t"},
        "draft_weights": {"sha256": "d"},
        "data": {"sha256": "p", "switches": switches},
    }
    ids = (id for id in (f"{workload}/{i}" for i in count()) if is_dev(id) == (split == "dev"))
    prompts = list(islice(ids, n))
    rows = [
        _row(i, prompts[(i + 5 * order) % n], random, gain, speedup, noise, measure, domains, outer, plain)
        for i in range(n)
    ]
    rows[0]["mismatches"] = mismatches
    header = {
        "fingerprint": attempt["fingerprint"], "folder": f"{workload}_{adapter}_{temperature}_{seed}_{order}",
        "experiment": experiment, "config": config, "attempts": [attempt],
    }  # fmt: skip
    return Counted(header, rows, f"runs/{header['folder']}", "records", complete)


def _row(i, id, random, gain, speedup, noise, measure, domains, outer, plain) -> dict[str, Any]:
    tokens = int(random.integers(60, 240))
    tau = 1.5 * float(np.exp(random.normal(0, noise)))
    seconds = tokens / 60
    arms = {
        "fixed": _arm(tokens, tau, seconds, measure),
        "adapted": _arm(tokens, tau * gain, seconds / speedup * float(np.exp(random.normal(0, noise))), measure),
    }
    if plain:
        arms["plain"] = _arm(tokens, 1.0, 1.3 * seconds, measure)
    updates = tokens // 12
    filled = {name: [0.5] * updates for name in ("loss", "grad_norm", "vocab_mass", "drift")}
    empty = {name: [None] * updates for name in ("held_out_before", "held_out_after")}
    fields = {"turn": [0] * updates, "round": [8 * (u + 1) for u in range(updates)], "committed": [True] * updates,
              "reason": [""] * updates, "positions": [64] * updates}  # fmt: skip
    return {
        "index": i, "id": id, "domain": domains[i] if domains else "math", "occurrence": 0, "position": i,
        "refused": None, "turns": 1, "arms": arms, "same": True, "paired": None, "audited": tokens, "mismatches": 0,
        "near_ties": 0, "arms_differ": 0, "unexplained": 0, "ngrams": tokens - 7, "repeated_8gram": tokens // 10,
        "longest": tokens, "ended": {"eos": 1}, "updates": fields | filled | empty, "drift": {"weight": 0.01 * i},
        "outer": outer[i] if outer else None,
    }  # fmt: skip


def _arm(tokens: int, tau: float, seconds: float, measure: str) -> dict[str, Any]:
    rounds = round(tokens / tau)
    accepted = tokens - rounds
    survivals = [round(accepted * 0.6 * 0.4**d) for d in range(DEPTH)]
    return {
        "tokens": tokens,
        "rounds": rounds,
        "accepted": accepted,
        "trials": [rounds, *survivals[:-1]],
        "survivals": survivals,
        "seconds": {**{p: share * seconds for p, share in PHASES.items()}, "outer": 0.0}
        if measure == "time"
        else None,
    }


def runs(*counted: Counted) -> Runs:
    return frames(joined([tables_of(each, str(i), None) for i, each in enumerate(counted)]), [])


def at(table, *labels):
    """Cells of a row by the title of their column."""
    (row,) = [row for row in table.rows if row.labels[-len(labels) :] == labels]
    return {f"{c.group}: {c.title}" if c.group else c.title: x for c, x in zip(table.columns, row.cells, strict=True)}
