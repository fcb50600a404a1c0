"""A draft LM learning between requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracedraft.drafts.student import NetworkStudent
from tracedraft.interfaces import Objective
from tracedraft.models.decoder import Decoder
from tracedraft.models.losses import head_loss, products_at
from tracedraft.types import Lesson, Predictions


class LmStudent(NetworkStudent[Decoder]):
    """What it says depends on the tokens before alone, so that a prediction at step k from slot i is that
    of slot i + k: all drafted tokens before it were accepted."""

    def __init__(self, model: Decoder, publish: Callable[[Decoder], str]):
        """
        Args:
            model: this student's own, at the served precision, its head untied.
            publish: brings a copy of the model into service, and says its sha256.
        """
        like = model.norm.weight
        super().__init__(model, like.dtype, torch.arange(model.config.vocab_size, device=like.device), publish)

    def loss(self, lesson: Lesson, asked: Predictions, objective: Objective) -> Tensor:
        at = asked.slots + asked.steps + 1
        tokens = lesson.tokens[None, : int(at.max()) + 1].to(self.vocab.device)
        with products_at(self.served, self.vocab.device):
            features = self.model.norm(self.model.whole(tokens)[0, at])
            teacher = asked.teacher[asked.rows]
            return head_loss(features, self.model.lm_head.weight, teacher, asked.weights, objective)

    def next_logits(self, lesson: Lesson, slot: int, tokens: Tensor) -> Tensor:
        return self.model.lm_head(self.model.norm(self.model.whole(tokens[None])[0, -1]))
