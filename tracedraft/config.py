"""From composed YAML to typed specs, and where the files that ship with the package lie."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from tracedraft.errors import UserError

PACKAGE = Path(__file__).resolve().parent
ASSETS = PACKAGE / "assets"


def shipped_dir(name: str) -> Path:
    """A top-level folder of the project (``conf``, ``experiments``): inside the package in a wheel."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def _per_device(cpu: Any, cuda: Any, *, _root_: DictConfig) -> Any:
    return cpu if str(_root_.target.device).startswith("cpu") else cuda


def _serving_dtype(*, _root_: DictConfig) -> str:
    if not str(_root_.target.device).startswith("cpu"):
        return "bfloat16"
    from tracedraft.models.packing import cpu_dtype  # loads torch

    return str(cpu_dtype()).removeprefix("torch.")


def _sweep_name(*, _root_: DictConfig) -> str:
    return _root_.hydra.runtime.choices.get("experiment") or "sweep"


# ${sweep_name:} in a YAML: the experiment's, or "sweep"; no time in it, so that the same command finds its runs.
OmegaConf.register_new_resolver("sweep_name", _sweep_name, replace=True)
# ${per_device:A,B} in a YAML: A where the target is served on the CPU, else B.
OmegaConf.register_new_resolver("per_device", _per_device, replace=True)
# ${serving_dtype:} in a YAML: float32 on a CPU for which oneDNN has no bf16 products, else bfloat16.
OmegaConf.register_new_resolver("serving_dtype", _serving_dtype, replace=True)


def build_spec(node: DictConfig, key: str) -> Any:
    """Turn one config group into the frozen spec that its ``_target_`` names.

    Args:
        node: the composed group, with ``_target_`` and every field of the spec.
        key: where the group stands in the config, for error messages.

    Raises:
        UserError: unknown or missing field, wrong type, or a class outside ``tracedraft``.
    """
    fields = OmegaConf.to_container(node, resolve=False)
    assert isinstance(fields, dict)
    path = str(fields.pop("_target_", ""))
    if not path.startswith("tracedraft."):
        raise UserError(f"{key}._target_={path!r}: expected a spec class of the tracedraft package")
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{key}._target_={path!r} cannot be imported: {error}") from error
    try:
        resolved = OmegaConf.to_container(node, resolve=True)
        assert isinstance(resolved, dict)
        resolved.pop("_target_")
        nested = {
            name: _nested(node[name], f"{key}.{name}") for name, value in resolved.items() if _holds_specs(value)
        }
        merged = OmegaConf.merge(OmegaConf.structured(cls), resolved | nested)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        full = str(getattr(error, "full_key", None) or key)
        where = full if full == key or full.startswith(f"{key}.") else f"{key}.{full}"
        raise UserError(f"{where}: {str(error).splitlines()[0]}{_known(error, cls)}") from error


def _known(error: OmegaConfBaseException, cls: type) -> str:
    """What to write instead of a key that ``cls`` does not have; nothing for other errors."""
    if not isinstance(error, ConfigKeyError):
        return ""
    names = [field.name for field in dataclasses.fields(cls)]
    near = difflib.get_close_matches(str(error.key), names, 1)
    return f"; did you mean {near[0]}?" if near else f", which has {', '.join(names)}"


def _is_spec(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _holds_specs(value: Any) -> bool:
    return _is_spec(value) or (isinstance(value, dict) and any(map(_is_spec, value.values())))


def _nested(node: DictConfig, key: str) -> Any:
    """The spec, or the specs by name, inside another."""
    if "_target_" not in node:
        return {name: _inner(node[name], f"{key}.{name}") for name in node}
    return _inner(node, key)


def _inner(node: DictConfig, key: str) -> Any:
    if not isinstance(node, DictConfig):
        raise UserError(f"{key}={node}: expected an option with its keys, as the others beside it")
    try:
        return build_spec(node, key)
    except UserError as error:  # which names the spec's keys as if it were the whole group
        group, message = key.partition(".")[0], str(error)
        if message.startswith(f"{group}.") and not message.startswith(f"{key}."):
            message = f"{key}{message.removeprefix(group)}"
        raise UserError(message) from error


def plain(value: Any) -> Any:
    """A spec as JSON-ready data: dataclasses with their class path, enums by value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"_target_": f"{type(value).__module__}.{type(value).__qualname__}"} | fields
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


MEASURES = ("time", "acceptance")
WANDB_MODES = ("online", "offline", "disabled")
WHOLE = (lambda v: type(v) is int and v >= 1, "1 or more")
# Keys that no spec holds, whichever command knows them: what each may be, in code and in words.
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "seed": (lambda v: type(v) is int and 0 <= v < 2**63, "a whole number from 0"),
    "measure": (lambda v: v in MEASURES, " or ".join(MEASURES)),
    "plain": (lambda v: type(v) is bool, "true or false"),
    "keep_learner": (lambda v: type(v) is bool, "true or false"),
    "threads": (lambda v: v is None or (type(v) is int and v > 0), "1 or more, or null for all"),
    "repetitions": WHOLE,
    **{f"{size}.{key}": WHOLE for size in ("size", "dry_size") for key in ("prompt", "copy_mib")},
    "tau": (lambda v: _is_number(v) and v > 0, "above 0"),
    "temperatures": (lambda v: type(v) is list and bool(v) and all(map(_is_number, v)), "one or more, as [0,0.7]"),
    "wandb.mode": (lambda v: v in WANDB_MODES, f"one of {', '.join(WANDB_MODES)}"),
    "wandb.tags": (lambda v: type(v) is list, "a list, as [a,b]"),
}


def check_settings(cfg: DictConfig) -> None:
    """Raises UserError for a bad value of a key that no spec holds, before anything is loaded or written."""
    absent = object()
    for key, (works, want) in RULES.items():
        value = OmegaConf.select(cfg, key, default=absent)
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        if value is not absent and not works(value):
            raise UserError(f"{key}={value!r}: expected {want}")


def differing(a: Any, b: Any, key: str = "") -> list[str]:
    """Settings that are not alike; a key that came later counts as null before."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in sorted(a | b) for d in differing(a.get(k), b.get(k), f"{key}.{k}".lstrip("."))]
    return [] if a == b else [f"{key}={json.dumps(a)}, now {json.dumps(b)}"]


# Keys that say where files lie, not what they hold; what they hold enters by its sha256.
NOT_IN_FINGERPRINT = frozenset({"data", "cache", "note", "path", "drafts"})


def identifying(value: Any) -> Any:
    """Settings without the keys that say where files lie."""
    if isinstance(value, dict):
        return {k: identifying(v) for k, v in value.items() if k not in NOT_IN_FINGERPRINT}
    if isinstance(value, list):
        return [identifying(v) for v in value]
    return value


def fingerprint(specs: dict[str, Any], contents: dict[str, str | None]) -> str:
    """Identity of a run: a hash of what can change a result.

    Args:
        specs: the built specs and the seed; keys that say where a file lies are left out.
        contents: sha256 of each file that the specs name: weights of target and draft, prompts.
    """
    text = json.dumps([identifying(plain(specs)), contents], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
