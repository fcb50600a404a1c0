"""Wall time by phase. Knows nothing of what is timed, and loads no torch of its own on the CPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PHASES: tuple[str, ...] = ("prefill", "propose", "verify", "observe", "update", "outer", "other")


class Meter:
    """Splits the wall time between ``start`` and ``stop`` into phases.

    On a GPU a phase is what passes on the device between two marks in its queue, so that work queued in a phase is
    charged to that phase, and nothing is waited for but at ``start`` and ``stop``.

    Args:
        device: where the timed work runs.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._queued = device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # around phases, not read yet
        self._spent = dict.fromkeys(PHASES, 0)  # nanoseconds
        self._began: int | None = None
        self._open: str | None = None
        # One reusable object a phase: a generator-based context would cost more than the reading.
        self._phases = {name: _Phase(self, name) for name in PHASES if name != "other"}

    def start(self) -> None:
        """Begin a measurement. One that an exception left unfinished is dropped."""
        self._spent = dict.fromkeys(PHASES, 0)
        self._marks = []
        self._open = None
        self._began = self._now()

    def stop(self) -> dict[str, float]:
        """End the measurement: seconds by phase, every phase present, summing to the whole.

        Raises:
            RuntimeError: not started, or a phase is still open.
        """
        if self._began is None:
            raise RuntimeError("Meter.stop() without Meter.start()")
        if self._open is not None:
            raise RuntimeError(f"Meter.stop() inside phase {self._open!r}")
        whole = self._now() - self._began
        self._began = None
        for name, begin, end in self._marks:
            self._spent[name] += round(1e6 * begin.elapsed_time(end))
        # In whole nanoseconds, so that no rounding comes between the parts and the whole.
        self._spent["other"] = whole - sum(self._spent.values())
        return {name: spent / 1e9 for name, spent in self._spent.items()}

    def phase(self, name: str) -> _Phase:
        """A context whose time is charged to ``name``; "other" is what no phase covers, so not one to enter.

        Raises:
            ValueError: no such phase.
        """
        try:
            return self._phases[name]
        except KeyError:
            raise ValueError(f"phase {name!r}: expected one of {', '.join(self._phases)}") from None

    def _now(self) -> int:
        if self._queued:
            import torch

            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns()

    def _mark(self) -> torch.cuda.Event:
        import torch

        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark


class _Phase:
    __slots__ = ("_began", "_mark", "_meter", "_name")

    def __init__(self, meter: Meter, name: str):
        self._meter = meter
        self._name = name
        self._began = 0
        self._mark: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        meter = self._meter
        if meter._began is None:
            raise RuntimeError(f"phase {self._name!r} outside Meter.start() … stop()")
        if meter._open is not None:
            raise RuntimeError(f"phase {self._name!r} inside phase {meter._open!r}: phases do not nest")
        meter._open = self._name
        if meter._queued:
            self._mark = meter._mark()
        else:
            self._began = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        meter = self._meter
        if self._mark is not None:
            meter._marks.append((self._name, self._mark, meter._mark()))
        else:
            meter._spent[self._name] += time.perf_counter_ns() - self._began
        meter._open = None
