"""The run directory: what a run leaves on disk, how it is read back, and the summary made from its counts.

A run directory holds ``config.yaml`` (resolved), ``conversations.jsonl`` (one record a line, in order) and
``summary.json``. This is the source of truth; everything else that shows a run is made from it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tracedraft import __version__
from tracedraft.config import PACKAGE
from tracedraft.errors import UserError
from tracedraft.meter import PHASES

CONFIG, CONVERSATIONS, SUMMARY = "config.yaml", "conversations.jsonl", "summary.json"
NGRAM = 8


class TruncatedRecord(UserWarning):
    """The last line of a file was cut short, as a crash leaves it, and was dropped."""


class RunDir:
    """One run's folder, owned by one process. Made by ``create``; use it as a context manager."""

    def __init__(self, path: Path, lines: Any):
        self.path = path
        self._lines = lines

    @classmethod
    def create(cls, path: Path, config: dict[str, Any]) -> RunDir:
        """Make the folder, write ``config.yaml`` and open ``conversations.jsonl``.

        Args:
            path: the folder; it may exist, but hold no run.
            config: the composed config; interpolations are resolved.

        Raises:
            UserError: the folder holds a run already, or can't be written.
        """
        path = Path(path)
        text = OmegaConf.to_yaml(OmegaConf.create(config), resolve=True)
        refuse_existing(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Exclusive creation decides between two runs that both found the folder empty.
            with open(path / CONFIG, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            lines = open(path / CONVERSATIONS, "xb", buffering=0)  # noqa: SIM115
        except FileExistsError as error:
            raise UserError(f"{path} already holds a run: {_CHOOSE}") from error
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path, lines)

    def append(self, record: dict[str, Any]) -> None:
        """Add one record to ``conversations.jsonl``; it is on the disk when this returns.

        Raises:
            ValueError: the record holds NaN or infinity, which JSON has not; nothing is written.
            UserError: the disk refused it; what it took of the line is cut off again.
        """
        try:
            line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
        except ValueError as error:
            raise ValueError(f"{self.path / CONVERSATIONS}: record {record.get('id')!r}: {error}") from error
        data = line.encode()
        before = os.fstat(self._lines.fileno()).st_size
        try:
            if self._lines.write(data) != len(data):
                raise OSError(None, "the disk took a part of the line only")
            os.fsync(self._lines.fileno())
        except OSError as error:
            self._lines.seek(before)
            self._lines.truncate(before)
            raise _unwritable(self.path / CONVERSATIONS, error) from error

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``: a reader finds all of it or none.

        Raises:
            ValueError: the summary holds NaN or infinity.
            UserError: the disk refused it; an earlier summary stays as it was.
        """
        file = self.path / SUMMARY
        text = json.dumps(summary, allow_nan=False, indent=1) + "\n"
        try:
            write_atomic(file, text)
        except OSError as error:
            raise _unwritable(file, error) from error

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_existing(path: Path) -> None:
    """Raises UserError when a run could not be recorded at ``path`` without touching what is there."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a folder: {_CHOOSE}")
    if any(os.path.lexists(path / name) for name in (CONVERSATIONS, SUMMARY, CONFIG)):
        raise UserError(f"{path} already holds a run: {_CHOOSE}")


_CHOOSE = "choose another hydra.run.dir (hydra.sweep.dir in a sweep)"


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} can't be written ({error.strerror}): free space there, or {_CHOOSE}")


def write_atomic(path: Path, text: str) -> None:
    """Put ``text`` at ``path`` in one step: after a crash the file is the old one or the new one, whole.

    Raises:
        OSError: the disk refused it; no temporary file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_conversations(path: Path) -> list[dict[str, Any]]:
    """Read the records of a run directory (or of the JSONL file itself), in order.

    A last line that a crash cut short is dropped with a ``TruncatedRecord`` warning.

    Raises:
        UserError: no such file, or a line that is not one JSON object; the message names file and line.
    """
    path = Path(path)
    file = path / CONVERSATIONS if path.is_dir() else path
    lines = _read_bytes(file).split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        ended = number < len(lines)
        if not ended and not line:
            break
        try:
            records.append(_parse_object(line))
        except ValueError as error:
            if ended:
                raise UserError(f"{file}:{number}: not a record ({error}): restore the run") from error
            warnings.warn(f"{file}:{number}: cut short, dropped", TruncatedRecord, stacklevel=2)
    return records


def read_summary(path: Path) -> dict[str, Any]:
    """Read ``summary.json`` of a run directory (or the file itself).

    Raises:
        UserError: no such file, or not one JSON object.
    """
    path = Path(path)
    file = path / SUMMARY if path.is_dir() else path
    try:
        return _parse_object(_read_bytes(file))
    except ValueError as error:
        raise UserError(f"{file}: not a summary ({error}): restore the run") from error


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} can't be read ({error.strerror}): give the folder of a run") from error


def _parse_object(text: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


# Provenance


def provenance() -> dict[str, Any]:
    """Where a run comes from, less what only the caller knows (data and weights sha256, fingerprint).

    Unknown facts are None; this never raises. The host's name is left out on purpose: records get published.
    """
    import psutil
    import torch  # here, since tables read records without them

    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": list(sys.argv),
        "versions": {"python": platform.python_version(), "tracedraft": __version__}
        | {name: _version(name) for name in ("torch", "transformers", "hydra-core", "wandb")},
        "git": git_state(PACKAGE.parent),
        "hardware": {
            "platform": platform.platform(),
            "cpu": _cpu_model(),
            "physical_cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "torch_threads": torch.get_num_threads(),
    }


def git_state(root: Path) -> dict[str, Any]:
    """Commit and dirtiness of the checkout with its top at ``root``; None with a ``reason`` without one."""

    def git(*args: str) -> str:
        # Without these variables git looks at `root` alone, not at the repository of a calling hook.
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        command = ["git", "--no-optional-locks", "-C", str(root), *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        top = Path(git("rev-parse", "--show-toplevel"))
        if top.resolve() != root.resolve():
            return {"commit": None, "dirty": None, "reason": "installed inside another repository"}
        commit = git("rev-parse", "--verify", "HEAD")
        return {"commit": commit, "dirty": bool(git("status", "--porcelain")), "reason": None}
    except subprocess.CalledProcessError as error:
        reason = next(iter(error.stderr.splitlines()), "git failed").removeprefix("fatal: ")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = f"git can't be run: {type(error).__name__}"
    return {"commit": None, "dirty": None, "reason": reason}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


# Aggregation


def summarise(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a run, from counts summed over all its turns (micro averages unless named otherwise).

    Top-level numbers are the adapted arm's, those under ``fixed`` the fixed arm's. Times are in seconds,
    ``tokens_per_s`` is generated tokens over the wall time of serving. What can't be measured is None, and
    ``null_reasons`` says why by dotted key.

    Args:
        records: conversation records as ``measure.py`` writes them.
    """
    records = list(records)
    turns = [turn for record in records for turn in record["turns"]]
    refused = [record["id"] for record in records if record["refused"] is not None]
    adapted, reasons = _summarise_arm([turn["arms"]["adapted"] for turn in turns])
    fixed, fixed_reasons = _summarise_arm([turn["arms"]["fixed"] for turn in turns])
    paired, paired_reasons = _compare_arms(turns)
    return {
        **adapted,
        **paired,
        "conversations": len(records),
        "turns": len(turns),
        "refused": {"count": len(refused), "ids": refused},
        "fixed": fixed,
        "null_reasons": reasons | {f"fixed.{k}": v for k, v in fixed_reasons.items()} | paired_reasons,
    }


