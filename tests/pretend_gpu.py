"""A CUDA device that is none: tensors that say they lie on one and are held to what one would hold them to.

Each wraps a tensor of the CPU, where all is computed, so that results are the CPU's. Much of what a GPU would refuse
is refused: operators over tensors of both devices, numbers read without a copy, and, while a graph is captured, what
waits for the device or asks the host. A graph's replay runs the captured operators again, on the memory and with the
numbers of the capture. What is copied to pinned memory comes there when the stream has been waited for.

Streams and when memory is free again are not pretended, nor that a capture runs nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

ATEN = torch.ops.aten
GPU = torch.device("cuda", 0)
MEMORY = 64 * 2**30
INDEXED = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}
# Operators whose result, or its size, the host needs.
WAITING = {
    ATEN._local_scalar_dense, ATEN.item, ATEN.nonzero, ATEN.argwhere, ATEN.masked_select, ATEN.is_nonzero, ATEN.equal,
    ATEN._unique2, ATEN.unique_consecutive, ATEN.bincount,
}  # fmt: skip
# Beside those that go number by number: they take one that the host has.
FILLING = {ATEN.fill_, ATEN.masked_fill, ATEN.masked_fill_, ATEN.full_like}
LOAD, AUTOCAST, PRECISION = torch.load, torch.is_autocast_enabled, torch.get_autocast_dtype
PARSE = torch._C._nn._parse_to
MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
WRITING = {torch.Tensor.untyped_storage, torch.Tensor.__reduce_ex__}  # as files are, by way of the host
READING = {torch.Tensor.numpy, torch.Tensor.__array__}


class OnGpu(Tensor):
    """Says that it lies on the device; its numbers are ``inner``'s."""

    inner: Tensor
    device = GPU
    is_cuda, is_cpu = True, False

    @staticmethod
    def __new__(cls, inner: Tensor):
        with torch.inference_mode(inner.is_inference()):  # a view is of its base's kind, not of the mode
            made = Tensor._make_wrapper_subclass(
                cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype
            )
        made.inner = inner
        return made

    def __repr__(self, **_) -> str:
        return f"OnGpu({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatched(func, args, kwargs or {})


class Graph:
    """Operators over memory."""

    def __init__(self):
        self.operators: list[tuple[Any, tuple, dict, Any]] = []

    def replay(self) -> None:
        DEVICE.replays += 1
        with torch.inference_mode(), _unwatched():
            for func, args, kwargs, made in self.operators:
                again = func(*args, **kwargs)
                for new, old in zip(tree_flatten(again)[0], tree_flatten(made)[0], strict=True):
                    if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)


class Device:
    """What it was asked to do.

    Attributes:
        waits: how often the host waited for it, by why.
        capturing: the graph that operators go to.
        pending: copies to the host that are on their way.
    """

    def __init__(self):
        self.waits: Counter[str] = Counter()
        self.captures = self.replays = 0
        self.capturing: Graph | None = None
        self.pending: list[tuple[Tensor, Tensor]] = []

    def wait(self, why: str) -> None:
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
        self.waits[why] += 1
        for into, numbers in self.pending:
            into.copy_(numbers)
        self.pending = []

    def ran(self, func, args, kwargs, made) -> None:
        if self.capturing is not None:
            self.capturing.operators.append((func, args, kwargs, made))

    def known(self, x: Tensor) -> Tensor:
        """``x`` of the host as an operator takes it: a capture keeps the number that it was."""
        return x.clone() if self.capturing is not None else x


DEVICE = Device()


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def _dispatched(func, args, kwargs):
    """Of an operator, over tensors that are where they are: what moves them is found before it comes here."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, OnGpu)]
    if func.overloadpacket is ATEN.copy_:
        return _copied(func, args, kwargs)
    if ours:
        _check(func, args, [x for x in tensors if not isinstance(x, OnGpu)])
    inner_args, inner_kwargs = tree_map_only(Tensor, _inner if ours else lambda x: x, (args, kwargs))
    made = func(*inner_args, **inner_kwargs)
    if not ours:
        return made
    DEVICE.ran(func, inner_args, inner_kwargs, made)
    known = {id(x.inner): x for x in ours}  # what is written in place stays the same tensor
    return tree_map_only(Tensor, lambda x: known[id(x)] if id(x) in known else OnGpu(x), made)


def _inner(x: Tensor) -> Tensor:
    return x.inner if isinstance(x, OnGpu) else DEVICE.known(x)


def _check(func, args, others: list[Tensor]) -> None:
    """Of an operator over tensors of the device and ``others``."""
    packet = func.overloadpacket
    counted = packet is ATEN.repeat_interleave and len(args) > 1 and isinstance(args[1], Tensor)
    if packet in WAITING or counted or (packet is ATEN.where and len(args) == 1):
        DEVICE.wait(str(func))
    if packet in INDEXED:
        at = [x for x in args[1] if x is not None]
        if any(x.dtype is torch.bool or not isinstance(x, OnGpu) for x in at):
            DEVICE.wait(f"{func} by a mask, or from the host")
        others = [x for x in (args[0], *args[2:3]) if isinstance(x, Tensor) and not isinstance(x, OnGpu)]
    numbers = torch.Tag.pointwise in func.tags or packet in FILLING | INDEXED
    if any(x.dim() or not numbers for x in others):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")


def _copied(func, args, kwargs):
    into, numbers = args[:2]
    here, there = (isinstance(x, OnGpu) for x in (numbers, into))
    inner = [x.inner if isinstance(x, OnGpu) else x for x in (into, numbers)]
    unwaited = (len(args) > 2 and args[2]) or kwargs.get("non_blocking")
    if here and not there and unwaited and getattr(into, "pinned", False):
        DEVICE.pending.append((into, inner[1].clone()))
        return into.fill_(-1)  # what was there, for all that the host can tell
    # a number of the host goes along with what is launched
    if here is not there and (here or numbers.dim()):
        DEVICE.wait("copy_ between devices")
    func(*inner)
    if there:
        DEVICE.ran(func, tuple(inner), {}, inner[0])
    return into


class Calls(TorchFunctionMode):
    """What names a device, before torch looks for its driver."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            made.pinned = True
            return made
        there = (args and isinstance(args[0], OnGpu)) or torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if isinstance(kwargs.get("generator"), Generator) and kwargs["generator"].there is not bool(there):
            raise RuntimeError("expected a generator of the device that the numbers are drawn on")
        if func in MOVES:
            return _moved(func, *args, **kwargs)
        if func in WRITING and isinstance(args[0], OnGpu):
            return func(_inner(args[0]), *args[1:], **kwargs)
        if func in READING and isinstance(args[0], OnGpu):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is torch.Tensor.tolist and isinstance(args[0], OnGpu):
            return _moved(torch.Tensor.cpu, args[0]).tolist()
        if func is torch._has_compatible_shallow_copy_type:
            return False  # or a module's tensor would be moved by writing over what it is
        sent = func in (torch.tensor, torch.as_tensor)
        if func is torch.Tensor.new_tensor and isinstance(args[0], OnGpu):
            kwargs = {"device": GPU, "dtype": args[0].dtype} | kwargs
            func, args, sent = torch.tensor, args[1:], True
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        return _made(func, args, kwargs, sent)


