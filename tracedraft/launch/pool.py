"""Warm workers as Ray actors. Ray is imported when a sweep starts, and never for a single run."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracedraft.errors import UserError
from tracedraft.launch.plan import Run
from tracedraft.launch.spec import Division, Node, PoolSpec, held
from tracedraft.launch.worker import Worker

OBJECT_STORE = 100 * 2**20  # bytes: workers return a few numbers
STARTING = "starting"
STILLBORN = 3  # workers in a row that may die before they are ready
HOMELESS_SECONDS = 60.0  # without a machine that holds a worker, before the sweep gives up


@dataclass
class Hand:
    """A worker as the driver sees it.

    Attributes:
        pending: what it was asked last, and hasn't answered.
        run: what it is at; None while it starts or waits.
        warm: of the last run that it took.
        since: when ``run`` was handed to it.
    """

    number: int
    actor: Any
    pending: Any
    where: str = STARTING
    run: Run | None = None
    warm: str | None = None
    since: float = 0.0

    @property
    def idle(self) -> bool:
        return self.pending is None


def connect(spec: PoolSpec) -> list[Node]:
    """The machines that a sweep may use: this one, for which Ray needs not be started yet, or those of a cluster.

    Raises:
        UserError: no cluster at that address.
    """
    if spec.address is None and "ray" not in sys.modules:
        return [_here()]
    import ray

    if spec.address is not None and not ray.is_initialized():
        try:
            _probe(spec.address)
            ray.init(address=spec.address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"launcher.address={spec.address}: no Ray cluster there ({reason}): start one by `ray start --head`, "
                "or give launcher.address=null for this machine"
            ) from None
    return nodes() if ray.is_initialized() else [_here()]


def _hush() -> None:
    """Ray prints a paragraph among our lines for each worker that dies, whatever it was told of logging."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        setattr(worker, "print_to_stdstream", lambda *_, **__: None)  # noqa: B010 - not to be found by type checkers


def _probe(address: str) -> None:
    """Raises OSError where nobody answers: Ray would go on asking for ever."""
    host, found, port = address.removeprefix("ray://").rpartition(":")
    if found:
        socket.create_connection((host, int(port)), timeout=5).close()


def _here() -> Node:
    import torch

    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )  # not on macOS
    return Node(allowed, torch.cuda.device_count())


def nodes() -> list[Node]:
    """The living machines of the cluster."""
    import ray

    living = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(int(has.get("CPU", 0)), int(has.get("GPU", 0))) for has in living]


class Pool:
    """Starts workers, hands runs to them, and replaces the ones that die."""

    def __init__(self, machines: Sequence[Node], division: Division):
        self.machines, self.division = machines, division
        self.hands: list[Hand] = []
        self._ours = False
        self._number = self._stillborn = 0
        self._homeless: float | None = None

    def start(self) -> None:
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # By default 15, so that timed runs would give way to whatever else runs.
        os.environ.setdefault("RAY_worker_niceness", "0")
        _hush()
        if not ray.is_initialized():
            (machine,) = self.machines
            ray.init(
                num_cpus=machine.cpus,
                num_gpus=machine.gpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            self._ours = True

    def fill(self, wanted: int) -> None:
        """Start workers up to the number wanted, as far as the living machines hold them.

        Raises:
            UserError: no machine has held one for a while.
        """
        import ray

        missing = min(wanted, self.division.workers) - len(self.hands)
        if missing <= 0:
            return
        fit = sum(held(node, self.division.cpus, self.division.gpus) for node in nodes())
        if not fit:
            self._homeless = self._homeless or time.monotonic()
            if time.monotonic() - self._homeless > HOMELESS_SECONDS:
                raise UserError(f"no machine of the cluster has held a worker for {HOMELESS_SECONDS:.0f} s")
            return
        self._homeless = None
        remote: Any = ray.remote(Worker)
        kind = remote.options(
            num_cpus=self.division.cpus, num_gpus=self.division.gpus, max_restarts=0, max_task_retries=0
        )
        for _ in range(min(missing, fit - len(self.hands))):
            actor = kind.remote(self.division.threads)
            self.hands.append(Hand(self._number, actor, actor.ready.remote()))
            self._number += 1

    def submit(self, hand: Hand, run: Run, task: dict[str, Any]) -> None:
        hand.run, hand.warm, hand.since = run, run.warm, time.monotonic()
        hand.pending = hand.actor.run.remote(task)

    def wait(self, seconds: float) -> list[tuple[Hand, dict[str, Any]]]:
        """Answers that arrive within a while; a worker that died gives one with status ``died``, and is gone.

        Raises:
            UserError: workers die before they are ready.
        """
        import ray

        asked = {hand.pending: hand for hand in self.hands if hand.pending is not None}
        if not asked:
            time.sleep(seconds)
            return []
        first, _ = ray.wait(list(asked), num_returns=1, timeout=seconds)
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if first else []
        return [(asked[ref], self._answer(asked[ref])) for ref in ready]

    def _answer(self, hand: Hand) -> dict[str, Any]:
        import ray
        from ray.exceptions import RayError

        try:
            answer: Any = ray.get(hand.pending)
        except RayError as error:
            self.kill(hand)
            reason = exit_reason(error)
            self._stillborn += hand.where == STARTING
            if self._stillborn > STILLBORN:
                raise UserError(f"workers can't be started: {reason}") from None
            return {"status": "died", "reason": reason, "retry": True}
        hand.pending = None
        if answer["status"] == "ready":
            self._stillborn = 0
            gpus = f", GPU {','.join(map(str, answer['gpus']))}" if answer["gpus"] else ""
            hand.where = f"worker {hand.number} on {answer['node']}{gpus}"
        return answer

    def kill(self, hand: Hand) -> None:
        """End a worker, whatever it is at."""
        import ray

        self.hands.remove(hand)
        ray.kill(hand.actor, no_restart=True)

    def close(self) -> None:
        for hand in list(self.hands):
            self.kill(hand)
        if self._ours:
            import ray

            ray.shutdown()


def exit_reason(error: Exception) -> str:
    """Why a worker died, in one line, without where and as whom."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if lines and "creation task" in lines[0]:  # a traceback, whose last line says what
        return lines[-1].strip()
    text = " ".join(" ".join(lines).split())
    for mark in ("exit detail: ", "death cause: ", "because "):
        _, found, rest = text.partition(mark)
        if found:
            return f"{type(error).__name__}: {rest.partition('Some common causes')[0][:300].strip()}"
    return f"{type(error).__name__}: {text[:300]}"
