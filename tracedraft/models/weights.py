"""Checkpoints on disk: safetensors folders, and GGUF files converted once and cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.models.decoder import DecoderConfig

_CHOOSE = "choose another paths.cache"
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def read_decoder_config(folder: Path) -> DecoderConfig:
    """The decoder's shape, from a transformers ``config.json``.

    Raises:
        UserError: no config, or an architecture other than Llama.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: no readable model config: {str(error).splitlines()[0]}") from error
    if config.model_type != "llama":
        raise UserError(f"{folder}: architecture {config.model_type!r} is not supported (supported: llama)")
    rope = dict(config.rope_parameters)
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        raise UserError(f"{folder}: rope scaling {rope['rope_type']!r} is not supported (default, llama3)")
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling=rope if rope.get("rope_type") == "llama3" else None,
        tied=config.tie_word_embeddings,
        context=config.max_position_embeddings,
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, single or sharded.

    Raises:
        UserError: none there, or a shard that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no *.safetensors file")
    for file in files:
        if not file.exists():
            raise UserError(f"{file}: named in {index.name} but missing")
    return files


def content_files(folder: Path) -> list[Path]:
    """All that decides what a checkpoint says: weights, config, tokenizer and chat template."""
    return [*weight_files(folder), *sorted(folder.glob("*.json")), *sorted(folder.glob("*.jinja"))]


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, one at a time.

    Raises:
        UserError: a corrupt or truncated file, by name.
    """
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{file}: corrupt or truncated weight file ({error}); fetch it again") from error


def fuse(state: dict[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Join q/k/v and gate/up rows, as ``models.decoder`` keeps them: fewer, larger products.

    Raises:
        UserError: one of the parts is missing, by name.
    """
    fused = dict(state)
    for joined, parts in FUSED.items():
        names = {n.replace(part, joined) for part in parts for n in state if f".{part}." in n}
        for name in sorted(names):
            pieces = [name.replace(joined, part) for part in parts]
            for piece in pieces:
                if piece not in fused:
                    raise UserError(f"{where}: tensor {piece!r} is missing")
            fused[name] = torch.cat([fused.pop(piece) for piece in pieces])
    return fused


def split_fused(state: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Undo ``fuse``: the names and shapes that published checkpoints use."""
    rows = {
        "qkv_proj": [n * config.head_dim for n in (config.heads, config.kv_heads, config.kv_heads)],
        "gate_up_proj": [config.intermediate_size] * 2,
    }
    plain = {}
    for name, tensor in state.items():
        joined = next((j for j in FUSED if f".{j}." in name), None)
        if joined is None:
            plain[name] = tensor
        else:
            for part, piece in zip(FUSED[joined], tensor.split(rows[joined]), strict=True):
                plain[name.replace(joined, part)] = piece.clone()
    return plain


def load_module(module: torch.nn.Module, state: dict[str, Tensor], where: Path) -> None:
    """Assign a state dict whole; the module may live on the meta device.

    Raises:
        UserError: missing, unexpected or mis-shaped tensors, by name.
    """
    expected = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in state.items()}
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise UserError(f"{where}: tensor {name!r} is missing")
        if name not in expected:
            raise UserError(f"{where}: unexpected tensor {name!r}")
        if expected[name] != found[name]:
            raise UserError(f"{where}: tensor {name!r} is {found[name]}, expected {expected[name]}")
    module.load_state_dict(state, assign=True)


def sha256_of(files: list[Path], cache: Path) -> str:
    """Content hash of weight files, remembered by path, size and time: hashing 16 GB takes ten seconds."""
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    memo = cache / "sha256" / hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    if memo.exists():
        return memo.read_text()
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    with contextlib.suppress(UserError):  # a cache that cannot be written costs time only
        write_atomically(memo, lambda path: path.write_text(digest.hexdigest()), _CHOOSE)
    return digest.hexdigest()


def converted_gguf(gguf: Path, sha256: str, cache: Path) -> Path:
    """Folder with the GGUF's config, tokenizer, chat template and fp32 safetensors, made on first use.

    De-quantising takes about 15 seconds for 135M parameters, reading the result back under one.

    Raises:
        UserError: the file is not the one that ``sha256`` names, or the cache can't be written.
    """
    if not gguf.is_file():
        raise UserError(f"{gguf} is missing; reinstall its package")
    with gguf.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise UserError(f"{gguf}: sha256 {found[:12]}… is not the expected {sha256[:12]}…; reinstall its package")
    folder = cache / "gguf" / sha256[:16]
    if not folder.is_dir():
        write_atomically(folder, lambda path: _convert_gguf(gguf, path), _CHOOSE)
    return folder


def _convert_gguf(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder.mkdir()
    config = LlamaConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with torch.device("meta"):
        names = LlamaForCausalLM(config)
    state = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=names)["tensors"]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
