"""Plain data that crosses component boundaries.

Shape legend, used by every file: ``L`` prompt tokens, ``T`` tokens of one target pass, ``K`` drafted
tokens, ``A`` accepted tokens, ``n`` positions, ``H`` hidden size, ``V`` target vocabulary, ``D`` draft
vocabulary. The batch axis is dropped: a run serves one response at a time.

Alignment. The target consumes x_0 … x_{L-1}; at position j it yields tapped features H_j, a final hidden
state h_j and logits z_j, which predict x_{j+1}. Draft slot j-1 consumes (H_{j-1}, x_j) and its output
predicts x_{j+1}; **its teacher is z_j**.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Source = Literal["prompt", "response", "chain"]


@dataclass(frozen=True)
class Conversation:
    """One or more user turns, answered in order. ``occurrence`` counts its earlier showings in a stream."""

    id: str
    turns: tuple[str, ...]
    domain: str
    occurrence: int = 0


@dataclass(frozen=True)
class TargetShape:
    """What a draft must fit: sizes, the number of tapped layers, and which of how many they are, if known."""

    hidden_size: int
    vocab_size: int
    taps: int
    tapped: tuple[int, ...] = ()
    layers: int = 0


@dataclass(frozen=True)
class TargetPass:
    """What one pass of the target yields.

    Attributes:
        taps: [T, taps*H] residual stream at the input of the tapped layers, low to high.
        hidden: [T, H] final hidden states, after the last norm.
        logits: [T, V] for a verification; [1, V] (last position only) for a prefill.
    """

    taps: Tensor
    hidden: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Tree:
    """Which row of a pass follows which. Row 0 is the last committed token, and parents stand before their children.

    Attributes:
        parents: [T] int64 row of the token before; row 0's is itself.
        ancestors: [T, T] bool, where row i sees row j: itself, and what its path holds before it.
        depths: [T] int64 steps from row 0.
    """

    parents: Tensor
    ancestors: Tensor
    depths: Tensor


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens, which a pass verifies after the last committed one: row i+1 of the pass is token i.

    Attributes:
        tokens: [K] int64, target ids. No two that follow the same token are equal.
        probabilities: [K, D] that sampled tokens were drawn from; None where they are the likeliest.
        vocab: [D] target id of each of their columns.
        features: [≥K, H] by row of the pass, the pre-norm output that the tokens after it were chosen from, anything
            where none follows; None from a draft without a head.
        tree: None: a chain, each token following the one before.
    """

    tokens: Tensor
    probabilities: Tensor | None = None
    vocab: Tensor | None = None
    features: Tensor | None = None
    tree: Tree | None = None


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verification: the A accepted tokens and then the target's own next token.

    Attributes:
        ids: [A+1] int64 the same as ``tokens``, where the pass ran.
        tested: depths at which drafted tokens were tested: A, and one more if any followed the last accepted one.
        rows: [A+1] int64 rows of the pass that stand: the last committed token's, then the accepted ones'.
    """

    accepted: int
    tokens: list[int]
    ids: Tensor
    tested: int
    rows: Tensor


@dataclass(frozen=True)
class Evidence:
    """Supervision that decoding computes anyway, already aligned: row i of both belongs together.

    Attributes:
        source: where the positions lie, the prompt or the verified continuation; or "chain", the continuation's
            positions again as the chain that was just verified reached them.
        features: [n, H] pre-norm outputs of draft slots j-1, made from true target features; of a chain, from the
            draft's own outputs beyond the first.
        teacher: maps row indices [m] to the target logits z_j [m, V]. Lazy, since the logits of a whole
            prompt would cost more than an update can gain.
    """

    source: Source
    features: Tensor
    teacher: Callable[[Tensor], Tensor]


@dataclass
class OutputHead:
    """The draft's output norm and prediction head: all that an inner adapter may change, in place.

    Attributes:
        norm: [H] RMSNorm gain.
        weight: [D, H] prediction head.
        eps: RMSNorm epsilon.
        vocab: [D] int64, target id of each draft id, ascending.
        low_rank: left [n, D] and right [n, H] in the weight's dtype: the head is weight + leftᵀ·right.
        product: how normed features [n, H] are multiplied by the weight as it is now: [n, D].
    """

    norm: Tensor
    weight: Tensor
    eps: float
    vocab: Tensor
    low_rank: tuple[Tensor, Tensor] | None = None
    product: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.linear

    def logits(self, features: Tensor) -> Tensor:
        """Draft logits [n, D] of pre-norm features [n, H], at the head's own precision."""
        normed = torch.nn.functional.rms_norm(features, self.norm.shape, self.norm, self.eps)
        return self.project(normed)

    def project(self, normed: Tensor) -> Tensor:
        """The head alone: [n, H] → [n, D]."""
        logits = self.product(normed, self.weight)
        if self.low_rank is None:
            return logits
        left, right = self.low_rank
        return logits.addmm_(normed @ right.t(), left)


