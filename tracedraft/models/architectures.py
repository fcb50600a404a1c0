"""Which published architectures the decoder is, and what of their ``config.json`` it can't be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tracedraft.errors import UserError
from tracedraft.models.decoder import DecoderConfig

SUPPORTED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPES = ("default", "linear", "llama3")


def read_decoder_config(folder: Path) -> DecoderConfig:
    """The decoder's shape, from a transformers ``config.json`` of any age.

    Raises:
        UserError: no config, another architecture, or a variant of a supported one that would be served wrongly.
    """
    from transformers import AutoConfig

    check_architecture(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: no readable model config: {str(error).splitlines()[0]}") from error
    _refuse_variants(config, folder)
    rope = dict(config.rope_parameters)
    biased = config.model_type in ("llama", "qwen3") and config.attention_bias  # the others know no such key
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
        tied=config.tie_word_embeddings,
        context=config.max_position_embeddings,
        window=_window(config),
        qkv_bias=biased or config.model_type == "qwen2",
        o_bias=biased,
        qk_norm=config.model_type == "qwen3",
    )


def check_architecture(folder: Path) -> None:
    """Raises UserError naming the architecture of the model in ``folder`` unless it is a supported one."""
    try:
        raw = json.loads((folder / "config.json").read_text())
        model_type, classes = raw.get("model_type"), raw.get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / 'config.json'}: no readable model config ({error})") from error
    expected = SUPPORTED.get(model_type)
    # the first Llama conversions spelt it LLaMAForCausalLM
    if expected is None or any(name.lower() != expected.lower() for name in classes):
        found = ", ".join(classes) or "not stated"
        known = ", ".join(f"{key}: {name}" for key, name in SUPPORTED.items())
        raise UserError(f"{folder}: architecture {model_type!r} ({found}) is not supported (supported: {known})")


def _refuse_variants(config: Any, folder: Path) -> None:
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    kinds = set(getattr(config, "layer_types", None) or ())
    refused = {
        f"rope scaling {kind!r} is not supported ({', '.join(ROPES)})": kind not in ROPES,
        "partial_rotary_factor: only rotation of whole heads is supported": (
            rope.get("partial_rotary_factor", 1.0) != 1.0
        ),
        f"hidden_act={config.hidden_act!r} is not supported (silu)": config.hidden_act not in ("silu", "swish"),
        "mlp_bias=true is not supported: biases are read in attention only": bool(getattr(config, "mlp_bias", False)),
        f"layer_types: {', '.join(sorted(kinds))}: only full_attention and sliding_attention are supported": (
            not kinds <= {"full_attention", "sliding_attention"}
        ),
        "the weights are quantised (quantization_config): give the checkpoint that was not": (
            getattr(config, "quantization_config", None) is not None
        ),
    }
    for message, wrong in refused.items():
        if wrong:
            raise UserError(f"{folder}: {message}")


def _window(config: Any) -> int | None:
    """Tokens that a sliding layer sees, the newest included: up to so many, it sees as much as a full one."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)
