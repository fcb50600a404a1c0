"""Training of a draft LM: the target's distribution at every position of its own text, distilled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tracedraft.errors import UserError
from tracedraft.models import weights
from tracedraft.models.architectures import read_decoder_config
from tracedraft.models.decoder import Decoder, DecoderConfig
from tracedraft.models.losses import head_loss
from tracedraft.target import LlamaTarget
from tracedraft.training.objective import OBJECTIVES
from tracedraft.training.spec import Pupil, TrainingSpec

SPREAD = 0.1  # standard deviation of new embeddings: at 0.02 logits stay flat for hundreds of steps
ROWS = 512  # of logits at a time, where they are only looked at


@dataclass(frozen=True)
class LmTrainingSpec(TrainingSpec):
    """How to train a Llama whose embeddings are its head too.

    Attributes:
        hidden_size, intermediate_size, layers, heads: its shape; as many key heads.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("hidden_size", "intermediate_size", "layers", "heads")
        if self.hidden_size % (2 * self.heads):
            raise UserError(
                f"training.heads={self.heads}: expected to divide half of training.hidden_size={self.hidden_size}"
            )

    def check(self, target: LlamaTarget) -> None:
        if self.hidden_size > target.hidden_size:
            raise UserError(
                f"training.hidden_size={self.hidden_size}: expected at most the target's {target.hidden_size}"
            )
        if self.start is not None and (size := read_decoder_config(self.start).vocab_size) != target.vocab_size:
            raise UserError(f"{self.start}: its vocabulary is {size}, the target's {target.vocab_size}")

    def count(self, target: LlamaTarget) -> int:
        config = new_config(target, self) if self.start is None else read_decoder_config(self.start)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in Decoder(config).parameters())
        return size - (config.vocab_size * config.hidden_size if config.tied else 0)

    def pupil(self, target: LlamaTarget, files: list[Path]) -> LmPupil:
        if self.start is not None:
            config = read_decoder_config(self.start)
            return LmPupil(weights.load_decoder(self.start, config, torch.float32, "cpu"), target, self)
        return LmPupil(new_lm(target, self), target, self)


class LmPupil(Pupil[Decoder]):
    def __init__(self, model: Decoder, target: LlamaTarget, spec: LmTrainingSpec):
        self.target, self.spec = target, spec
        self.model = model.to(target.device).requires_grad_(True)
        if model.config.tied:  # one parameter, or the optimiser would move it twice
            model.lm_head.weight = model.embed_tokens.weight

    def loss(self, raw: dict[str, Tensor]) -> Tensor:
        """Mean over all positions; of the first of a row nothing is learnt, as no slot of a draft makes it."""
        counted = raw["counts"][:, :-1] * raw["counts"][:, 1:]
        if self.spec.answers_only:  # the features of a position foretell the token after it
            counted = counted * torch.nn.functional.pad(raw["answer"][:, 2:], (0, 1))
        features = self.model.norm(self.model.whole(raw["tokens"].long())[:, 1:][counted])
        with torch.no_grad():
            teacher = self.target.model.lm_head(raw["hidden"][:, 1:][counted]).softmax(dim=-1)
        weights = torch.full((len(features),), 1 / raw["tokens"].numel(), device=features.device)
        return head_loss(features, self.model.lm_head.weight, teacher, weights, OBJECTIVES[self.spec.loss])

    def hits(self, raw: dict[str, Tensor], depths: int) -> Tensor:
        """Step k from slot i is the prediction of slot i + k, since the text before it is the same."""
        tokens = raw["tokens"].long()
        features = self.model.norm(self.model.whole(tokens)).flatten(0, 1)
        said = torch.cat([self.model.lm_head(some).argmax(dim=-1) for some in features.split(ROWS)])
        right = (said.view_as(tokens)[:, 1:-1] == tokens[:, 2:]).cpu()
        hits = torch.zeros(depths, *tokens.shape, dtype=torch.bool)
        for k in range(min(depths, right.shape[1])):
            hits[k, :, : right.shape[1] - k] = right[:, k:]
        return hits

    def sayable(self, tokens: Tensor) -> Tensor:
        return torch.ones_like(tokens, dtype=torch.bool)

    def save(self, folder: Path) -> None:
        weights.save_decoder(self.model, folder, torch.bfloat16)

    def resumed(self) -> None:
        pass


def new_config(target: LlamaTarget, spec: LmTrainingSpec) -> DecoderConfig:
    of_target = target.model.config
    return DecoderConfig(
        vocab_size=of_target.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=spec.heads,
        head_dim=spec.hidden_size // spec.heads,
        eps=of_target.eps,
        rope_theta=10000.0,
        rope_scaling=None,
        tied=True,
        context=target.context,
    )


def new_lm(target: LlamaTarget, spec: LmTrainingSpec) -> Decoder:
    """Random layers; embeddings are the target's, cut to their principal directions, since most tokens are rare in a
    small corpus."""
    model = Decoder(new_config(target, spec))
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
        embedding = target.model.embed_tokens.weight.float().cpu()
        directions = torch.linalg.eigh(embedding.T @ embedding).eigenvectors[:, -spec.hidden_size :]
        start = embedding @ directions
        model.embed_tokens.weight.copy_(start * (SPREAD / start.std()))
    return model
