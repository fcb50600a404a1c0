"""Weights and prompts brought to where runs will want them: this machine, or once to each of a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tracedraft.config import build_spec
from tracedraft.errors import UserError

FETCHED = ("target", "draft", "workload")


def prefetch(cfg: DictConfig) -> int:
    """Fetch and convert what a config's target, draft and workload name. Returns how many machines have it now.

    Raises:
        UserError: something can't be had, on whichever machine.
    """
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    wanted = {str(key): value for key, value in config.items()}
    if cfg.launcher.address is None:
        fetch(wanted)
        return 1
    from tracedraft.launch.pool import connect

    connect(build_spec(cfg.launcher, "launcher"))
    problems = everywhere([wanted])
    if wrong := [problem for problem in problems if problem is not None]:
        raise UserError(f"{len(wrong)} of {len(problems)} machines: {wrong[0]}")
    return len(problems)


def fetch(config: dict[str, Any]) -> None:
    """Bring what one resolved config names to this machine."""
    cfg = OmegaConf.create(config)
    target, draft, workload = (build_spec(cfg[group], group) for group in FETCHED)
    target.provenance()
    draft.check(target.shape())
    draft.provenance()
    workload.load()


def everywhere(configs: Sequence[dict[str, Any]]) -> list[str | None]:
    """Do so on each machine of the connected cluster: what went wrong there, or None.

    One process a machine, before several would fetch the same file at once.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    distinct = {json.dumps([config[group] for group in FETCHED], sort_keys=True): config for config in configs}
    remote: Any = ray.remote(_fetch_all)
    living = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    asked = [
        remote.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(list(distinct.values()))
        for node in living
    ]
    return [_outcome(ray, one) for one in asked]


def _outcome(ray: Any, asked: Any) -> str | None:
    try:
        return ray.get(asked)
    except ray.exceptions.RayError as error:  # a machine that went meanwhile
        return next(iter(str(error).splitlines()), type(error).__name__)


def _fetch_all(configs: list[dict[str, Any]]) -> str | None:
    for config in configs:
        try:
            fetch(config)
        except UserError as error:
            return str(error)
    return None
