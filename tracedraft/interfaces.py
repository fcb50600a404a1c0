"""What the decode loop knows of its components.

Every component is a frozen dataclass *spec* (plain data, filled from one YAML) whose ``build`` makes the
live object. Classes here are abstract; implementations are final.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Generator, Tensor

from tracedraft.errors import UserError
from tracedraft.types import (
    Conversation,
    Evidence,
    Lesson,
    OutputHead,
    Predictions,
    Proposal,
    TargetPass,
    TargetShape,
    Tree,
    Update,
)

Pick = Callable[[Tensor, int], tuple[Tensor, Tensor]]
# Asked after each level of a proposal: whether to draft another, given how many there are, and the cumulative
# log-probabilities of the nodes [m] that would be proposed now, and of those [k] that would go on. After the
# last level the answer changes nothing.
More = Callable[[int, Tensor, Tensor], bool]
# Loss [n] of logits [n, D] against a teacher's probabilities [n, D], and its gradient [n, D]; see ``models.losses``.
Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Target(ABC):
    """The frozen model whose output is served, with the KV cache of the response in progress."""

    vocab_size: int
    hidden_size: int
    context: int
    eos_ids: frozenset[int]

    def prepare(self, capacity: int) -> None:  # noqa: B027  (few have anything to do)
        """Before a response is timed: what its cache of ``capacity`` rows takes once, and later ones find done."""

    @abstractmethod
    def begin(self, capacity: int, width: int, chunk: int) -> None:
        """Start a response: a zeroed KV cache of ``capacity`` rows; verification passes are ``width`` tokens
        wide, prefill passes ``chunk``, both padded, so that every row always rounds alike."""

    @abstractmethod
    def prefill(self, tokens: Sequence[int]) -> TargetPass:
        """Consume and commit the prompt [L], or what follows the whole chunks of it that were resumed."""

    @abstractmethod
    def verify(self, tokens: Tensor, tree: Tree | None = None) -> TargetPass:
        """Consume T ≤ width tokens after the committed ones, each after the one before or as ``tree`` says,
        committing none."""

    @abstractmethod
    def commit(self, n: int, rows: Tensor | None = None) -> None:
        """Keep ``n`` tokens of the last verification, the first or those at ``rows`` [n], a path of its tree; the
        rest are rolled back."""

    @abstractmethod
    def rows(self, n: int) -> Tensor:
        """Cache rows [..., n, E] of the first ``n`` tokens, whole prefill chunks, for ``resume`` in a later response.
        They stay as they are, and hold this response's cache in memory."""

    @abstractmethod
    def resume(self, rows: Tensor) -> None:
        """Right after ``begin``: take the tokens of ``rows`` for consumed and committed."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of final hidden states [n, H]."""

    @property
    @abstractmethod
    def rounding(self) -> float:
        """How far, relative to the largest, logits of passes of different shape may lie apart by rounding alone."""

    @abstractmethod
    def exact_logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [V] after ``tokens``, recomputed from nothing at a precision above the served one."""


class Draft(ABC):
    """The small model that proposes."""

    @property
    @abstractmethod
    def head(self) -> OutputHead | None:
        """What inner adapters train; None for a draft without an output head of its own."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes that a row of its KV cache takes."""

    def prepare(self, capacity: int) -> None:  # noqa: B027
        """As ``Target.prepare``."""

    @abstractmethod
    def begin(self, capacity: int, first: int) -> None:
        """Start a response with an empty KV cache of ``capacity`` slots.

        Args:
            first: the prompt's first token, which no slot consumes.
        """

    @abstractmethod
    def extend(self, taps: Tensor, tokens: Tensor) -> Tensor:
        """Consume n true slots (taps H_i [n, taps*H], token x_{i+1} [n]); return pre-norm outputs [n, H]."""

    @abstractmethod
    def rows(self, n: int) -> Tensor:
        """Cache rows [..., n, E] of the first ``n`` true slots, as ``Target.rows``."""

    @abstractmethod
    def resume(self, rows: Tensor) -> None:
        """Right after ``begin``: take the slots of ``rows`` for consumed. Others must follow before any proposal."""

    @abstractmethod
    def propose(self, length: int, pick: Pick | None = None, more: More | None = None) -> Proposal:
        """Draft at most ``length`` tokens after the last true slot. Leaves no trace in the KV cache.

        Args:
            pick: draws index [1] and probabilities [1, D] from logits [1, D] at a depth; None: the likeliest.
            more: ends it earlier; None: nothing does.
        """

    @abstractmethod
    def student(self) -> Student | None:
        """A trainable copy of all its weights as they are now; None for a draft without any."""

    def propose_tree(self, nodes: int, depth: int, top_k: int, more: More | None = None) -> Proposal:
        """Draft a tree of ``nodes`` rows, the last committed token counted; see ``models.tree.grow``. May write
        ``(depth - 1) * top_k`` cache rows after the true ones, and leaves no trace either."""
        raise UserError("decode=tree: this draft proposes chains only; use decode=chain")


