"""Classical speculative sampling (Leviathan et al., arXiv 2211.17192): the draft samples, the target accepts
with min(1, p/q) or draws from the residual max(p - q, 0).

It accepts more than comparing with the target's own draw does, by Σ min(p, q) a position, and is lossless in
distribution only: what is said depends on the draft, so arms are not paired and no audit goes token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracedraft.interfaces import Pick
from tracedraft.types import Proposal, Verdict
from tracedraft.verify import Sampling, chain_verdict, read, uniform, warped

# Streams of uniform noise, beside the token ids that the exact mode hashes.
DRAFTED, ACCEPTED, RESIDUAL = -1, -2, -3


def picker(sampling: Sampling, position: int) -> Pick | None:
    """How a draft chooses from logits [1, D] at chain depth d: index [1] and probabilities [1, D]; None: argmax."""
    if not sampling.rejection or sampling.temperature == 0:
        return None

    def pick(logits: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        share = (logits.float() / sampling.temperature).softmax(dim=1)
        at = torch.full((1,), position + depth, device=logits.device)
        return _draw(share, sampling.key, at, DRAFTED), share

    return pick


def verify_rejection(logits: Tensor, proposal: Proposal, sampling: Sampling, position: int) -> Verdict:
    """Accept or replace sampled tokens [K]; target logits [K+1, V], draft probabilities [K, D] over ``vocab``."""
    drafted, q, vocab = proposal.tokens, proposal.probabilities, proposal.vocab
    assert q is not None
    assert vocab is not None
    ids, scores = warped(logits, sampling)
    p = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, ids, scores.softmax(dim=1))
    steps = torch.arange(len(drafted), device=logits.device)
    index = torch.searchsorted(vocab, drafted)
    ratio = p[steps, drafted] / q[steps, index]
    noise = uniform(sampling.key, position + steps, ids.new_full((len(drafted), 1), ACCEPTED))[:, 0]
    accepted = (noise < ratio).int().cumprod(dim=0).sum()[None]
    refused = torch.cat((q, torch.zeros_like(q[:1])))  # nothing, where all were accepted
    rest = p[accepted].index_add_(1, vocab, refused[accepted], alpha=-1).clamp_(min=0)
    last = _draw(rest, sampling.key, position + accepted, RESIDUAL)
    rows = torch.arange(len(drafted) + 1, device=logits.device)
    said = torch.where(rows < accepted, torch.cat((drafted, last)), last)
    count, *tokens = read(torch.cat((accepted, said)))
    return chain_verdict(tokens[: count + 1], said[: count + 1], drafted)


def _draw(share: Tensor, key: int, at: Tensor, stream: int) -> Tensor:
    """Index [1] drawn from weights [1, n], which need not sum to one, with the noise of position ``at`` [1]."""
    noise = uniform(key, at, at.new_full((1, 1), stream))
    mass = share.double().cumsum(dim=1)
    index = torch.searchsorted(mass, noise * mass[:, -1:], right=True)
    return index.clamp_(max=share.shape[1] - 1)[0]
