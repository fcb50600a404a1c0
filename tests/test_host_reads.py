"""How often a round waits for the device: for each value that Python reads from a tensor, or sends to one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from conftest import CPU, auto, chain, tiny, tree
from decode_cases import FIXED, adapter_spec, lens, lm, respond_with
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tracedraft.decode import respond, respond_plainly
from tracedraft.meter import Meter

ATEN = torch.ops.aten
# Operators that a GPU must finish before the host can go on: their result, or its size, is needed there.
WAITING = {ATEN._local_scalar_dense, ATEN.nonzero, ATEN.masked_select, ATEN.is_nonzero, ATEN.equal, ATEN._unique2}
# Tensors of Python numbers are copied from memory that is not pinned, and that is waited for too.
SENDING = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}
# On the CPU these read memory without an operator.
READING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
PROMPT = list(b"Name three rivers.")


class Operators(TorchDispatchMode):
    def __init__(self, seen: Counter):
        super().__init__()
        self.seen, self.count = seen, 0
        self.lifted = torch.zeros(())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if func.overloadpacket in WAITING:
            self.seen[func.overloadpacket.__name__] += 1
        if func.overloadpacket in (ATEN.index, ATEN.index_put, ATEN.index_put_):
            masks = sum(i is not None and i.dtype is torch.bool for i in args[1])
            self.seen["index by a mask"] += masks
            # a number of Python's is sent there by itself, which a graph can't capture either
            number = func.overloadpacket != ATEN.index and args[2].data_ptr() == self.lifted.data_ptr()
            self.seen["a number put"] += number and not masks
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket is ATEN.lift_fresh:
            self.lifted = made
        return made


class Calls(TorchFunctionMode):
    def __init__(self, seen: Counter):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in SENDING | READING:
            self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Reads(Meter):
    """Counts in each round, which begins with the phase that asks whether to update."""

    def __init__(self):
        super().__init__(CPU)
        self.seen = Counter()
        self.rounds: list[Counter] = []

    def phase(self, name):
        if name == "update":
            self.rounds.append(Counter(self.seen))
        return super().phase(name)

    def each(self) -> list[Counter]:
        """Of whole rounds: from one such phase to the next."""
        return [after - before for before, after in zip(self.rounds, self.rounds[1:], strict=False)]


def counted(shape, adapter=FIXED, kind=lens, **sampling) -> list[Counter]:
    target = tiny("float32").target
    draft = kind(target)
    learner = adapter.build(draft.head, 0)
    learner.begin_conversation()
    meter = Reads()
    with Operators(meter.seen), Calls(meter.seen):
        made = respond(target, draft, learner, PROMPT, shape(max_new_tokens=48, **sampling), 0, meter)
    assert made.rounds > 15
    assert made.rounds == len(meter.rounds)
    return meter.each()


def test_the_counters_see_each_kind_of_read():
    x, seen = torch.arange(4), Counter()
    actions = {
        "item": lambda: x[2].item(),
        "int": lambda: int(x[2]),
        "bool": lambda: bool(x[2] > 1),
        "tensor as an index": lambda: x[x[2]],
        "size of a range": lambda: torch.arange(x[2]),
        "tolist": lambda: x.tolist(),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 2],
        "masked write": lambda: x.__setitem__(x > 2, 0),
        "a number put": lambda: x.__setitem__(torch.arange(2), 0),
        "new": lambda: x.new_tensor([1, 2]),
        "tensor": lambda: torch.tensor([1]),
    }
    with Operators(seen), Calls(seen):
        for name, action in actions.items():
            before = seen.total()
            action()
            assert seen.total() == before + 1, name
        assert torch.equal(x, x.clone()), "and this"
        x[torch.arange(2)], x[1:3], x.sum(), x.gather(0, x.clamp(max=3))
    assert seen.total() == len(actions) + 1


@pytest.mark.parametrize("kind", [lens, lm])
@pytest.mark.parametrize("shape", [chain, tree])
@pytest.mark.parametrize("adapter", ["fixed", "reset", "reset_lowrank", "persistent"])
def test_a_greedy_round_waits_once(shape, adapter, kind):
    """Learners keep evidence without looking at it; they read when they update."""
    rounds = counted(shape, adapter_spec(adapter, every=1000) if adapter != "fixed" else FIXED, kind)
    assert {tuple(reads.items()) for reads in rounds} == {(("tolist", 1),)}


def test_a_round_that_asks_the_draft_how_sure_it_is_waits_once_more_a_level():
    assert {reads.total() for reads in counted(auto, confident=False)} == {1}
    assert {reads.total() for reads in counted(auto, confident=True)} <= set(range(2, 2 + auto().most_levels))


@pytest.mark.parametrize("shape", [chain, tree])
def test_a_sampled_round_waits_twice(shape):
    """The second time to ask whether the nucleus lies among the likeliest few hundred tokens."""
    assert {reads.total() for reads in counted(shape, temperature=0.7)} == {1}
    assert {reads.total() for reads in counted(shape, temperature=0.7, top_k=20)} == {1}
    if shape is chain:
        assert {reads.total() for reads in counted(shape, temperature=0.7, acceptance="rejection")} == {1}
    assert {reads.total() for reads in counted(shape, temperature=0.7, top_p=0.95)} <= {1, 2}


def test_plain_decoding_waits_once_a_token():
    meter = Reads()
    with Operators(meter.seen), Calls(meter.seen):
        made = respond_plainly(tiny("float32").target, PROMPT, chain(max_new_tokens=40), 0, meter)
    assert meter.seen["tolist"] == made.rounds == 39
    assert meter.seen.total() <= made.rounds + 3  # the prompt's way in, and the first token's way out


def test_what_is_counted_is_what_is_served():
    """Under the counters the answer is the same."""
    meter = Reads()
    target = tiny("float32").target
    with Operators(meter.seen), Calls(meter.seen):
        made = respond(target, lens(target), FIXED.build(None, 0), PROMPT, chain(), 0, meter)
    assert made.tokens == respond_with(target, lens(target), FIXED.build(None, 0), PROMPT).tokens
