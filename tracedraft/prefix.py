"""Prefill, and what the turns of a conversation share of it, computed once.

A later turn's prompt begins with the earlier one. Its whole chunks were computed in passes whose shapes their place
alone decides, by the target and the draft alike, so what is kept of them has the very bits that prefilling them again
would give. The answer in between was written by verification passes, which round otherwise: it is prefilled with the
next question.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tracedraft.interfaces import Draft, Target
from tracedraft.verify import Sampling, choose


class Prefix:
    """What one arm's prefill of the last turn left, for the next turn of the same conversation under the same spec.

    Holds the caches of the last response in memory until the next one has begun.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows: list[Tensor] = []  # [..., L, E] of the target's cache, and of the draft's
        self.outputs: list[Tensor] = []  # [L, …] the target's hidden states, the draft's slots, the target's taps

    def resume(self, prompt: Sequence[int], chunk: int, models: Sequence[Target | Draft]) -> int:
        """Give ``models`` back what they would compute again: how many tokens of ``prompt``.

        The token after them is known to be the same too, since the draft's slots read one token ahead.
        """
        pairs = zip(self.tokens, prompt, strict=False)
        common = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(self.tokens), len(prompt)))
        known = max(common - 1, 0) // chunk * chunk
        for model, rows in zip(models, self.rows, strict=False):
            model.resume(rows[..., :known, :])
        self.tokens, self.rows, self.outputs = [], [], [kept[:known] for kept in self.outputs]
        return known

    def keep(
        self, prompt: Sequence[int], models: Sequence[Target | Draft], outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Note what ``models`` have of ``prompt`` now. Returns what they put out for all of it, [L, …] each, given
        ``outputs`` for what was not known."""
        self.tokens, self.rows = list(prompt), [model.rows(len(prompt)) for model in models]
        known = self.outputs or [output[:0] for output in outputs]
        self.outputs = [torch.cat(parts) for parts in zip(known, outputs, strict=True)]
        return self.outputs


def prefill(
    target: Target, draft: Draft, prompt: Sequence[int], chunk: int, sampling: Sampling, prefix: Prefix
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Consume ``prompt`` [L] from where ``prefix`` ends.

    Returns:
        the response's first token [1]; the target's hidden states [L, H], the draft's slots [L, H] and the target's
        taps [L, taps*H].
    """
    known = prefix.resume(prompt, chunk, (target, draft))
    seen = target.prefill(prompt[known:])
    root = choose(seen.logits, sampling, len(prompt))
    following = torch.cat((root.new_tensor(prompt[known + 1 :]), root))
    pieces = zip(seen.taps.split(chunk), following.split(chunk), strict=True)
    slots = torch.cat([draft.extend(taps, tokens) for taps, tokens in pieces])
    hidden, slots, taps = prefix.keep(prompt, (target, draft), (seen.hidden, slots, seen.taps))
    return root, hidden, slots, taps


def prefill_plainly(target: Target, prompt: Sequence[int], chunk: int, sampling: Sampling, prefix: Prefix) -> Tensor:
    """As ``prefill``, without a draft: the first token [1]."""
    known = prefix.resume(prompt, chunk, [target])
    root = choose(target.prefill(prompt[known:]).logits, sampling, len(prompt))
    prefix.keep(prompt, [target], [])
    return root