@dataclass(frozen=True)
class Update:
    """One attempted draft update. Numbers that were not measured are None.

    Attributes:
        round: verification rounds finished in this response (0: at prefill).
        committed: False when the transaction was rolled back.
        reason: why it was rolled back ("" when committed).
        positions: supervised positions that carried loss, by source.
        loss: mean T²·KL over them before the step.
        grad_norm: global gradient norm before clipping.
        drift: relative step per trained tensor, ‖Δ‖/‖W₀‖.
        vocab_mass: mean target probability inside the draft vocabulary.
    """

    round: int
    committed: bool
    reason: str
    positions: dict[str, int]
    loss: float | None
    grad_norm: float | None
    drift: dict[str, float]
    vocab_mass: float | None
    held_out_before: float | None = None
    held_out_after: float | None = None


@dataclass(frozen=True)
class Mismatch:
    """A token of a response that the target, asked again, would not have said.

    Attributes:
        index: into the response's tokens.
        said, own: the response's token and the target's.
        gap: how much lower ``said`` scores than the best token, recomputed at a higher precision; with the
            sampling noise in it, where there is any.
        bound: the gap up to which rounding at the served precision explains the difference.
    """

    index: int
    said: int
    own: int
    gap: float
    bound: float

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.bound


@dataclass
class Response:
    """One answered turn. Counts only; ratios are computed from sums of them.

    Attributes:
        tokens: generated ids, the end token included where the target produced one.
        ended: "eos", "limit" (max_new_tokens) or "context".
        rounds: S.
        accepted: A, cut where the response ends.
        cut: target tokens that the end cut off: len(tokens) = 1 + A + S - cut.
        accepted_per_round: A of each round.
        trials, survivals: by depth 1, 2 …: rounds in which drafted tokens were tested there, and one was accepted.
        updates: attempted updates of the draft.
        seconds: wall seconds by phase; they sum to the whole.
        shapes: [beams, levels] of what each round drafted; None where the decode mode says it already.
    """

    tokens: list[int]
    ended: Literal["eos", "limit", "context"]
    rounds: int
    accepted: int
    cut: int
    accepted_per_round: list[int]
    trials: list[int]
    survivals: list[int]
    updates: list[Update] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    shapes: list[list[int]] | None = None


@dataclass(frozen=True)
class Lesson:
    """One answered turn as serving computed it, for learning between requests. M = L + N - 1 tokens were consumed.

    Attributes:
        tokens: [M+1] int64, the prompt and its answer.
        taps: [M, taps*H] and hidden: [M, H] of the target at each but the last.
        prompt: L.
        rejected: [R, 2] int64 (slot, step): the draft's prediction at that step of the chain from that slot was
            tested and refused. Its teacher is the target's at position slot + step + 1.
        domain: of its conversation.
    """

    tokens: Tensor
    taps: Tensor
    hidden: Tensor
    prompt: int
    rejected: Tensor
    domain: str

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.tokens, self.taps, self.hidden, self.rejected))


@dataclass(frozen=True)
class Predictions:
    """Predictions of a lesson that a student is taught: made at step ``steps`` of the chain from slot ``slots``.

    Attributes:
        slots, steps: [n] int64.
        weights: [n] fp32, of each in the loss.
        teacher: [m, D] probabilities over the draft vocabulary, and which of its rows each is taught: rows [n].
    """

    slots: Tensor
    steps: Tensor
    weights: Tensor
    teacher: Tensor
    rows: Tensor
