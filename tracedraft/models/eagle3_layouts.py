"""How EAGLE-3 drafts are published: names and configs of SafeAILab, SpecForge, speculators and vLLM.

Inside, SafeAILab's names hold (``midlayer.*``, ``d2t``, ``t2d``). What a checkpoint leaves open is asked for by
the config key that settles it, never guessed, since engines read such places differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracedraft.errors import UserError
from tracedraft.models import weights
from tracedraft.models.decoder import DecoderConfig

ROPE_THETA = 10000.0  # where nothing is stated: published heads were trained so, whatever their target has
NEEDED = ("fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight", "lm_head.weight")
# Of training, or recomputed: a published file may hold them, and nobody reads them.
UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "midlayer.self_attn.rotary_emb.inv_freq")
# Said anew when a config is written: other spellings of it must not stay beside.
RESTATED = {"rope_parameters", "dtype", "eagle_config", "norm_output", "eagle_aux_hidden_state_layer_ids", "num_taps"}
OURS = "tracedraft"  # block of a config that says what its other keys leave open


class Layout(Enum):
    """What a draft is written as; reading tells them apart by names and config.

    SafeAILab's is also that of SpecForge and SGLang; vLLM reads both.
    """

    safeailab = "safeailab"
    speculators = "speculators"


class TapIds(Enum):
    """What an id in ``eagle_aux_hidden_state_layer_ids`` names: a layer's input (vLLM), or its output (SGLang)."""

    inputs = "inputs"
    outputs = "outputs"


class VocabMap(Enum):
    """The vocabulary of a draft whose checkpoint holds no map: draft id i is target id i."""

    identity = "identity"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read what checkpoints state in several ways or not at all; None: what the checkpoint says.

    Attributes:
        tap_ids: what the layer ids in its config name. speculators: inputs.
        rope_theta: base of the draft's rotary embedding. Missing: 10000, whatever the target's is.
        head_dim: of an attention head. None: rows of ``q_proj`` over the heads that the config states.
        norm_before_residual: the residual is the normed feature. Missing: false, but for speculators.
        norm_output: the chain is fed the output after the norm, not before it. Missing: false.
        fc_norm: norm each tap before ``fc``. None: if the file holds such norms; false leaves them out.
        d2t: the vocabulary of a file without a map.
    """

    tap_ids: TapIds | None = None
    rope_theta: float | None = None
    head_dim: int | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    fc_norm: bool | None = None
    d2t: VocabMap | None = None


@dataclass(frozen=True)
class Eagle3Config:
    """A draft's shape.

    Attributes:
        layer: the midlayer's shape; ``layer.vocab_size`` is the target's vocabulary.
        taps: how many layers of the target are tapped.
        fc_norm: each tap is normed before ``fc``; norm_before_fc: all of them together are.
        norm_before_residual: the midlayer's residual is the normed feature.
        norm_output: the chain is fed outputs after the norm.
        own_embedding: it has token embeddings of its own.
        tapped: the layers whose inputs it reads; None: not stated, so EAGLE-3's 2, L // 2 and L - 3.
    """

    layer: DecoderConfig
    draft_vocab_size: int
    target_hidden_size: int
    taps: int
    fc_norm: bool
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    tapped: tuple[int, ...] | None = None


# Names


def canonical(name: str) -> str:
    """SafeAILab's name of a tensor in any naming."""
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        name = name.replace("layers.0.", "midlayer.", 1)
    return {"draft_id_to_target_id": "d2t"}.get(name, name)


def named(name: str, layout: Layout) -> str:
    """The name in ``layout`` of a tensor in SafeAILab's naming."""
    return name.replace("midlayer.", "layers.0.", 1) if layout is Layout.speculators else name


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a draft that is read, by SafeAILab's name.

    Raises:
        UserError: a corrupt file, or the same tensor in two namings.
    """
    seen = set()
    for published, tensor in weights.tensors(folder):
        name = canonical(published)
        if name in seen:
            raise UserError(f"{folder}: holds {name!r} in two namings, one of them {published!r}: remove one")
        seen.add(name)
        if name not in UNUSED:
            yield name, tensor


# Configs


def read_json(folder: Path) -> dict[str, Any]:
    """The raw ``config.json``: transformers would fill in what is missing, rope_theta above all.

    Raises:
        UserError: none there, or not of an EAGLE-3 draft.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"draft: {file} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"draft: {file} is not a JSON object")
    kind = raw.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UserError(f"draft: {file} is of speculators' kind {kind!r}, not eagle3")
    return raw


