"""Training of an EAGLE-3 draft by its training-time test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tracedraft.drafts.eagle3 import check_fit
from tracedraft.errors import UserError
from tracedraft.models import eagle3
from tracedraft.models.decoder import DecoderConfig
from tracedraft.target import LlamaTarget
from tracedraft.training.corpus import read_columns
from tracedraft.training.objective import Batch, teacher_of_hidden, training_time_test
from tracedraft.training.replay import hits
from tracedraft.training.spec import Pupil, TrainingSpec


@dataclass(frozen=True)
class Eagle3TrainingSpec(TrainingSpec):
    """How to train an EAGLE-3 draft.

    Attributes:
        draft_vocab_size: the most frequent tokens of the corpus.
        fc_norm: norm each tap before ``fc``.
        pass_through: start ``fc`` as a pass-through of the last tap.
        intermediate_size: the layer's inner width; None: the target's, or that of the draft to go on from, which a
            larger one widens without changing what it says.
        unroll, decay: training-time-test steps, and the weight of each after the one before.
        accepted_only: of later steps learn those alone that inference comes to; see ``training_time_test``.
    """

    draft_vocab_size: int
    fc_norm: bool
    pass_through: bool
    intermediate_size: int | None
    unroll: int
    decay: float
    accepted_only: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("draft_vocab_size", "unroll")
        if self.length < self.unroll + 2:
            raise UserError(
                f"training.length={self.length}: expected at least training.unroll + 2 = {self.unroll + 2}"
            )
        if self.intermediate_size is not None:
            self._at_least_one("intermediate_size")
            if self.after is not None:
                raise UserError(
                    f"training.intermediate_size={self.intermediate_size}: expected null beside training.after, "
                    "whose moments are of the old width; give training.init=OLD/draft instead"
                )

    def check(self, target: LlamaTarget) -> None:
        if self.draft_vocab_size > target.vocab_size:
            raise UserError(f"training.draft_vocab_size={self.draft_vocab_size}: the target has {target.vocab_size}")
        if self.start is not None:
            config = eagle3.read_config(self.start)
            check_fit(config, target.shape, self.start)
            if self.inner(config.layer) < config.layer.intermediate_size:
                raise UserError(
                    f"training.intermediate_size={self.intermediate_size}: {self.start} has "
                    f"{config.layer.intermediate_size}, which can be widened, not narrowed"
                )

    def inner(self, layer: DecoderConfig) -> int:
        """Inner width of a draft that is started from such a layer."""
        return self.intermediate_size or layer.intermediate_size

    def count(self, target: LlamaTarget) -> int:
        config = new_config(target, self) if self.start is None else eagle3.read_config(self.start)
        config = eagle3.wider(config, self.inner(config.layer))
        with torch.device("meta"):
            return sum(weight.numel() for weight in eagle3.Eagle3(config).parameters())

    def pupil(self, target: LlamaTarget, files: list[Path]) -> Eagle3Pupil:
        if self.start is not None:
            model = eagle3.load(self.start, torch.float32, "cpu")
            model.config = replace(model.config, tapped=target.taps)  # which the checkpoint may not have said
            model = eagle3.widen(model, self.inner(model.config.layer), torch.Generator().manual_seed(self.seed))
            return Eagle3Pupil(model, target, self)
        vocab = corpus_vocab(files, self.draft_vocab_size, target.vocab_size, target.eos_ids)
        return Eagle3Pupil(new_draft(target, vocab, self), target, self)


class Eagle3Pupil(Pupil[eagle3.Eagle3]):
    def __init__(self, model: eagle3.Eagle3, target: LlamaTarget, spec: Eagle3TrainingSpec):
        self.target, self.spec = target, spec
        self.model = model.to(target.device).requires_grad_(True)
        own = self.model.embed_tokens
        self.embedding = (target.model.embed_tokens if own is None else own).weight.detach().float()
        self.resumed()

    def resumed(self) -> None:
        self.head = self.target.model.lm_head.weight[self.model.vocab]

    def batch(self, raw: dict[str, Tensor]) -> Batch:
        """Teacher logits are recomputed from the cached final hidden states, over the draft vocabulary."""
        counts = raw["counts"]
        if self.spec.answers_only:  # what is made from position i is held against token i + 2
            counts = counts & torch.nn.functional.pad(raw["answer"][:, 2:], (0, 2))
        return Batch(
            tokens=raw["tokens"].long(),
            taps=raw["taps"].float(),
            teacher=teacher_of_hidden(raw["hidden"], self.head),
            in_vocab=self.model.t2d[raw["argmax"].long()],
            counts=counts.float(),
            teachers=raw["counts"],
        )

    def loss(self, raw: dict[str, Tensor]) -> Tensor:
        spec, batch = self.spec, self.batch(raw)
        return training_time_test(
            self.model, self.embedding, batch, spec.unroll, spec.decay, spec.loss, spec.accepted_only
        )[0]

    def hits(self, raw: dict[str, Tensor], depths: int) -> Tensor:
        return hits(self.model, self.embedding, raw["tokens"].long(), raw["taps"].float(), depths)

    def sayable(self, tokens: Tensor) -> Tensor:
        return self.model.t2d[tokens.long()]

    def save(self, folder: Path) -> None:
        eagle3.save(self.model, folder, torch.bfloat16)


def corpus_vocab(files: list[Path], size: int, vocab_size: int, always: frozenset[int]) -> Tensor:
    """The ``size`` most frequent next tokens of the corpus, ascending; ``always`` are among them."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for file in files:
        counted, *columns = read_columns(file, "counts", "argmax", "tokens")
        for column in columns:
            counts += torch.bincount(column[counted], minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    return torch.topk(counts, size).indices.sort().values


def new_config(target: LlamaTarget, spec: Eagle3TrainingSpec) -> eagle3.Eagle3Config:
    """One layer of the target's hidden size."""
    inner = spec.inner(target.model.config)
    layer = replace(target.model.config, layers=1, intermediate_size=inner, rope_theta=10000.0, rope_scaling=None)
    taps = target.taps
    return eagle3.Eagle3Config(layer, spec.draft_vocab_size, layer.hidden_size, len(taps), spec.fc_norm, tapped=taps)


def new_draft(target: LlamaTarget, vocab: Tensor, spec: Eagle3TrainingSpec) -> eagle3.Eagle3:
    """Its head and norm started from the target's."""
    model = eagle3.Eagle3(new_config(target, spec))
    model.set_vocab(vocab)
    head, norm = target.model.lm_head.weight.float().cpu(), target.model.norm.weight.float().cpu()
    eagle3.start_from(model, head, norm, torch.Generator().manual_seed(spec.seed), spec.pass_through)
    return model
