"""GGUF files, de-quantised into a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tracedraft.errors import UserError
from tracedraft.models.architectures import ROPES, SUPPORTED
from tracedraft.models.decoder import rope_frequencies

SHARD = 2**30  # bytes: what conversion holds in memory at a time
# Llama 3 writes into a GGUF by how much each frequency is divided; these of its constants are the same in all sizes.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer, chat template and fp32 safetensors into the new ``folder``, a shard at a time.

    transformers leaves out of a GGUF's config what is added here: the scaling of rotary frequencies, a head size
    of its own, and the end tokens beside the first.

    Raises:
        UserError: no GGUF, another architecture, or a scaling of rotary frequencies that is none of Llama's.
    """
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{gguf}: no readable GGUF file ({error}); fetch it again") from error
    arch = _field(reader, "general.architecture")
    if arch not in SUPPORTED:
        raise UserError(f"{gguf}: architecture {arch!r} is not supported (supported: {', '.join(SUPPORTED)})")
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if head_dim := _field(reader, f"{arch}.attention.key_length"):
        config.head_dim = head_dim
    config.rope_parameters = dict(config.rope_parameters) | _scaling(reader, arch, config, gguf)
    names = ("eos", "eot", "eom")  # Llama 3 ends with any of the three
    ends = [_field(reader, f"tokenizer.ggml.{name}_token_id") for name in names]
    folder.mkdir()
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=sorted({i for i in ends if i is not None})).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    shards = {}
    for number, shard in enumerate(_shards(_tensors(reader, config)), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, folder / file)
        shards |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _scaling(reader: Any, arch: str, config: Any, gguf: Path) -> dict[str, Any]:
    """What ``rope_parameters`` lacks."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            divided = torch.from_numpy(tensor.data.copy()).float()
            scaling = {"rope_type": "llama3", "factor": float(divided.max()), **LLAMA3}
            theta = config.rope_parameters["rope_theta"]
            ours = rope_frequencies(head_dim, theta, None) / rope_frequencies(head_dim, theta, scaling)
            if not torch.allclose(ours, divided, rtol=1e-3):
                raise UserError(f"{gguf}: rope_freqs.weight is not Llama 3's scaling of rotary frequencies")
            return scaling
    kind = _field(reader, f"{arch}.rope.scaling.type")
    if kind in (None, "none"):
        return {}
    if kind != "linear":
        raise UserError(f"{gguf}: rope scaling {kind!r} is not supported ({', '.join(ROPES)})")
    return {"rope_type": kind, "factor": _field(reader, f"{arch}.rope.scaling.factor")}


def _tensors(reader: Any, config: Any) -> Iterator[tuple[str, Tensor]]:
    """De-quantised tensors by their names in safetensors, with q and k rows in transformers' order."""
    from gguf import dequantize
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    arch = _field(reader, "general.architecture")
    processor = TENSOR_PROCESSORS.get(arch, TensorProcessor)(config=config.to_dict())
    with torch.device("meta"):
        names = get_gguf_hf_weights_map(AutoModelForCausalLM.from_config(config), processor)
    for tensor in reader.tensors:
        if tensor.name in names:
            values = dequantize(tensor.data, tensor.tensor_type)
            rows = processor.process(weights=values, name=tensor.name, tensor_key_mapping=names, parsed_parameters={})
            yield names[tensor.name], torch.from_numpy(rows.weights.copy())


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard, size = {}, 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard
