"""Lossless acceptance: what the target itself would have said, and how much of the draft agrees.

At temperature > 0 the token at position t is ``argmax(log p_t + Gumbel noise)``: an exact draw from the
warped p_t (Gumbel-max trick). The noise comes from a counter-based hash of (key, t, token id), so a
response does not depend on what was drafted, and a drafted token is accepted iff it is the draw.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tracedraft.ranking import top
from tracedraft.types import Conversation, Tree, Verdict

# Sorted at first, and then eight times as many, until they hold the nucleus. Of the embedded target's passes at top-p
# 0.95 all were served at temperature 0.7, and two in five at 1, where a full sort took longer than the pass.
CANDIDATES = 256


@dataclass(frozen=True)
class Sampling:
    """How the target's tokens are drawn. temperature 0: greedy. top_k 0 and top_p 1: no cut.

    ``rejection``: the draft samples too, and the target accepts or replaces; see ``rejection.py``.
    """

    temperature: float
    top_p: float
    top_k: int
    key: int = 0
    rejection: bool = False


def noise_key(seed: int, conversation: Conversation, turn: int) -> int:
    """A 63-bit key for one response, the same in every arm and on every machine."""
    text = f"{seed}|{conversation.id}|{conversation.occurrence}|{turn}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on wrapping int64 (Steele, Lea and Flood 2014)."""

    def shifted(value: Tensor, bits: int) -> Tensor:
        return (value >> bits) & ((1 << (64 - bits)) - 1)

    x = (x ^ shifted(x, 30)) * -4658895280553007687
    x = (x ^ shifted(x, 27)) * -7723592293110705685
    return x ^ shifted(x, 31)


def uniform(key: int, positions: Tensor, ids: Tensor) -> Tensor:
    """Noise in (0, 1), [T, m] in fp64, for token ids [T, m] at absolute positions [T]."""
    row = _mix(positions[:, None] * -7046029254386353131 + key)
    bits = (_mix(row + ids * -4417276706812531889) >> 11) & ((1 << 53) - 1)
    return (bits.double() + 0.5) * 2.0**-53


def gumbel(key: int, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise [T, m] in fp64, as ``uniform``."""
    return -torch.log(-torch.log(uniform(key, positions, ids)))


def warped(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Token ids [T, m] and tempered scores [T, m] of the support that top-k, then top-p leaves.

    Scores outside the support are -inf. The nucleus is the shortest run of tokens, most probable first and
    equal ones by id, whose mass reaches top_p.
    """
    scores = logits.float() / sampling.temperature
    size = scores.shape[1]
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return torch.arange(size, device=scores.device).expand_as(scores), scores
    limit = min(sampling.top_k or size, size)
    if sampling.top_p >= 1.0:
        values, ids = _sorted_top(scores, limit)
        return ids, values
    kept = scores if limit == size else torch.topk(scores, limit, dim=1).values
    total = torch.logsumexp(kept, dim=1, keepdim=True)
    count = min(CANDIDATES, limit)
    while True:
        values, ids = _sorted_top(scores, count)
        mass = (values - total).double().exp().cumsum(dim=1)
        if count == limit or bool((mass[:, -1] >= sampling.top_p).all()):
            break
        count = min(8 * count, limit)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=1)
    return ids, values.masked_fill(before >= sampling.top_p, float("-inf"))


