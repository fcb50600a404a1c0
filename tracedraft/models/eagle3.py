"""The EAGLE-3 draft network (Li et al., arXiv 2503.01840), and its checkpoints on disk.

Slot i fuses the target's tapped features H_i with the embedding of token i+1 at rotary position i and
predicts token i+2. Deeper chain slots take the network's own pre-norm output in place of fused features
(EAGLE-3.1: the normed output). How checkpoints differ: ``eagle3_layouts``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.models import eagle3_layouts as layouts
from tracedraft.models import weights
from tracedraft.models.decoder import MLP, Attention, RMSNorm
from tracedraft.models.eagle3_layouts import Eagle3Config, Layout, Reading, VocabMap, read_config


class MidLayer(nn.Module):
    """The one decoder layer, over [embedding, fused features]; the residual is the feature, un-normed as a rule."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(2 * size, config.layer)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.layer.intermediate_size)
        self.norm_before_residual = config.norm_before_residual

    def attention_input(self, embedded: Tensor, features: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), dim=-1)

    def finish(self, features: Tensor, attended: Tensor) -> Tensor:
        residual = self.hidden_norm(features) if self.norm_before_residual else features
        features = residual + attended
        return features + self.mlp(self.post_attention_layernorm(features))


class Eagle3(nn.Module):
    """Parameters carry SafeAILab's names; ``embed_tokens`` is the target's unless the checkpoint has its own."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        size = config.layer.hidden_size
        self.fc = nn.Linear(config.taps * config.target_hidden_size, size, bias=False)
        norms = [RMSNorm(config.target_hidden_size, config.layer.eps) for _ in range(config.taps)]
        self.fc_norm = nn.ModuleList(norms if config.fc_norm else [])
        width = config.taps * config.target_hidden_size
        self.input_norm = RMSNorm(width, config.layer.eps) if config.norm_before_fc else None
        vocab_size = config.layer.vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, size) if config.own_embedding else None
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(size, config.layer.eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(config.layer.vocab_size, dtype=torch.bool))

    @property
    def vocab(self) -> Tensor:
        """[D] target id of each draft id, ascending. On disk ``d2t`` holds the offset, target minus draft."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_vocab(self, target_ids: Tensor) -> None:
        """Serve the given target ids [D], ascending."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def fuse(self, taps: Tensor) -> Tensor:
        """Target taps [..., taps*H_target] to features [..., H].

        Taps hold massive activations in a few dimensions; newer checkpoints norm each tap first, or all as one.
        """
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm:
            parts = taps.chunk(self.config.taps, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def feedback(self, outputs: Tensor) -> Tensor:
        """What the chain's next slot takes for features, of pre-norm outputs [..., H].

        Normed ones depend on the norm that adapters train, but no cached slot does: those read taps.
        """
        return self.norm(outputs) if self.config.norm_output else outputs


def load(
    folder: Path, dtype: torch.dtype | None, device: str | torch.device, reading: Reading | None = None
) -> Eagle3:
    """A checkpoint in any of the published layouts.

    Args:
        dtype: None keeps each tensor's own.
        reading: how to read what checkpoints leave open.

    Raises:
        UserError: unreadable, incomplete, mis-shaped or open to more than one reading, by file, tensor or key.
    """
    reading = reading or Reading()
    config = read_config(folder, reading)
    with torch.device("meta"):
        model = Eagle3(config)
    state = {}
    for name, tensor in layouts.tensors(folder):
        state[name] = tensor.to(device, dtype if dtype and tensor.is_floating_point() else tensor.dtype)
    if not config.fc_norm:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("fc_norm.")}
    state |= _vocabulary(state, config, reading, folder)
    weights.load_module(model, weights.fuse(state, folder), folder)
    return model.eval()


def _vocabulary(state: dict[str, Tensor], config: Eagle3Config, reading: Reading, folder: Path) -> dict[str, Tensor]:
    """``d2t`` [D] and ``t2d`` [V] of a checkpoint that may have both, one, or neither.

    Raises:
        UserError: none, where the vocabularies differ; or targets outside the target's vocabulary.
    """
    size, target_size = config.draft_vocab_size, config.layer.vocab_size
    d2t, t2d = state.get("d2t"), state.get("t2d")
    index = torch.arange(size, device=state["lm_head.weight"].device)
    if size == target_size or (d2t is None and t2d is None and reading.d2t is VocabMap.identity):
        ids = index
    elif d2t is not None:
        ids = d2t + index if len(d2t) == size else d2t
    elif t2d is not None:
        ids = t2d.nonzero().flatten()
    else:
        raise UserError(
            f"draft: {folder} has neither d2t nor t2d, so nothing says which {size} of the target's {target_size} "
            "tokens it drafts: set draft.d2t=identity if they are the first ones"
        )
    if bool((ids < 0).any()) or bool((ids >= target_size).any()):
        raise UserError(f"draft: {folder}: d2t maps outside the target vocabulary of {target_size}")
    members = torch.zeros(target_size, dtype=torch.bool, device=ids.device)
    members[ids] = True
    if len(ids) != size or int(members.sum()) != size:
        raise UserError(f"draft: {folder}: the head has {size} tokens, d2t or t2d names {int(members.sum())}")
    if bool((ids.diff() <= 0).any()):
        raise UserError(f"draft: {folder}: d2t lists target tokens out of order; sort it, and the head with it")
    if size == target_size:
        return {"d2t": torch.zeros_like(index), "t2d": members}
    return {"d2t": ids - index if d2t is None else d2t, "t2d": members if t2d is None else t2d}


def save(
    model: Eagle3,
    folder: Path,
    dtype: torch.dtype | None,
    layout: Layout = Layout.safeailab,
    config: dict[str, Any] | None = None,
) -> None:
    """Write ``config.json`` and ``model.safetensors``.

    Raises:
        UserError: the disk refused it.

    Args:
        dtype: None keeps each tensor's own.
        config: what ``config.json`` says; None: the draft's shape.
    """
    said = config or layouts.to_json(model.config, layout, dtype or model.fc.weight.dtype)
    state = weights.split_fused(dict(model.state_dict()), model.config.layer)
    if model.config.draft_vocab_size == model.config.layer.vocab_size:
        del state["d2t"], state["t2d"]  # engines expect no map then
    state = {
        layouts.named(name, layout): (t.to(dtype) if dtype and t.is_floating_point() else t).contiguous()
        for name, t in state.items()
    }
    instead = "choose another folder"
    write_atomically(folder / "config.json", lambda p: p.write_text(json.dumps(said, indent=2) + "\n"), instead)
    write_atomically(folder / "model.safetensors", lambda p: save_file(state, p), instead)


def start_from(
    model: Eagle3, head: Tensor, norm: Tensor, generator: torch.Generator, pass_through: bool = True
) -> None:
    """Random weights, but for the target's own norm and head.

    Args:
        head: [V, H] the target's head; norm: [H] its final norm gain.
        pass_through: start as a logit lens, ``fc`` handing the last tap through.
    """
    size = model.config.layer.hidden_size
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
        if pass_through:
            model.fc.weight.mul_(0.1)
            model.fc.weight[:, -size:] += torch.eye(size)
            model.midlayer.self_attn.o_proj.weight.mul_(0.1)
            model.midlayer.mlp.down_proj.weight.mul_(0.1)
        model.norm.weight.copy_(norm)
        model.lm_head.weight.copy_(head[model.vocab])


def wider(config: Eagle3Config, inner: int) -> Eagle3Config:
    return replace(config, layer=replace(config.layer, intermediate_size=inner))


def widen(model: Eagle3, inner: int, generator: torch.Generator) -> Eagle3:
    """The same function with ``inner`` neurons in the layer's MLP (Net2Net's aim, arXiv 1511.05641).

    New neurons read at random and write nothing yet, so that they learn apart from each other.
    """
    old = model.midlayer.mlp
    more = inner - old.down_proj.in_features
    if more == 0:
        return model
    wide = Eagle3(wider(model.config, inner))
    gate, up = old.gate_up_proj.weight.detach().chunk(2)
    new = [torch.randn((more, gate.shape[1]), generator=generator).to(gate) * part.std() for part in (gate, up)]
    state = model.state_dict()
    state["midlayer.mlp.gate_up_proj.weight"] = torch.cat((gate, new[0], up, new[1]))
    state["midlayer.mlp.down_proj.weight"] = torch.nn.functional.pad(old.down_proj.weight.detach(), (0, more))
    wide.load_state_dict(state)
    return wide