def read_config(folder: Path, reading: Reading | None = None) -> Eagle3Config:
    """The draft's shape, from ``config.json`` and, where that may err, the shapes of its tensors.

    Raises:
        UserError: no config, a missing key, another architecture, or a place that engines read differently.
    """
    reading = reading or Reading()
    raw = read_json(folder)
    nested = raw.get("transformer_layer_config")
    shapes = {canonical(name): shape for name, shape in weights.shapes(folder).items()}
    for name in NEEDED:
        if name not in shapes:
            raise UserError(f"{folder}: tensor {name!r} is missing: not an EAGLE-3 draft, or a part of one")
    try:
        layer = _layer(nested or raw, shapes, reading, folder)
        hidden = raw.get("target_hidden_size") or layer.hidden_size
        taps, rest = divmod(shapes["fc.weight"][1], hidden)
        if rest or not taps:
            raise UserError(
                f"draft: {folder}: fc takes {shapes['fc.weight'][1]} features, no multiple of the target's hidden "
                f"size {hidden}: correct target_hidden_size in config.json"
            )
        tapped = _tapped(raw, reading, folder)
        if tapped and len(tapped) != taps:
            raise UserError(f"draft: {folder}: config.json lists {len(tapped)} tapped layers, fc takes {taps}")
        fc_norm = reading.fc_norm
        return Eagle3Config(
            layer=layer,
            draft_vocab_size=raw["draft_vocab_size"] or shapes["lm_head.weight"][0],
            target_hidden_size=hidden,
            taps=taps,
            fc_norm=_holds(raw, "fc_norm", "fc_norm.0.weight" in shapes, folder) if fc_norm is None else fc_norm,
            norm_before_fc=_holds(raw, "norm_before_fc", "input_norm.weight" in shapes, folder),
            norm_before_residual=_norm_before_residual(raw, reading, folder),
            norm_output=_norm_output(raw, reading, folder),
            own_embedding="embed_tokens.weight" in shapes,
            tapped=tapped,
        )
    except KeyError as error:
        raise UserError(f"draft: {folder / 'config.json'} lacks the key {error.args[0]!r}") from error


def _layer(raw: dict[str, Any], shapes: dict[str, tuple[int, ...]], reading: Reading, folder: Path) -> DecoderConfig:
    """The midlayer's shape; EAGLE's own code takes head_dim to be hidden size over heads, which not all have."""
    for key, value in (("num_hidden_layers", 1), ("hidden_act", "silu")):
        if raw.get(key, value) != value:
            raise UserError(f"draft: {folder}: {key}={raw[key]!r} is not supported, only {value!r}")
    if "sliding_attention" in (raw.get("layer_types") or []):
        raise UserError(f"draft: {folder}: layer_types={raw['layer_types']} is not supported, only full attention")
    heads = raw["num_attention_heads"]
    q_rows, k_rows = (shapes[f"midlayer.self_attn.{part}_proj.weight"][0] for part in ("q", "k"))
    head_dim = reading.head_dim or max(1, q_rows // heads)
    whole = q_rows % head_dim == k_rows % head_dim == 0
    if not whole or (reading.head_dim is None and heads * head_dim != q_rows):
        raise UserError(
            f"draft: {folder}: q_proj has {q_rows} rows and k_proj {k_rows}, which do not make whole heads of "
            f"{head_dim}: set draft.head_dim"
        )
    theta, scaling = _rope(raw, folder)
    return DecoderConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        layers=1,
        heads=q_rows // head_dim,
        kv_heads=k_rows // head_dim,
        head_dim=head_dim,
        eps=raw["rms_norm_eps"],
        rope_theta=reading.rope_theta or theta,
        rope_scaling=scaling,
        tied=False,
        context=raw.get("max_position_embeddings", 2048),
    )