class Student(ABC):
    """A draft's whole network while it learns between requests: fp32 masters apart from the weights that are served.

    Attributes:
        vocab: [D] target id of each draft id.
        weights: the masters by name, leaves that autograd fills the gradients of.
    """

    vocab: Tensor
    weights: dict[str, Tensor]

    @abstractmethod
    def loss(self, lesson: Lesson, asked: Predictions, objective: Objective) -> Tensor:
        """Σ weights · objective over the asked predictions, with gradients for the masters."""

    @abstractmethod
    def say(self, lesson: Lesson, slot: int, length: int, draws: Generator) -> Tensor:
        """[length] target ids that follow the true tokens up to slot + 1, each drawn from the masters' distribution
        after those before it."""

    @abstractmethod
    def serve(self) -> str:
        """From its next response on, the draft proposes by the masters as they are now.

        Its head becomes a new one, so whoever trains it must be built anew. Returns the sha256 of what is served.
        """

    @abstractmethod
    def apart(self) -> Student:
        """A copy for another process, which can serve nobody."""


class DraftSpec(ABC):
    name: str

    @abstractmethod
    def check(self, shape: TargetShape) -> None:
        """Raises UserError when the draft does not fit; called before any weights are loaded."""

    @abstractmethod
    def provenance(self) -> dict[str, str | None]:
        """Origin and sha256 of the weights, fetched if need be but not loaded."""

    @abstractmethod
    def build(self, target: Any) -> tuple[Draft, dict[str, str | None]]:
        """A fresh draft for the loaded target, and its provenance with what only loading shows."""


class InnerAdapter(ABC):
    """Learns inside a response from token-level feedback. Touches nothing but the draft's output head."""

    @abstractmethod
    def begin_conversation(self) -> None: ...

    @abstractmethod
    def begin_response(self) -> None: ...

    @abstractmethod
    def observe(self, evidence: Evidence) -> None:
        """Take in aligned supervision of newly verified positions."""

    @abstractmethod
    def maybe_update(self, round: int) -> Update | None:
        """Called after verification round ``round`` is committed (0: after prefill), before the next proposal."""

    @abstractmethod
    def end_response(self) -> None: ...

    @abstractmethod
    def state(self) -> dict[str, Any] | None:
        """What must outlast a restart between two conversations, for ``torch.save``; None: nothing."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Back to where ``state`` was taken, by the same spec over the same draft."""

    @abstractmethod
    def drift(self) -> dict[str, float]:
        """How far each trained tensor is from its initial value, ‖W - W₀‖ / ‖W₀‖."""

    @abstractmethod
    def anchor_lambda(self) -> dict[str, float]:
        """The anchor's strength as the published λ, by trained tensor; empty without an anchor."""


class InnerAdapterSpec(ABC):
    name: str

    @abstractmethod
    def build(self, head: OutputHead | None, seed: int) -> InnerAdapter:
        """Raises UserError if the draft has no head and the adapter needs one."""


class OuterAdapter(ABC):
    """Learns between requests from completed responses, the whole draft. Never sees what an inner adapter changed."""

    @abstractmethod
    def observe(self, lesson: Lesson) -> None:
        """Take in one answered turn."""

    @abstractmethod
    def begin_conversation(self, conversation: Conversation) -> bool:
        """Bring the draft for it into service. Returns whether that is another one than before."""

    @abstractmethod
    def end_conversation(self, seconds: float | None) -> dict[str, Any] | None:
        """Between two requests: learn, if it is time to.

        Args:
            seconds: that the conversation took to serve; None where nothing is timed.

        Returns:
            what became of it, for the record, and whether the draft's weights are others now as ``served``; None
            where nothing was due.
        """

    @abstractmethod
    def rest(self, resting: bool) -> None:
        """Stop, or take up again, what runs in the background: other arms are timed meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """At the end of a run."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What must outlast a restart, but for the weights: what is kept of lessons, and counts."""

    @abstractmethod
    def weights(self) -> dict[str, Any]:
        """Weights and optimisers, which change only where ``end_conversation`` says of a ``block``."""

    @abstractmethod
    def load_state(self, state: dict[str, Any], weights: dict[str, Any] | None) -> None:
        """Back to where both were taken, and the draft serves it; None: nothing was learnt until then."""


class OuterAdapterSpec(ABC):
    name: str

    @abstractmethod
    def build(self, draft: Draft, target: Target, seed: int) -> OuterAdapter:
        """Raises UserError if the draft has nothing to train."""


class WorkloadSpec(ABC):
    name: str

    @abstractmethod
    def load(self) -> tuple[list[Conversation], dict[str, Any]]:
        """The conversations in order, and their provenance: source, path or id, revision, sha256, and what else the
        workload has to say of itself."""
