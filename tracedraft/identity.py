"""Which run a config describes, found without loading a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tracedraft.adapters.both import BothSpec
from tracedraft.config import build_spec, check_settings, fingerprint, plain
from tracedraft.errors import UserError
from tracedraft.types import Conversation

GROUPS = ("target", "draft", "adapter", "workload", "decode")
SETTINGS = ("seed", "plain", "measure")


@dataclass(frozen=True)
class Identity:
    """A run's specs and prompts, and the fingerprint of all that can change its result."""

    specs: dict[str, Any]
    conversations: list[Conversation]
    data: dict[str, Any]
    fingerprint: str


def identify(cfg: DictConfig, known: dict[str, Any] | None = None) -> Identity:
    """Check a composed config as far as that goes without a model, and hash what can change its result.

    Args:
        known: what earlier calls found out about prompts and weights, for the many runs of a sweep that share them.

    Raises:
        UserError: a bad value, prompts or weights that can't be had, or a draft that does not fit.
    """
    check_settings(cfg)
    check_replayable(cfg)
    known = {} if known is None else known
    specs = {group: _built(cfg, group, known) for group in GROUPS}

    def once(what: str, find: Callable[[], Any], *asked: str) -> Any:
        key = json.dumps([what, *(plain(specs[group]) for group in asked)], sort_keys=True)
        if key not in known:
            known[key] = find()
        return known[key]

    conversations, data = once("prompts", lambda: specs["workload"].load(), "workload")
    if isinstance(specs["adapter"], BothSpec):
        specs["adapter"].outer.check_stream(conversations, cfg.measure == "time")
    once("fit", lambda: specs["draft"].check(specs["target"].shape()), "target", "draft")
    contents = {
        "target": once("weights", lambda: specs["target"].provenance()["sha256"], "target"),
        "draft": once("weights", lambda: specs["draft"].provenance()["sha256"], "draft"),
        "workload": data["sha256"],
    }
    settings = {key: cfg[key] for key in SETTINGS}
    return Identity(specs, conversations, data, fingerprint({**specs, **settings}, contents))


def check_replayable(cfg: DictConfig) -> None:
    """Raises UserError when only a live target could answer what ``measure=acceptance`` is asked for."""
    if cfg.measure != "acceptance":
        return
    if cfg.plain:
        raise UserError("plain=True: expected false with measure=acceptance, which times nothing")
    if cfg.decode.acceptance != "exact":
        raise UserError(
            f"decode.acceptance={cfg.decode.acceptance!r}: expected exact with measure=acceptance, since otherwise "
            "the response depends on the draft and can't be replayed"
        )


def _built(cfg: DictConfig, group: str, known: dict[str, Any]) -> Any:
    """A group's spec, which most runs of a sweep share."""
    try:
        key = json.dumps([group, OmegaConf.to_container(cfg[group], resolve=True)])
    except OmegaConfBaseException:
        return build_spec(cfg[group], group)  # says in what it is wrong
    if key not in known:
        known[key] = build_spec(cfg[group], group)
    return known[key]


def timing(config: dict[str, Any], threads: int, workers: int) -> tuple[int, int] | None:
    """What else tells one timing on a CPU from another: the threads of a worker, and how many worked side by side.

    None where that changes nothing: nothing is timed, or a GPU does the work.
    """
    if config["measure"] != "time" or not str(config["target"]["device"]).startswith("cpu"):
        return None
    return config["threads"] or threads, workers