def _rope(raw: dict[str, Any], folder: Path) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, which transformers 5 keeps in ``rope_parameters``."""
    both = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or both
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"draft: {folder}: rope scaling {kind!r} is not supported (default, llama3)")
    theta = raw.get("rope_theta") or both.get("rope_theta") or ROPE_THETA
    return theta, {k: v for k, v in scaling.items() if k != "rope_theta"} if kind == "llama3" else None


def _holds(raw: dict[str, Any], key: str, held: bool, folder: Path) -> bool:
    """Whether the file holds the norms that a key is about; a config that contradicts it is wrong, or the file is."""
    stated = raw.get(key, (raw.get("eagle_config") or {}).get(key))
    if stated is not None and bool(stated) != held:
        raise UserError(
            f"draft: {folder}: config.json says {key}={stated!r}, and the file {'holds' if held else 'lacks'} such "
            f"norms: fetch it again, or correct {key}"
        )
    return held


def _norm_before_residual(raw: dict[str, Any], reading: Reading, folder: Path) -> bool:
    if reading.norm_before_residual is not None:
        return reading.norm_before_residual
    if "speculators_model_type" in raw and "norm_before_residual" not in raw:
        raise UserError(
            f"draft: {folder / 'config.json'} lacks norm_before_residual, which speculators takes for false and vLLM "
            "for true: set draft.norm_before_residual, and compare both by python -m tracedraft.eval_draft"
        )
    return bool(raw.get("norm_before_residual", False))


def _norm_output(raw: dict[str, Any], reading: Reading, folder: Path) -> bool:
    if reading.norm_output is not None:
        return reading.norm_output
    stated = raw.get(OURS, {}).get("norm_output")
    if stated is None and "speculators_model_type" not in raw and "norm_output" in raw:
        raise UserError(
            f"draft: {folder / 'config.json'} says norm_output={raw['norm_output']!r}, by which vLLM and SGLang mean "
            "that the chain is fed normed outputs, SpecForge only that the head reads them: set draft.norm_output, "
            "and compare both by python -m tracedraft.eval_draft"
        )
    return bool(raw.get("norm_output", False) if stated is None else stated)


def _tapped(raw: dict[str, Any], reading: Reading, folder: Path) -> tuple[int, ...] | None:
    """Layers whose inputs the draft reads, where it says so."""
    if stated := raw.get(OURS, {}).get("taps"):
        return tuple(stated)
    key = "eagle_aux_hidden_state_layer_ids"
    ids = raw.get(key) or (raw.get("eagle_config") or {}).get(key)
    if not ids:
        return None
    meant = reading.tap_ids or (TapIds.inputs if "speculators_model_type" in raw else None)
    if meant is None:
        raise UserError(
            f"draft: {folder / 'config.json'} taps the layers {ids} without saying whether at their inputs, as vLLM "
            "reads it, or outputs, as SGLang does: set draft.tap_ids=inputs or outputs, and compare both by "
            "python -m tracedraft.eval_draft"
        )
    return tuple(i + (meant is TapIds.outputs) for i in ids)


def to_json(
    config: Eagle3Config,
    layout: Layout,
    dtype: torch.dtype,
    source: dict[str, Any] | None = None,
    ids: list[int] | None = None,
    target: str | None = None,
) -> dict[str, Any]:
    """What ``config.json`` says of a draft.

    Args:
        dtype: of its weights.
        source: the config that it came with; within one layout, what that says beyond the draft's shape is kept.
        ids: for ``eagle_aux_hidden_state_layer_ids``; None: engines take the inputs of 2, L // 2 and L - 3.
        target: its hub id or folder, for speculators.
    """
    source = source or {}
    same = ("transformer_layer_config" in source) == (layout is Layout.speculators)
    kept = {key: value for key, value in source.items() if same and key not in RESTATED}
    shared = {
        "draft_vocab_size": config.draft_vocab_size,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if layout is Layout.speculators:
        nested = {k: v for k, v in kept.get("transformer_layer_config", {}).items() if k not in RESTATED}
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": _speculators_json(target),
            **kept,
            **shared,
            "norm_output": config.norm_output,
            "eagle_aux_hidden_state_layer_ids": ids,
            "target_hidden_size": _unless(config.target_hidden_size, config.layer.hidden_size),
            "transformer_layer_config": nested | _layer_json(config.layer),
        }
    return {
        **kept,
        "architectures": [
            "LlamaForCausalLMEagle3"
        ],  # SGLang and vLLM know it; published ones often name the target's
        **_layer_json(config.layer),
        **shared,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": config.taps,
        OURS: {"taps": list(config.tapped) if config.tapped else None, "norm_output": config.norm_output},
        # Only where they say something: to SpecForge norm_output means something else.
        **({"norm_output": True} if config.norm_output else {}),
        **({"eagle_aux_hidden_state_layer_ids": ids} if ids else {}),
    }


def _unless(value: int, default: int) -> int | None:
    return None if value == default else value


def _layer_json(layer: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.eps,
        "rope_theta": layer.rope_theta,
        "rope_scaling": layer.rope_scaling,
        "max_position_embeddings": layer.context,
        "vocab_size": layer.vocab_size,
    }


def _speculators_json(target: str | None) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": target, "architectures": []},
    }
