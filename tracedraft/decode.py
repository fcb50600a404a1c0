"""The one loop: prefill, then propose → verify → commit → observe → maybe update until the end."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tracedraft.errors import UserError
from tracedraft.interfaces import Draft, InnerAdapter, Pick, Target
from tracedraft.meter import Meter
from tracedraft.prefix import Prefix, prefill, prefill_plainly
from tracedraft.rejection import picker, verify_rejection
from tracedraft.transcript import Transcript
from tracedraft.types import Evidence, Mismatch, Proposal, Response, TargetPass, Update, Verdict
from tracedraft.verify import Sampling, choose, score_gap, verify_chain, verify_tree

ACCEPTANCES = ("exact", "rejection")


class Proposer(ABC):
    """Gives the proposals of one response their shapes.

    Attributes:
        shapes: what each round drafted, [beams, levels]; None where the spec says it already.
    """

    shapes: list[list[int]] | None = None

    @abstractmethod
    def propose(self, draft: Draft, pick: Pick | None) -> Proposal: ...

    @abstractmethod
    def learn(self, verdict: Verdict) -> None:
        """What became of the last proposal."""


class Steady(Proposer):
    """The same shape every round."""

    def __init__(self, propose: Callable[[Draft, Pick | None], Proposal]):
        self._propose = propose

    def propose(self, draft: Draft, pick: Pick | None) -> Proposal:
        return self._propose(draft, pick)

    def learn(self, verdict: Verdict) -> None: ...


@dataclass(frozen=True)
class DecodeSpec(ABC):
    """How responses are decoded, whatever the shape of a proposal.

    Attributes:
        acceptance: "exact", the target's own draw, the same whatever is drafted; "rejection", classical
            speculative sampling, lossless in distribution only.
        prefill_chunk, cache_bucket: tokens; the fixed shapes of prefill passes and of the KV cache. Turns of a
            conversation share whole chunks.
    """

    name: str
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    acceptance: str
    prefill_chunk: int
    cache_bucket: int

    def __post_init__(self) -> None:
        self._at_least_one("max_new_tokens", "prefill_chunk", "cache_bucket")
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"decode.temperature={self.temperature}: expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"decode.top_p={self.top_p}: expected a share in (0, 1]")
        if self.acceptance not in ACCEPTANCES:
            raise UserError(f"decode.acceptance={self.acceptance}: expected one of {', '.join(ACCEPTANCES)}")
        if self.top_k < 0:
            raise UserError(f"decode.top_k={self.top_k}: expected 0 (no limit) or more")

    def _at_least_one(self, *keys: str) -> None:
        for key in keys:
            if getattr(self, key) < 1:
                raise UserError(f"decode.{key}={getattr(self, key)}: expected at least 1")

    def _exact_only(self) -> None:
        if self.acceptance != "exact":
            raise UserError(
                f"decode.acceptance={self.acceptance}: drafts sample chains only; use decode=chain, or exact"
            )

    @property
    @abstractmethod
    def rows(self) -> int:
        """Most tokens of a verification: the last committed one and those drafted after it."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Most tokens that a round can accept."""

    @property
    @abstractmethod
    def loose(self) -> int:
        """Most rows of its cache that a draft writes in vain while it proposes."""

    @property
    def linear(self) -> ChainSpec:
        """A chain in passes of the same shapes."""
        return ChainSpec(**self.common, chain_length=self.rows - 1)

    @property
    def common(self) -> dict[str, Any]:
        """The fields that do not shape a proposal."""
        return {field.name: getattr(self, field.name) for field in fields(DecodeSpec)}

    @abstractmethod
    def proposer(self) -> Proposer:
        """For one response."""

    @property
    def width(self) -> int:
        """Of verification passes: some products 5 to 7 rows wide round by a row's place, in fp32 on two threads."""
        return -(-self.rows // 8) * 8

    def sampling(self, key: int) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, key, self.acceptance == "rejection")

    def capacity(self, prompt: int, context: int) -> int:
        """KV rows of the target for a response to ``prompt`` tokens, the padding of the last passes included.

        Passes attend over all of them, so what decides is nothing that one shape of proposals needs alone.
        """
        return self._bucketed(prompt, context, self.width)

    def draft_capacity(self, prompt: int, context: int) -> int:
        """The draft's, with what it writes in vain."""
        return self._bucketed(prompt, context, max(self.width, self.loose))

    def limit(self, prompt: int, context: int) -> int:
        """Most tokens of a response to ``prompt`` tokens."""
        return min(self.max_new_tokens, context - prompt)

    def _bucketed(self, prompt: int, context: int, room: int) -> int:
        rows = prompt + max(self.limit(prompt, context) + room, self.prefill_chunk)
        return -(-rows // self.cache_bucket) * self.cache_bucket


@dataclass(frozen=True)
class ChainSpec(DecodeSpec):
    """A chain of ``chain_length`` drafted tokens a round."""

    chain_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("chain_length")

    @property
    def rows(self) -> int:
        return self.chain_length + 1

    @property
    def depth(self) -> int:
        return self.chain_length

    @property
    def loose(self) -> int:
        return self.chain_length - 1

    def proposer(self) -> Proposer:
        return Steady(lambda draft, pick: draft.propose(self.chain_length, pick))


@dataclass(frozen=True)
class TreeSpec(DecodeSpec):
    """EAGLE-2's dynamic tree a round; see ``models.tree.grow``.

    Attributes:
        tree_nodes: of the tree, its root counted, which is the last committed token.
        tree_depth: drafted tokens on the longest path.
        tree_top_k: beams a level, and continuations a beam.
    """

    tree_nodes: int
    tree_depth: int
    tree_top_k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("tree_depth", "tree_top_k")
        most = 1 + self.tree_top_k + (self.tree_depth - 1) * self.tree_top_k**2
        if not 2 <= self.tree_nodes <= most:
            shape = f"decode.tree_depth={self.tree_depth} decode.tree_top_k={self.tree_top_k}"
            raise UserError(f"decode.tree_nodes={self.tree_nodes}: expected 2 to {most}, as many as {shape} can give")
        self._exact_only()

    @property
    def rows(self) -> int:
        return self.tree_nodes

    @property
    def depth(self) -> int:
        return self.tree_depth

    @property
    def loose(self) -> int:
        return (self.tree_depth - 1) * self.tree_top_k

    def proposer(self) -> Proposer:
        return Steady(lambda draft, _: draft.propose_tree(self.tree_nodes, self.tree_depth, self.tree_top_k))


class _Tally:
    """A response while it grows: its tokens, and the counts that tau and acceptance by depth come from."""

    def __init__(self, root: int, length: int, limit: int, eos_ids: frozenset[int]):
        self.tokens, self.rounds, self.limit, self.eos_ids = [root], 0, limit, eos_ids
        self.accepted_per_round: list[int] = []
        self.trials, self.survivals = [0] * length, [0] * length
        self.updates: list[Update] = []

    @property
    def ended(self) -> bool:
        return self.tokens[-1] in self.eos_ids or len(self.tokens) >= self.limit

    def keep(self, verdict: Verdict) -> list[int]:
        """Add a round's tokens up to the end token or the limit; A stops there too."""
        kept = verdict.tokens[: self.limit - len(self.tokens)]
        end = next((i for i, token in enumerate(kept) if token in self.eos_ids), len(kept) - 1)
        kept = kept[: end + 1]
        accepted = min(verdict.accepted, len(kept))
        for depth in range(min(verdict.tested, len(kept))):
            self.trials[depth] += 1
            self.survivals[depth] += depth < accepted
        self.tokens += kept
        self.accepted_per_round.append(accepted)
        self.rounds += 1
        return kept

    def response(
        self, seconds: dict[str, float], max_new_tokens: int, shapes: list[list[int]] | None = None
    ) -> Response:
        accepted = sum(self.accepted_per_round)
        short = "limit" if self.limit == max_new_tokens else "context"
        return Response(
            tokens=self.tokens,
            ended="eos" if self.tokens[-1] in self.eos_ids else short,
            rounds=self.rounds,
            accepted=accepted,
            cut=1 + accepted + self.rounds - len(self.tokens),
            accepted_per_round=self.accepted_per_round,
            trials=self.trials,
            survivals=self.survivals,
            updates=self.updates,
            seconds=seconds,
            shapes=shapes,
        )


def respond(
    target: Target,
    draft: Draft,
    adapter: InnerAdapter,
    prompt: Sequence[int],
    spec: DecodeSpec,
    key: int,
    meter: Meter,
    prefix: Prefix | None = None,
    transcript: Transcript | None = None,
) -> Response:
    """Answer ``prompt`` [L] token by token as the target alone would, whatever draft and adapter do.

    Args:
        key: of the sampling noise; see ``verify.noise_key``.
        prefix: of the conversation's earlier turns with this draft; None: of none.
        transcript: where the target's outputs are kept for learning between requests; None: nowhere.
    """
    sampling, size = spec.sampling(key), (len(prompt), target.context)
    capacity, draft_capacity = spec.capacity(*size), spec.draft_capacity(*size)
    target.prepare(capacity)
    draft.prepare(draft_capacity)
    meter.start()
    adapter.begin_response()
    with meter.phase("prefill"):
        target.begin(capacity, spec.width, spec.prefill_chunk)
        draft.begin(draft_capacity, prompt[0])
        root, hidden, slots, taps = prefill(target, draft, prompt, spec.prefill_chunk, sampling, prefix or Prefix())
    tally, proposer = _Tally(int(root), spec.depth, spec.limit(*size), target.eos_ids), spec.proposer()
    with meter.phase("observe"):
        adapter.observe(Evidence("prompt", slots[:-1], lambda rows: target.logits(hidden[1:][rows])))
        if transcript:
            transcript.begin(prompt, root, taps, hidden)
    while not tally.ended:
        with meter.phase("update"):
            if update := adapter.maybe_update(tally.rounds):
                tally.updates.append(update)
        with meter.phase("propose"):
            position = len(prompt) + len(tally.tokens)
            proposal = proposer.propose(draft, picker(sampling, position))
        with meter.phase("verify"):
            passed = target.verify(torch.cat((root, proposal.tokens)), proposal.tree)
            found = verdict(passed.logits, proposal, sampling, position)
            kept = tally.keep(found)
            proposer.learn(found)
            rows, ids = found.rows[: len(kept)], found.ids[: len(kept)]
            target.commit(len(kept), rows if proposal.tree else None)
        with meter.phase("propose"):
            root, last, slots = ids[-1:], slots[-1:], draft.extend(passed.taps[rows], ids)
        with meter.phase("observe"):
            features = torch.cat((last, slots[:-1]))
            adapter.observe(Evidence("response", features, _teacher(passed.logits, rows)))
            if proposal.features is not None:
                tested = rows[: found.tested]
                adapter.observe(Evidence("chain", proposal.features[tested], _teacher(passed.logits, tested)))
            if transcript:
                transcript.add(passed, found, len(kept))
    with meter.phase("observe"):
        adapter.end_response()
    return tally.response(meter.stop(), spec.max_new_tokens, proposer.shapes)


def verdict(logits: Tensor, proposal: Proposal, sampling: Sampling, position: int) -> Verdict:
    """What of the proposal stands; see ``verify_chain``, ``verify_tree`` and ``verify_rejection``."""
    if proposal.tree is not None:
        return verify_tree(logits, proposal.tokens, proposal.tree, sampling, position)
    if proposal.probabilities is None:
        return verify_chain(logits, proposal.tokens, sampling, position)
    return verify_rejection(logits, proposal, sampling, position)


def _teacher(logits: Tensor, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """Of the i-th of ``rows``, when and if it is asked for."""
    return lambda index: logits[rows[index]]


def respond_plainly(
    target: Target, prompt: Sequence[int], spec: DecodeSpec, key: int, meter: Meter, prefix: Prefix | None = None
) -> Response:
    """Answer without a draft, at the best width for it: one token a pass, never padded."""
    sampling, capacity = spec.sampling(key), spec.capacity(len(prompt), target.context)
    target.prepare(capacity)
    meter.start()
    with meter.phase("prefill"):
        target.begin(capacity, 1, spec.prefill_chunk)
        root = prefill_plainly(target, prompt, spec.prefill_chunk, sampling, prefix or Prefix())
    tally = _Tally(int(root), 0, spec.limit(len(prompt), target.context), target.eos_ids)
    none = root[:0]
    while not tally.ended:
        with meter.phase("verify"):
            passed = target.verify(root)
            found = verify_chain(passed.logits, none, sampling, len(prompt) + len(tally.tokens))
            tally.keep(found)
            root = found.ids
            target.commit(1)
    return tally.response(meter.stop(), spec.max_new_tokens)


def audit(target: Target, prompt: Sequence[int], tokens: Sequence[int], spec: DecodeSpec, key: int) -> list[Mismatch]:
    """Check a response against the target alone, without any draft.

    The target is fed the response itself, in passes of the served shapes, and must choose each of its
    tokens at its prefix. By induction the response then equals what the target says token by token.
    Where it would choose another, both are scored again at a higher precision.

    Returns:
        the tokens that the target would not have said; empty when not one differs.
    """
    sampling = spec.sampling(key)
    chosen = []
    for passed in forced(target, prompt, tokens, spec):
        chosen += choose(passed.logits, sampling, len(prompt) + len(chosen)).tolist()
    differ = [i for i, (said, own) in enumerate(zip(tokens, chosen, strict=True)) if said != own]
    return [mismatch(target, [*prompt, *tokens[:i]], i, tokens[i], chosen[i], sampling) for i in differ]


def forced(target: Target, prompt: Sequence[int], tokens: Sequence[int], spec: DecodeSpec) -> Iterator[TargetPass]:
    """Feed the target a response in passes of the served shapes: the prompt's, whose one row of logits chooses the
    first token, then those of the response but for its last token, whose rows choose the others."""
    target.begin(spec.capacity(len(prompt), target.context), spec.width, spec.prefill_chunk)
    yield target.prefill(prompt)
    for piece in torch.tensor(tokens[:-1], dtype=torch.long).split(spec.width):
        if len(piece):
            yield target.verify(piece)
            target.commit(len(piece))


def mismatch(target: Target, prefix: Sequence[int], index: int, said: int, own: int, sampling: Sampling) -> Mismatch:
    """Where a response says ``said`` after ``prefix`` and the target its ``own``: both scored exactly."""
    logits = target.exact_logits(prefix)
    scale = float(logits.abs().max()) / (sampling.temperature or 1.0)
    gap = score_gap(logits, sampling, len(prefix), said)
    return Mismatch(index, said, own, gap, target.rounding * scale)