def _made(func, args, kwargs, sent: bool):
    """A tensor on a device that is named; ``sent``: of numbers that the host has."""
    there = torch.device(kwargs["device"]).type == "cuda"
    args, kwargs = tree_map_only(OnGpu, _inner, (args, kwargs | {"device": "cpu"}))
    if sent and there:
        DEVICE.wait(str(func))
    made = func(*args, **kwargs)
    if not there:
        return made
    DEVICE.ran(func, args, kwargs, made)
    return OnGpu(made)


def _parsed(*args, **kwargs):
    """(device, dtype, …) of what ``to`` was given, which may be a tensor whose are meant."""
    if args and isinstance(args[0], OnGpu):
        args = (GPU, args[0].dtype, *args[1:])
    return PARSE(*args, **kwargs)


def _moved(func, x: Tensor, *args, copy: bool = False, **kwargs) -> Tensor:
    """``x.to(…)``, ``x.cpu()`` and ``x.cuda()``."""
    if func is torch.Tensor.to:
        device, dtype, *_ = _parsed(*args, **kwargs)
    else:
        device, dtype = torch.device("cpu" if func is torch.Tensor.cpu else GPU), None
    here = isinstance(x, OnGpu)
    there = here if device is None else device.type == "cuda"
    if here is not there:
        DEVICE.wait(str(func))
        x = _inner(x).detach().clone() if here else OnGpu(x.detach().clone())
    return torch.Tensor.to(x, dtype or x.dtype, copy=copy)


class Autocast(torch.autocast):
    """The device's is the CPU's, as all that it computes."""

    def __init__(self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True):
        super().__init__("cpu", dtype, enabled)


def _loaded(file, map_location=None, **kwargs):
    """``torch.load``."""
    there = map_location is not None and torch.device(map_location).type == "cuda"
    found = LOAD(file, map_location="cpu", **kwargs)
    return tree_map_only(Tensor, OnGpu, found) if there else found


class Generator(torch.Generator):
    """Of the device's numbers, which are the CPU's."""

    there: bool

    def __new__(cls, device: torch.device | str = "cpu"):
        made = super().__new__(cls)
        made.there = torch.device(device).type == "cuda"
        return made


class Event:
    def __init__(self, enable_timing: bool = False):
        self.at = 0.0

    def record(self, stream=None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass

    def synchronize(self) -> None:
        DEVICE.wait("synchronize")


@contextlib.contextmanager
def _graph(graph: Graph) -> Iterator[None]:
    DEVICE.wait("capture")
    DEVICE.captures += 1
    DEVICE.capturing = graph
    try:
        yield
    finally:
        DEVICE.capturing = None


@contextlib.contextmanager
def pretended() -> Iterator[Device]:
    """A CUDA device, where there is none."""
    DEVICE.__init__()
    with pytest.MonkeyPatch.context() as patch:
        for name, stands_in in {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: "pretended",
            "get_device_properties": lambda device=None: SimpleNamespace(total_memory=MEMORY),
            "mem_get_info": lambda device=None: (MEMORY, MEMORY),
            "synchronize": lambda device=None: DEVICE.wait("synchronize"),
            "empty_cache": lambda: None,
            "device": lambda device: contextlib.nullcontext(),
            "device_of": lambda x: contextlib.nullcontext(),
            "current_stream": lambda device=None: Stream(),
            "stream": lambda stream: contextlib.nullcontext(),
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": _graph,
        }.items():
            patch.setattr(torch.cuda, name, stands_in)
        for name, stands_in in {
            "Generator": Generator,
            "autocast": Autocast,
            "is_autocast_enabled": lambda kind: AUTOCAST("cpu"),
            "get_autocast_dtype": lambda kind: PRECISION("cpu"),
            "load": _loaded,
        }.items():
            patch.setattr(torch, name, stands_in)
        patch.setattr(torch._C._nn, "_parse_to", _parsed)
        with Calls():
            yield DEVICE
