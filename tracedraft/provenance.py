"""Where a run comes from: versions, git state, hardware."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tracedraft import __version__
from tracedraft.config import PACKAGE


def provenance(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Where a run comes from, less what only the caller knows (data and weights sha256, fingerprint).

    Unknown facts are None; this never raises. The host's name is left out on purpose: records get published.

    Args:
        argv: the user's command, where that is not this process's.
    """
    import psutil
    import torch  # here, since tables read records without them

    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": list(sys.argv if argv is None else argv),
        "versions": {"python": platform.python_version(), "tracedraft": __version__}
        | {"torch": torch.__version__}  # which says the build, as a wheel's metadata need not
        | {name: _version(name) for name in ("transformers", "hydra-core", "wandb")},
        "git": own_code(),
        "hardware": {
            "platform": platform.platform(),
            "cpu": _cpu_model(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "physical_cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "torch_threads": torch.get_num_threads(),
    }


@functools.cache
def own_code() -> dict[str, Any]:
    """This package's checkout when it was first asked for: what changes later is not what this process runs."""
    return git_state(PACKAGE.parent)


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