def _sorted_top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest scores of each row, descending, equal ones by ascending id."""
    if count == scores.shape[1]:
        return torch.sort(scores, dim=1, descending=True, stable=True)
    ids = top(scores, count)
    return scores.gather(1, ids), ids


def choose(logits: Tensor, sampling: Sampling, position: int, depths: Tensor | None = None) -> Tensor:
    """The target's own tokens [T] for logits [T, V]; row 0 chooses the token at absolute ``position``.

    Exact ties go to the lowest id.

    Args:
        depths: [T] how much later the position of each row's token is; None: 0, 1, 2 …
    """
    if sampling.temperature == 0:
        return logits.max(dim=1).indices  # the lowest of equal ones; argmax takes five times as long in bf16
    ids, scores = warped(logits, sampling)
    steps = torch.arange(len(logits), device=logits.device) if depths is None else depths
    positions = position + steps
    perturbed = scores.double() + gumbel(sampling.key, positions, ids)
    return ids.gather(1, perturbed.argmax(dim=1, keepdim=True)).squeeze(1)


def score_gap(logits: Tensor, sampling: Sampling, position: int, token: int) -> float:
    """The least x such that ``token`` could be chosen at ``position`` if each logit [V] (over the temperature) were
    off by at most x: each token that scores higher falls behind or out of the support, and ``token`` gets into it."""
    scores = logits.double() / (sampling.temperature or 1.0)
    if sampling.temperature == 0:
        return float(scores.max() - scores[token])
    ids = torch.arange(len(scores), device=logits.device)[None]
    perturbed = scores + gumbel(sampling.key, torch.tensor([position], device=logits.device), ids)[0]
    kept, support = warped(logits[None], sampling)
    inside = kept[0][support[0] > -torch.inf]
    rivals = inside[perturbed[inside] > perturbed[token]].tolist()
    overtaken = [
        min(float(perturbed[r] - perturbed[token]), _edge(scores, sampling, r, leaving=True)) for r in rivals
    ]
    entered = 0.0 if bool((inside == token).any()) else _edge(scores, sampling, token, leaving=False)
    return max(0.0, entered, *overtaken)


def _edge(scores: Tensor, sampling: Sampling, token: int, leaving: bool) -> float:
    """A bound from below on how far scores [V] must move for ``token`` to leave the support, or to enter it."""
    limit = min(sampling.top_k or len(scores), len(scores))
    ranked = scores.topk(limit).values
    total = ranked.logsumexp(dim=0)
    sign = -1.0 if leaving else 1.0

    def done(x: float) -> bool:
        """Whether a move of x may do it: ranks change with the score, masses by at most x/4."""
        above = scores > scores[token] + sign * x
        above[token] = False
        mass = float((scores[above] - total).exp().sum())
        nucleus = sampling.top_p < 1
        if leaving:
            return int(above.sum()) >= limit or (nucleus and mass + x / 4 >= sampling.top_p)
        return int(above.sum()) < limit and (not nucleus or mass - x / 4 < sampling.top_p)

    low, high = 0.0, 1.0
    while not done(high):
        if high > 1e3:
            return math.inf
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if done(middle) else (middle, high)
    return low


def read(numbers: Tensor) -> list[int]:
    """The one read of a round, which waits for the device: a GPU writes to pinned memory itself, and to other memory
    by way of the driver's."""
    if numbers.device.type == "cuda":
        pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        pinned.copy_(numbers, non_blocking=True)
        torch.cuda.current_stream(numbers.device).synchronize()
        numbers = pinned
    return numbers.tolist()


def verify_chain(logits: Tensor, drafted: Tensor, sampling: Sampling, position: int) -> Verdict:
    """Accept the longest prefix of ``drafted`` [K] that the target would have said itself.

    Args:
        logits: [K+1, V] target logits; row 0 follows the last committed token.
        position: absolute position of the first drafted token.
    """
    chosen = choose(logits, sampling, position)
    accepted = (chosen[:-1] == drafted).cumprod(dim=0).sum(dim=0, keepdim=True)
    *tokens, count = read(torch.cat((chosen, accepted)))
    return chain_verdict(tokens[: count + 1], chosen[: count + 1], drafted)


def chain_verdict(tokens: list[int], ids: Tensor, drafted: Tensor) -> Verdict:
    """That all of ``tokens``, on the device ``ids``, but the last were accepted, of the chain ``drafted`` [K]."""
    accepted = len(tokens) - 1
    rows = torch.arange(len(tokens), device=drafted.device)
    return Verdict(accepted, tokens, ids, tested=min(accepted + 1, len(drafted)), rows=rows)


def verify_tree(logits: Tensor, drafted: Tensor, tree: Tree, sampling: Sampling, position: int) -> Verdict:
    """Accept the longest path of a tree of ``drafted`` [K] tokens that the target would have said itself.

    Tokens at one depth all meet the same noise, that of their position, so what is said is what would be said
    without a draft.

    Args:
        logits: [K+1, V] target logits after each row of the tree.
        position: absolute position of the tokens at depth 1.
    """
    chosen = choose(logits, sampling, position, tree.depths)
    said = chosen[tree.parents[1:]] == drafted
    right = torch.cat((said.new_ones(1), said))
    stands = (right | ~tree.ancestors).all(dim=1)
    # the rows that stand, ascending, then the others: as many on every path, so that only their number is read
    rows = stands.logical_not().byte().sort(stable=True).indices
    count = stands.sum(dim=0, keepdim=True)
    followed = (tree.parents[1:] == rows.gather(0, count - 1)).any(dim=0, keepdim=True)
    chosen = chosen[rows]
    *tokens, size, more = read(torch.cat((chosen, count, followed)))
    return Verdict(size - 1, tokens[:size], chosen[:size], tested=size - 1 + more, rows=rows[:size])
