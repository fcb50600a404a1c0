"""The target's part of a response, computed once and replayed: acceptance at a fraction of the cost of serving.

The target's tokens depend on prompt, seed and position, never on what was drafted (``verify``), and its rows round
alike at every place of a pass (``target``). So its hidden states along its own response are all that exact
acceptance can ask of it, whatever draft or adapter is served, and a replay gives the live run's counts. A tree's rows
round otherwise when they are verified among its branches, so there the replay is the response that plain decoding
gives, and differs from the live one by near-ties.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tracedraft.adapters.fixed import FixedSpec
from tracedraft.decode import DecodeSpec, forced, respond
from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.interfaces import Draft, Target
from tracedraft.meter import Meter
from tracedraft.models.packing import cpu_dtype
from tracedraft.target import LlamaTarget, Served
from tracedraft.types import TargetPass, Tree
from tracedraft.verify import choose

FORMAT = 3  # to be raised when the decoder comes to round otherwise


class RecordedTarget(Target):
    """Serves one recording. Of the live target, which must be at rest, only the head is used.

    Attributes:
        name: of the recording, by all that it depends on.
        tokens: [N] the response.
        taps, hidden: [L+N-1, …] of every token that was consumed; see ``TargetPass``.
    """

    def __init__(self, live: LlamaTarget, file: Path):
        self.live, self.name = live, file.stem
        with safe_open(file, framework="pt", device=str(live.device)) as opened:
            self.tokens: list[int] = json.loads(opened.metadata()["tokens"])
            self.taps, self.hidden = opened.get_tensor("taps"), opened.get_tensor("hidden")
        self.vocab_size, self.hidden_size = live.vocab_size, live.hidden_size
        self.context, self.eos_ids = live.context, live.eos_ids

    def begin(self, capacity: int, width: int, chunk: int) -> None:
        self.live.begin(1, width, chunk)
        self.length = 0

    def prefill(self, tokens: Sequence[int]) -> TargetPass:
        new = slice(self.length, self.length + len(tokens))
        self.length = new.stop
        hidden = self.hidden[new]
        return TargetPass(self.taps[new], hidden, self.logits(hidden[-1:]))

    def verify(self, tokens: Tensor, tree: Tree | None = None) -> TargetPass:
        """Rows are right along the response's own tokens; nobody may read further."""
        steps = torch.arange(len(tokens), device=self.hidden.device) if tree is None else tree.depths
        rows = (self.length + steps).clamp_max(len(self.hidden) - 1)
        hidden = self.hidden[rows]
        return TargetPass(self.taps[rows], hidden, self.logits(hidden))

    def commit(self, n: int, rows: Tensor | None = None) -> None:
        self.length += n

    def rows(self, n: int) -> Tensor:
        """Empty ones: it has no cache."""
        return self.taps[:n, :0]

    def resume(self, rows: Tensor) -> None:
        self.length = len(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.live.logits(hidden)

    @property
    def rounding(self) -> float:
        return self.live.rounding

    def exact_logits(self, tokens: Sequence[int]) -> Tensor:
        return self.live.exact_logits(tokens)


def replaying(
    served: Served, draft: Draft, prompt: list[int], spec: DecodeSpec, key: int, folder: Path
) -> RecordedTarget:
    """A stand-in for the target in the response to ``prompt`` [L], from ``folder``; recorded there first if need be.

    Args:
        draft: any, to record faster.
        key: of the sampling noise.
    """
    file = folder / f"{_identity(served, prompt, spec, key)}.safetensors"
    if not file.exists():
        tokens, taps, hidden = record(served.target, draft, prompt, spec, key)
        said = {"tokens": json.dumps(tokens)}
        state = {"taps": taps, "hidden": hidden}
        write_atomically(file, lambda path: save_file(state, path, metadata=said), "choose another paths.recordings")
    return RecordedTarget(served.target, file)


def record(
    target: LlamaTarget, draft: Draft, prompt: list[int], spec: DecodeSpec, key: int
) -> tuple[list[int], Tensor, Tensor]:
    """Answer ``prompt``, then feed the target its own answer: tokens, taps and hidden states of a recording.

    Raises:
        UserError: the target, fed its answer, would say another: rounding, and no replay would be exact.
    """
    fixed = FixedSpec("fixed").build(None, 0)
    tokens = respond(target, draft, fixed, prompt, spec.linear, key, Meter(target.device)).tokens
    passes = list(forced(target, prompt, tokens, spec))
    position = len(prompt)
    for passed in passes:
        own = choose(passed.logits, spec.sampling(key), position).tolist()
        start = position - len(prompt)
        if own != tokens[start : start + len(own)]:
            raise UserError("a near-tie makes this response depend on the shape of a pass: use measure=time")
        position += len(own)
    return tokens, torch.cat([p.taps for p in passes]), torch.cat([p.hidden for p in passes])


def _identity(served: Served, prompt: list[int], spec: DecodeSpec, key: int) -> str:
    """Of all that recorded bits depend on: what is served, in which shapes, by which arithmetic, and the prompt."""
    target = served.target
    capacity = spec.capacity(len(prompt), target.context)
    shapes = [spec.width, spec.prefill_chunk, capacity, spec.max_new_tokens]
    model = [str(target.model.norm.weight.dtype), list(target.taps), target.context, sorted(target.eos_ids)]
    cpu = [torch.backends.cpu.get_cpu_capability(), str(cpu_dtype())]  # which also says what is packed
    arithmetic = [FORMAT, torch.__version__, target.device.type, torch.get_num_threads(), *cpu]
    sampling = dataclasses.astuple(spec.sampling(key))
    text = json.dumps([served.provenance, model, shapes, arithmetic, sampling, prompt], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
