"""EAGLE-3 learning between requests, through the chain that inference rolls out (training-time test, 2503.01840)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracedraft.drafts.student import NetworkStudent
from tracedraft.interfaces import Objective
from tracedraft.models.eagle3 import Eagle3
from tracedraft.models.losses import head_loss, products_at
from tracedraft.models.unroll import chain
from tracedraft.types import Lesson, Predictions


class Eagle3Student(NetworkStudent[Eagle3]):
    """A prediction at step k from a slot is made through k steps of the draft's own outputs."""

    def __init__(self, model: Eagle3, embedding: Tensor, publish: Callable[[Eagle3], str]):
        """
        Args:
            model: this student's own, at the served precision.
            embedding: [V, H], which is not trained.
            publish: brings a copy of the model into service, and says its sha256.
        """
        super().__init__(model, model.norm.weight.dtype, model.vocab, publish)
        self.embedding = embedding

    def loss(self, lesson: Lesson, asked: Predictions, objective: Objective) -> Tensor:
        device = self.embedding.device
        tokens, taps = lesson.tokens[None].to(device), lesson.taps[None].to(device).float()
        depth = int(asked.steps.max()) + 1
        # A step needs the outputs of all slots that go deeper.
        slots = [asked.slots[asked.steps >= k].unique() for k in range(depth)]
        total = taps.new_zeros(())
        with products_at(self.served, device):
            for k, outputs in enumerate(chain(self.model, self.embedding, tokens, taps, slots)):
                mine = asked.steps == k
                if not bool(mine.any()):
                    continue
                features = outputs[0, torch.searchsorted(slots[k], asked.slots[mine])]
                teacher = asked.teacher[asked.rows[mine]]
                head = self.model.lm_head.weight
                part = head_loss(self.model.norm(features), head, teacher, asked.weights[mine], objective)
                total = total + part
        return total

    def next_logits(self, lesson: Lesson, slot: int, tokens: Tensor) -> Tensor:
        taps = lesson.taps[None, : slot + 1].to(tokens.device).float()
        steps = [torch.tensor([slot], device=tokens.device)] * (len(tokens) - slot - 1)
        *_, outputs = chain(self.model, self.embedding, tokens[None], taps, steps)
        return self.model.lm_head(self.model.norm(outputs[0, -1]))
