"""Checkpoints on disk: folders of safetensors or torch files, and GGUF files converted once and cached."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.models.decoder import Decoder, DecoderConfig
from tracedraft.models.gguf import convert

_CHOOSE = "choose another paths.cache"
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint: safetensors, else ``pytorch_model.bin``; sharded or single.

    Raises:
        UserError: none there, or a shard that the index names is missing.
    """
    for whole, others in (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model-*.bin")):
        index = folder / f"{whole}.index.json"
        if index.exists():
            return _shards(index)
        files = [folder / whole] if (folder / whole).exists() else sorted(folder.glob(others))
        if files:
            return files
    raise UserError(f"{folder}: no *.safetensors file and no pytorch_model.bin")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index}: no readable index of weight files ({error!r}); fetch it again") from error
    files = [index.parent / name for name in names]
    for file in files:
        if not file.exists():
            raise UserError(f"{file}: named in {index.name} but missing")
    return files


def content_files(folder: Path) -> list[Path]:
    """All that decides what a checkpoint says: weights, config, tokenizer and chat template."""
    texts = [file for kind in ("*.json", "*.jinja", "tokenizer.model") for file in sorted(folder.glob(kind))]
    return [*weight_files(folder), *texts]


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, one at a time; no more than one file is held.

    Raises:
        UserError: a corrupt or truncated file, by name, or one that holds more than tensors.
    """
    for file in weight_files(folder):
        yield from _pickled(file) if file.suffix == ".bin" else _safetensors(file)


def _safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise UserError(f"{file}: corrupt or truncated weight file ({error}); fetch it again") from error


def _pickled(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        # mapped, where its format allows: a model of a single file would else be there twice
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        entries = list(state.items())
    except (RuntimeError, EOFError, ValueError, AttributeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{file}: corrupt or truncated weight file, or one with more than tensors in it, which is not run "
            f"({reason}); fetch it again, or as safetensors"
        ) from error
    for name, tensor in entries:
        if not isinstance(tensor, Tensor):
            raise UserError(f"{file}: {name!r} is no tensor: a state dict is expected")
        yield name, tensor


def load_decoder(folder: Path, config: DecoderConfig, dtype: torch.dtype, device: str | torch.device) -> Decoder:
    """A frozen decoder whose parameters are made once, in their final dtype and place, and filled file by file.

    Each tensor goes into its rows of the fused parameters, so that no second copy of the model comes to be.

    Raises:
        UserError: missing, unexpected or mis-shaped tensors, by name, or what ``tensors`` raises.
    """
    with torch.device("meta"):
        model = Decoder(config)
    tied = {"lm_head.weight"} if config.tied else set()
    shapes = {name: meta.shape for name, meta in model.state_dict().items() if name not in tied}
    state = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    slots = unfused(state, config)
    for full, tensor in tensors(folder):
        name = full.removeprefix("model.")
        if name in tied or name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in slots:
            raise UserError(f"{folder}: unexpected tensor {name!r}")
        slot = slots.pop(name)
        if slot.shape != tensor.shape:
            raise UserError(f"{folder}: tensor {name!r} is {tuple(tensor.shape)}, expected {tuple(slot.shape)}")
        slot.copy_(tensor)
    for name in sorted(slots):
        raise UserError(f"{folder}: tensor {name!r} is missing")
    state |= dict.fromkeys(tied, state["embed_tokens.weight"])
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def save_decoder(model: Decoder, folder: Path, dtype: torch.dtype) -> None:
    """Write a Llama's ``config.json`` and ``model.safetensors`` as transformers names them.

    Raises:
        UserError: the disk refused it.
    """
    c = model.config
    assert not any((c.qkv_bias, c.o_bias, c.qk_norm)), "Llama's attention alone"
    said = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": c.rope_scaling,
        "max_position_embeddings": c.context,
        "tie_word_embeddings": c.tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    whole = {
        name: tensor for name, tensor in model.state_dict().items() if not (c.tied and name.startswith("lm_head."))
    }
    state = {
        name if name.startswith("lm_head.") else f"model.{name}": tensor.to(dtype).contiguous()
        for name, tensor in split_fused(whole, c).items()
    }
    instead = "choose another folder"
    write_atomically(folder / "config.json", lambda p: p.write_text(json.dumps(said, indent=2) + "\n"), instead)
    write_atomically(folder / "model.safetensors", lambda p: save_file(state, p), instead)


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint, read without the weights.

    Raises:
        UserError: a corrupt or truncated file, by name.
    """
    found = {}
    for file in weight_files(folder):
        if file.suffix == ".bin":
            found |= {name: tuple(tensor.shape) for name, tensor in _pickled(file)}
            continue
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {n: tuple(opened.get_slice(n).get_shape()) for n in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise UserError(f"{file}: corrupt or truncated weight file ({error}); fetch it again") from error
    return found


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


def unfused(state: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The names and shapes that published checkpoints use, as views of the fused tensors."""
    rows = {
        "qkv_proj": [n * config.head_dim for n in (config.heads, config.kv_heads, config.kv_heads)],
        "gate_up_proj": [config.intermediate_size] * 2,
    }
    views = {}
    for name, tensor in state.items():
        joined = next((j for j in FUSED if f".{j}." in name), None)
        if joined is None:
            views[name] = tensor
        else:
            for part, piece in zip(FUSED[joined], tensor.split(rows[joined]), strict=True):
                views[name.replace(joined, part)] = piece
    return views


def split_fused(state: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Undo ``fuse``, with memory of its own for each tensor, as safetensors wants it."""
    return {name: tensor.clone() for name, tensor in unfused(state, config).items()}


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


def sha256_of_tensors(state: Mapping[str, Tensor]) -> str:
    """Content hash of named tensors, bit for bit."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@functools.cache
def _digest(file: Path, modified: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def converted_gguf(gguf: Path, sha256: str | None, cache: Path) -> tuple[Path, str]:
    """Folder with the GGUF's config, tokenizer, chat template and fp32 safetensors, made on first use; its sha256.

    De-quantising takes about 15 seconds for 135M parameters, reading the result back under one.

    Raises:
        UserError: the file is not the one that ``sha256`` names, or the cache can't be written.
    """
    if not gguf.is_file():
        raise UserError(f"{gguf} is missing; reinstall its package")
    found = _digest(gguf, gguf.stat().st_mtime_ns)
    if sha256 is not None and found != sha256:
        raise UserError(f"{gguf}: sha256 {found[:12]}… is not the expected {sha256[:12]}…; reinstall its package")
    folder = cache / "gguf" / found[:16]
    if not folder.is_dir():
        write_atomically(folder, lambda path: convert(gguf, path), _CHOOSE)
    return folder, found
