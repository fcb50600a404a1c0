"""What students of every kind of draft share: a network of their own at fp32, and who serves a copy of it."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, Self, TypeVar

import torch
from torch import Generator, Tensor, nn

from tracedraft.interfaces import Student
from tracedraft.models.losses import products_at
from tracedraft.types import Lesson

Network = TypeVar("Network", bound=nn.Module)


class NetworkStudent(Student, Generic[Network]):
    """Its masters are the parameters of ``model``."""

    def __init__(self, model: Network, dtype: torch.dtype, vocab: Tensor, publish: Callable[[Network], str]):
        """
        Args:
            model: this student's own.
            dtype: the precision that is served.
            vocab: [D] target id of each draft id.
            publish: brings a copy of the model into service, and says its sha256.
        """
        self.model, self.served, self.vocab, self._publish = model, dtype, vocab, publish
        model.float().requires_grad_(True)
        self.weights = dict(model.named_parameters())

    @torch.no_grad()
    def say(self, lesson: Lesson, slot: int, length: int, draws: Generator) -> Tensor:
        tokens = torch.cat((lesson.tokens[: slot + 2], lesson.tokens.new_zeros(length))).to(self.vocab.device)
        with products_at(self.served, self.vocab.device):
            for at in range(slot + 2, len(tokens)):
                p = self.next_logits(lesson, slot, tokens[:at]).float().softmax(0)
                tokens[at] = self.vocab[torch.multinomial(p.cpu(), 1, generator=draws).to(tokens.device)[0]]
        return tokens[slot + 2 :]

    @abstractmethod
    def next_logits(self, lesson: Lesson, slot: int, tokens: Tensor) -> Tensor:
        """[D] after ``tokens`` [n], of which those up to slot + 1 are the lesson's and the others its own."""

    def serve(self) -> str:
        return self._publish(self.model)

    def apart(self) -> Self:
        twin = copy.copy(self)
        twin.model, twin._publish = copy.deepcopy(self.model), _nobody
        twin.weights = dict(twin.model.named_parameters())
        return twin


def _nobody(model: nn.Module) -> str:
    raise RuntimeError("a student apart serves nobody")
