"""What the target computed along one response, kept as verification left it: nothing is run twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tracedraft.types import Lesson, TargetPass, Verdict


class Transcript:
    """Of one response at a time."""

    def begin(self, prompt: Sequence[int], root: Tensor, taps: Tensor, hidden: Tensor) -> None:
        """After the prefill: prompt [L], the first token [1], taps [L, taps*H] and final hidden states [L, H]."""
        self.prompt = len(prompt)
        self._tokens = [root.new_tensor(prompt), root]
        self._taps, self._hidden = [taps], [hidden]
        self._rejected: list[tuple[int, int]] = []
        self._root = self.prompt  # position of the last committed token, which no pass has consumed yet

    def add(self, passed: TargetPass, found: Verdict, kept: int) -> None:
        """A verified round, of which ``kept`` tokens stand before the response's end."""
        rows = found.rows[:kept]
        self._tokens.append(found.ids[:kept])
        self._taps.append(passed.taps[rows])
        self._hidden.append(passed.hidden[rows])
        if found.accepted < min(found.tested, kept):
            self._rejected.append((self._root - 1, found.accepted))
        self._root += kept

    def lesson(self, domain: str) -> Lesson:
        tokens = torch.cat(self._tokens)
        rejected = torch.tensor(self._rejected, dtype=torch.long, device=tokens.device).reshape(-1, 2)
        return Lesson(tokens, torch.cat(self._taps), torch.cat(self._hidden), self.prompt, rejected, domain)
