"""What a worker does: one run after another, with what they share kept loaded."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tracedraft.errors import UserError
from tracedraft.files import Busy

LOG = "run.log"
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}


class Worker:
    """Lives in a process of its own, which Ray starts.

    Args:
        threads: of its CPU products; set before torch is imported, which reads them then.
    """

    def __init__(self, threads: int):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ["OMP_NUM_THREADS"] = str(threads)

    def ready(self) -> dict[str, Any]:
        """Where it is, once it is, with the imports done that the first run would wait for."""
        import ray

        import tracedraft.measure  # noqa: F401
        from tracedraft.provenance import own_code

        own_code()
        context = ray.get_runtime_context()
        return {"status": "ready", "node": context.get_node_id()[:8], "gpus": context.get_accelerator_ids()["GPU"]}

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        return serve(task)


def serve(task: dict[str, Any]) -> dict[str, Any]:
    """Do one run. Returns plain data, since not every exception survives the way between processes.

    Args:
        task: ``config``, ``folder``, ``sweep`` (its name), ``argv`` (its command), ``workers``, and ``marker``, a
            file in the sweep's folder that tells whether this machine sees it.

    Returns:
        ``status`` done, failed, or busy, where another process is at this very run, and the seconds of ``work``.
        Done: ``speedup`` and ``loads``, how many targets this process has loaded so far. Failed: ``reason`` in one
        line, and ``retry``, whether another attempt could go better. ``files`` by name where the sweep's folder lies
        on another machine.
    """
    shared = Path(task["marker"]).exists()
    folder = Path(task["folder"])
    if not shared:
        folder = Path(tempfile.gettempdir()) / f"tracedraft-{Path(task['marker']).name}" / folder.name
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with logged(folder / LOG):
        result = _attempt(task, folder)
    result["work"] = round(time.monotonic() - began, 4)
    if not shared:
        result["files"] = _sent_home(folder, result["status"] == "done")
    return result


def _sent_home(folder: Path, done: bool) -> dict[str, bytes]:
    """What a run left, by name; W&B's folder is a mirror, and stays. Of one that is not done only what it said: where
    it is tried again, on this machine or another, half a record without its learner would be in the way."""
    files = [path for path in folder.iterdir() if path.is_file() and (done or path.name == LOG)]
    contents = {path.name: path.read_bytes() for path in files}
    if done:
        for path in files:
            path.unlink()
    return contents


def _attempt(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    from omegaconf import DictConfig, OmegaConf

    from tracedraft import measure as measuring

    cfg = OmegaConf.create(task["config"])
    assert isinstance(cfg, DictConfig)
    try:
        summary = measuring.measure(cfg, folder, task["sweep"], task["workers"], task["argv"])
        return {"status": "done", "speedup": summary["speedup"], "loads": measuring.loads}
    except Busy:
        return {"status": "busy"}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return {"status": "failed", "reason": str(error), "retry": False}
    except BaseException as error:  # SystemExit of a signal too: it is the run's end, not the worker's
        traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return {"status": "failed", "reason": reason, "retry": True}


@contextlib.contextmanager
def logged(file: Path) -> Iterator[None]:
    """Append all that this process prints to a file, by Python or below it."""
    with open(file, "a", encoding="utf-8", errors="replace", buffering=1) as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        try:
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                yield
        finally:
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
