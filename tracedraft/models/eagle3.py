"""The EAGLE-3 draft network (Li et al., arXiv 2503.01840) and its published checkpoint layout.

Slot i fuses the target's tapped features H_i with the embedding of token i+1 at rotary position i and
predicts token i+2. Deeper chain slots take the network's own pre-norm output in place of fused features.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.models import weights
from tracedraft.models.decoder import MLP, Attention, DecoderConfig, RMSNorm


@dataclass(frozen=True)
class Eagle3Config:
    """``layer`` holds the midlayer's shape; ``layer.vocab_size`` is the target's vocabulary."""

    layer: DecoderConfig
    draft_vocab_size: int
    target_hidden_size: int
    taps: int
    fc_norm: bool


class MidLayer(nn.Module):
    """The one decoder layer, over [embedding, fused features]; the residual is the un-normed feature."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        size, eps = config.hidden_size, config.eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(2 * size, config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)

    def attention_input(self, embedded: Tensor, features: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), dim=-1)

    def finish(self, features: Tensor, attended: Tensor) -> Tensor:
        features = features + attended
        return features + self.mlp(self.post_attention_layernorm(features))


class Eagle3(nn.Module):
    """Parameters carry the published names; ``embed_tokens`` is the target's and is not saved."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        size = config.layer.hidden_size
        self.fc = nn.Linear(config.taps * config.target_hidden_size, size, bias=False)
        norms = [RMSNorm(config.target_hidden_size, config.layer.eps) for _ in range(config.taps)]
        self.fc_norm = nn.ModuleList(norms if config.fc_norm else [])
        self.midlayer = MidLayer(config.layer)
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

        Taps hold massive activations in a few dimensions; newer checkpoints norm each tap first.
        """
        if self.fc_norm:
            parts = taps.chunk(self.config.taps, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)


def read_config(folder: Path) -> Eagle3Config:
    """The draft's shape, from the raw ``config.json``: a missing rope_theta means 10000 there.

    Raises:
        UserError: no config, or a required key is missing.
    """
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"draft: {folder / 'config.json'} cannot be read: {error}") from error
    try:
        hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
        layer = DecoderConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=hidden,
            intermediate_size=raw["intermediate_size"],
            layers=1,
            heads=heads,
            kv_heads=raw.get("num_key_value_heads", heads),
            head_dim=raw.get("head_dim") or hidden // heads,
            eps=raw["rms_norm_eps"],
            rope_theta=raw.get("rope_theta", 10000.0),
            rope_scaling=raw.get("rope_scaling"),
            tied=False,
            context=raw.get("max_position_embeddings", 2048),
        )
        return Eagle3Config(
            layer=layer,
            draft_vocab_size=raw["draft_vocab_size"],
            target_hidden_size=raw.get("target_hidden_size") or hidden,
            taps=raw.get("num_taps", 3),
            fc_norm=bool(raw.get("fc_norm", False)),
        )
    except KeyError as error:
        raise UserError(f"draft: {folder / 'config.json'} lacks the key {error.args[0]!r}") from error


def load(folder: Path, dtype: torch.dtype, device: str | torch.device) -> Eagle3:
    """A checkpoint in SafeAILab layout.

    Raises:
        UserError: unreadable, incomplete or mis-shaped, by file and tensor.
    """
    config = read_config(folder)
    with torch.device("meta"):
        model = Eagle3(config)
    state = {}
    for name, tensor in weights.tensors(folder):
        if name != "embed_tokens.weight":
            state[name] = tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
    if config.draft_vocab_size == config.layer.vocab_size:
        ids = torch.arange(config.draft_vocab_size, device=device)
        state |= {"d2t": torch.zeros_like(ids), "t2d": torch.ones_like(ids, dtype=torch.bool)}
    weights.load_module(model, weights.fuse(state, folder), folder)
    vocab = model.vocab
    if bool((vocab < 0).any()) or bool((vocab >= config.layer.vocab_size).any()):
        raise UserError(f"draft: {folder}: d2t maps outside the target vocabulary of {config.layer.vocab_size}")
    return model.eval()


def save(model: Eagle3, folder: Path, dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``model.safetensors`` in SafeAILab layout.

    Raises:
        UserError: the disk refused it.
    """
    layer = asdict(model.config.layer)
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": layer["hidden_size"],
        "intermediate_size": layer["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": layer["heads"],
        "num_key_value_heads": layer["kv_heads"],
        "head_dim": layer["head_dim"],
        "rms_norm_eps": layer["eps"],
        "rope_theta": layer["rope_theta"],
        "rope_scaling": layer["rope_scaling"],
        "max_position_embeddings": layer["context"],
        "vocab_size": layer["vocab_size"],
        "draft_vocab_size": model.config.draft_vocab_size,
        "target_hidden_size": model.config.target_hidden_size,
        "num_taps": model.config.taps,
        "fc_norm": model.config.fc_norm,
    }
    state = weights.split_fused(dict(model.state_dict()), model.config.layer)
    state = {n: (t.to(dtype) if t.is_floating_point() else t).contiguous() for n, t in state.items()}
    instead = "choose another folder"
    write_atomically(folder / "config.json", lambda p: p.write_text(json.dumps(raw, indent=2) + "\n"), instead)
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
