"""What a sweep may use, and how a machine or a cluster is divided into workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import OmegaConf

from tracedraft.errors import UserError
from tracedraft.identity import GROUPS


class Resume(Enum):
    """What to do about runs that an earlier sweep into the same folder knew."""

    skip_done = "skip_done"
    retry_failed = "retry_failed"
    fresh = "fresh"


@dataclass(frozen=True)
class PoolSpec:
    """Options of a sweep; ``conf/launcher/pool.yaml`` says what each does."""

    workers: int | None
    gpus_per_worker: float | None
    cpus_per_worker: int | None
    affinity: list[str]
    max_attempts: int
    run_timeout_s: float | None
    resume: Resume
    fail_fast: bool
    exclude: list[str]
    dry_run: bool
    address: str | None

    def __post_init__(self) -> None:
        """Raises UserError naming the key, before anything is started."""
        for key in ("workers", "cpus_per_worker", "max_attempts"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"launcher.{key}={value}: expected 1 or more")
        gpus = self.gpus_per_worker
        if gpus is not None and (gpus < 0 or (gpus > 1 and gpus != int(gpus))):
            raise UserError(f"launcher.gpus_per_worker={gpus:g}: expected 0, a share of one GPU, or a whole number")
        if self.run_timeout_s is not None and self.run_timeout_s <= 0:
            raise UserError(f"launcher.run_timeout_s={self.run_timeout_s:g}: expected above 0, or null for no limit")
        if strangers := sorted(set(self.affinity) - set(GROUPS)):
            raise UserError(f"launcher.affinity: {strangers[0]!r} is no group: choose of {', '.join(GROUPS)}")
        for rule in self.exclude:
            if not rule.split() or any("=" not in part for part in rule.split()):
                raise UserError(f"launcher.exclude: {rule!r}: expected key=value, several with spaces between")


@dataclass(frozen=True)
class Node:
    """A machine's resources."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Division:
    """How many workers there are, and what each has.

    Attributes:
        threads: of each worker's CPU products.
        side_by_side: most workers of one machine.
    """

    workers: int
    gpus: float
    cpus: int
    threads: int
    side_by_side: int


def divide(spec: PoolSpec, nodes: Sequence[Node], on_gpu: bool, timed: bool, threads: int) -> Division:
    """Divide machines into workers.

    Args:
        on_gpu: whether any run is served on a GPU.
        timed: whether any run is timed.
        threads: what the CPU work of one process takes when it has a machine for itself.

    Raises:
        UserError: the request can't be met, now or ever.
    """
    gpus = spec.gpus_per_worker if spec.gpus_per_worker is not None else float(on_gpu)
    if gpus % 1 and timed:
        raise UserError(
            f"launcher.gpus_per_worker={gpus:g}: a timed run takes whole GPUs, since shares of one slow each other: "
            "give 1, or measure=acceptance"
        )
    if on_gpu and not gpus:
        raise UserError(f"launcher.gpus_per_worker={gpus:g}: target.device=cuda needs a GPU: give 1")
    most = max(nodes, key=lambda node: (node.gpus, node.cpus))
    cpus = spec.cpus_per_worker
    if cpus is None:
        beside = max(1, math.floor(most.gpus / gpus)) if gpus else 1
        if spec.workers is not None:
            beside = max(beside if gpus else 1, math.ceil(spec.workers / len(nodes)))
        cpus = max(1, most.cpus // beside)
    each = [held(node, cpus, gpus) for node in nodes]
    if sum(each) < (spec.workers or 1):
        raise UserError(_too_much(spec, nodes, gpus, cpus, sum(each)))
    workers = spec.workers or sum(each)
    side_by_side = min(workers, max(each))
    return Division(workers, gpus, cpus, max(1, min(cpus, threads // side_by_side)), side_by_side)


def held(node: Node, cpus: int, gpus: float) -> int:
    """How many workers a machine holds."""
    by_cpu = node.cpus // cpus
    # A share of a GPU lies on one of them.
    by_gpu = node.gpus * math.floor(1 / gpus) if 0 < gpus <= 1 else node.gpus // gpus if gpus else by_cpu
    return int(min(by_cpu, by_gpu))


def _too_much(spec: PoolSpec, nodes: Sequence[Node], gpus: float, cpus: int, fit: int) -> str:
    have = ", ".join(f"{node.cpus} CPUs and {node.gpus} GPUs" for node in list(nodes)[:8])
    wanted = f"launcher.workers={spec.workers or 'null'} of {cpus} CPUs and {gpus:g} GPUs each"
    where = f"this cluster ({have})" if spec.address else f"this machine ({have})"
    return f"{wanted}: {where} holds {fit}: lower launcher.workers, cpus_per_worker or gpus_per_worker"


def excluded(rules: Sequence[str], config: dict[str, Any]) -> str | None:
    """The first rule that holds for a resolved config; None without one. A group is told by its option's name."""
    for rule in rules:
        pairs = (part.split("=", 1) for part in rule.split())
        if all(_at(config, key) == OmegaConf.create(f"value: {text}").value for key, text in pairs):
            return rule
    return None


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config.get("name") if isinstance(config, dict) else config
