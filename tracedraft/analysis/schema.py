"""The three frames that tables are made from, and nothing else: one row a run, a conversation, an update.

Counts and seconds only; ratios are made where they are shown, from sums. What was not measured is NaN, or None in
columns of objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracedraft.meter import PHASES

if TYPE_CHECKING:
    import pandas as pd

Columns = dict[str, tuple[str, str]]  # name: (dtype, meaning)

SERVING = tuple(phase for phase in PHASES if phase != "outer")  # of which a conversation's own seconds are the sum
ARMS = ("fixed", "adapted", "plain")  # the last decodes without a draft; its columns are NaN in runs without it

RUNS: Columns = {
    "run": ("str", "its fingerprint, the key of the other frames; with -2, -3 … where several runs share one"),
    "fingerprint": ("str", "hash of all that can change its result, but not its timing"),
    "name": ("str", "of its folder"),
    "path": ("str", "where it was read"),
    "experiment": ("str", "name of its sweep, which is its W&B group; single"),
    "target": ("str", ""),
    "draft": ("str", ""),
    "adapter": ("str", ""),
    "workload": ("str", ""),
    "decode": ("str", ""),
    "temperature": ("float64", "of decoding; 0 is greedy"),
    "top_p": ("float64", ""),
    "max_new_tokens": ("int64", "most tokens of a response"),
    "seed": ("int64", "of the sampling noise and of the adapter's draws"),
    "order": ("int64", "workload.seed: the order of the conversations"),
    "split": ("str", "all, dev or test"),
    "test_only": ("object", "list: names of its workloads that may not be used for tuning"),
    "switches": ("object", "places at which a stream passes from one source to the next; None without such places"),
    "measure": ("str", "time or acceptance; the latter has no seconds"),
    "threads": ("float64", "CPU threads that torch used; NaN where attempts differ"),
    "workers": ("float64", "processes at work side by side; NaN where attempts differ"),
    "hardware": ("str", "CPU, cores, GPUs; those of several attempts with / between them"),
    "code": ("str", "commit, + with uncommitted changes; those of several attempts with / between them"),
    "versions": ("str", "of Python and the libraries; those of several attempts with / between them"),
    "stateful": (
        "bool",
        "what the adapter learns outlasts a conversation: they depend on each other",
    ),
    "lossless": ("object", "True: audited, all explained. False: disproved. None: nothing was audited"),
    "audited": ("int64", "tokens"),
    "mismatches": ("int64", "tokens that are not the target's and no near-tie"),
    "near_ties": ("int64", "tokens that rounding explains"),
    "complete": ("bool", "it finished"),
    "conversations": ("int64", ""),
    "source": ("str", "wandb-offline, wandb-api or records"),
    "learning_rate": ("float64", "adapter.lr, else adapter.outer.lr, else adapter.inner.lr; NaN without one"),
    "config": ("object", "dict: the resolved config, less what says where files lie"),
    "attempts": ("object", "list of dicts: provenance of each process that worked on it"),
}

_COUNTS: Columns = {
    "tokens": ("int64", "generated"),
    "rounds": ("int64", "S"),
    "accepted": ("int64", "A: tau is (A + S) / S"),
    "seconds": ("float64", "of serving: all phases but outer"),
    "outer_seconds": ("float64", "of learning between requests"),
}
_DEPTHS: Columns = {
    "trials": ("object", "list by depth 1, 2 …: rounds in which a drafted token was tested there"),
    "survivals": ("object", "list by depth: rounds in which one was accepted there"),
}


def _of_arms(prefix: str, columns: Columns) -> Columns:
    """Columns of each arm; what may be missing needs a dtype that has NaN."""
    found = {}
    for arm in ARMS:
        for name, (dtype, text) in columns.items():
            whole = dtype == "int64" and not (prefix or arm == "plain")
            found[f"{prefix}{arm}_{name}"] = ("int64" if whole else dtype.replace("int64", "float64"), text)
    return found


CONVERSATIONS: Columns = {
    "run": ("str", ""),
    "index": ("int64", "its place in the run"),
    "id": ("str", ""),
    "domain": ("str", ""),
    "occurrence": ("int64", "earlier showings in the stream"),
    "position": ("int64", "in the stream"),
    "refused": ("bool", "a turn was too long for the target's context, and ended it"),
    "turns": ("int64", "answered"),
    **_of_arms(
        "",
        _COUNTS | {f"s_{phase}": ("float64", "seconds") for phase in SERVING} | _DEPTHS,
    ),
    "same": ("bool", "both arms said the same in every turn, and were paired"),
    # What ratios of the two arms are made of: turns in which both said the same; NaN without one. In ``plain`` also
    # NaN where that arm said something else in one of them.
    **_of_arms("paired_", _COUNTS),
    "audited": ("int64", "tokens"),
    "mismatches": ("int64", ""),
    "near_ties": ("int64", ""),
    "arms_differ": ("int64", "paired turns in which the arms said different things"),
    "unexplained": ("int64", "of those, turns without a near-tie"),
    "updates_attempted": ("int64", ""),
    "updates_committed": ("int64", ""),
    "ngrams": ("int64", "8-grams in the adapted arm's responses"),
    "repeated_8gram": ("int64", "of those, the ones that stood earlier in the same response"),
    "longest": ("int64", "tokens of its longest response"),
    "ended": ("object", "dict: responses by what ended them: eos, limit or context"),
    "drift": ("object", "dict: distance of each trained tensor from its start, relative, after the conversation"),
    "outer": ("object", "dict that describes the outer update which followed; None without one"),
}

UPDATES: Columns = {
    "run": ("str", ""),
    "conversation": ("int64", "index of the conversation"),
    "turn": ("int64", ""),
    "round": ("int64", "verification rounds finished in the response"),
    "committed": ("bool", ""),
    "reason": ("str", "why it was rolled back; empty when committed"),
    "positions": ("int64", "that carried loss"),
    "loss": ("float64", "before the step. This and what follows: six digits"),
    "grad_norm": ("float64", "before clipping"),
    "vocab_mass": ("float64", "mean target probability inside the draft vocabulary"),
    "held_out_before": ("float64", "loss on held-out positions"),
    "held_out_after": ("float64", ""),
    "drift": ("float64", "largest relative step of a trained tensor"),
}


@dataclass(frozen=True)
class Runs:
    """What was read.

    Attributes:
        runs, conversations, updates: frames with the columns of ``RUNS``, ``CONVERSATIONS`` and ``UPDATES``.
        problems: (path or id of a run, what is wrong with it), of all that was not read as it should have been.
        left_out: (path or id of a run, why), of what ``pooling.chosen`` did not choose of the experiments given.
    """

    runs: pd.DataFrame
    conversations: pd.DataFrame
    updates: pd.DataFrame
    problems: list[tuple[str, str]]
    left_out: tuple[tuple[str, str], ...] = ()