def _summarise_arm(responses: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    rounds = sum(r["rounds"] for r in responses)
    accepted = sum(r["accepted"] for r in responses)
    tokens = sum(len(r["tokens"]) for r in responses)
    wall = sum(_serving(r) for r in responses)
    taus = [(r["accepted"] + r["rounds"]) / r["rounds"] for r in responses if r["rounds"]]
    trials = _sum_by_depth(r["trials"] for r in responses)
    survivals = _sum_by_depth(r["survivals"] for r in responses)
    depths = list(zip(survivals, trials, strict=True))
    grams, repeated = _ngrams(r["tokens"] for r in responses)
    updates = [update for r in responses for update in r["updates"]]
    numbers = {
        "tau": _ratio(accepted + rounds, rounds),
        "macro_tau": _ratio(sum(taus), len(taus)),
        "tokens": tokens,
        "tokens_per_s": _ratio(tokens, wall),
        "rounds": rounds,
        "accepted": accepted,
        "acceptance_by_depth": [_ratio(s, t) for s, t in depths] if depths else None,
        "repeated_8gram_share": _ratio(repeated, grams),
        "updates": {
            "attempted": len(updates),
            "committed": sum(u["committed"] for u in updates),
            "rolled_back": dict(Counter(u["reason"] for u in updates if not u["committed"])),
        },
        "seconds": {phase: sum(r["seconds"].get(phase, 0.0) for r in responses) for phase in PHASES},
    }
    why = {
        "tau": "no verification round",
        "macro_tau": "no verification round",
        "tokens_per_s": "no time was measured",
        "acceptance_by_depth": "no token was drafted",
        "repeated_8gram_share": f"no response of {NGRAM} tokens or more",
    }
    reasons = {key: text for key, text in why.items() if numbers[key] is None}
    untested = [str(depth) for depth, (_, t) in enumerate(depths, 1) if not t]
    if untested:
        reasons["acceptance_by_depth"] = f"no drafted token was tested at depth {', '.join(untested)}"
    return numbers, reasons


def _compare_arms(turns: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    pairs = [(turn["arms"]["fixed"], turn["arms"]["adapted"]) for turn in turns]
    same = [(f, a) for f, a in pairs if f["tokens"] == a["tokens"]]
    differ = len(pairs) - len(same)
    speedup = _ratio(sum(_serving(f) for f, _ in same), sum(_serving(a) for _, a in same))
    audited = sum(turn["lossless"]["audited"] for turn in turns)
    mismatches = sum(turn["lossless"]["mismatches"] for turn in turns)
    # Arms that differ can't both be the target's output, so they disprove it without an audit.
    lossless = False if mismatches or differ else (True if audited else None)
    numbers = {
        "speedup": speedup,
        "speedup_turns": len(same),
        "lossless": lossless,
        "audited": audited,
        "mismatches": mismatches,
        "arms_differ": differ,
    }
    reasons = {}
    if speedup is None:
        reasons["speedup"] = "no time was measured" if same else "no turn with the same tokens in both arms"
    if lossless is None:
        reasons["lossless"] = "nothing was audited"
    return numbers, reasons


def _serving(response: dict[str, Any]) -> float:
    # Outer learning happens between requests: it is no part of the throughput of serving them.
    return sum(seconds for phase, seconds in response["seconds"].items() if phase != "outer")


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _sum_by_depth(counts: Iterable[list[int]]) -> list[int]:
    return [sum(depth) for depth in zip_longest(*counts, fillvalue=0)]


def _ngrams(responses: Iterable[list[int]]) -> tuple[int, int]:
    """How many n-grams the responses hold, and how many of them stood earlier in the same response."""
    total = distinct = 0
    for tokens in responses:
        grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return total, total - distinct
