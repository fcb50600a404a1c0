"""Wall time by phase. Knows nothing of what is timed, and loads no torch of its own on the CPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PHASES: tuple[str, ...] = ("prefill", "propose", "verify", "observe", "update", "outer", "other")


class Meter:
    """Splits the wall time between ``start`` and ``stop`` into phases.

    Readings wait for the device, so that work queued in a phase is charged to that phase.

    Args:
        device: where the timed work runs. On the CPU nothing is waited for.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._waits = device.type == "cuda"
        self._spent = dict.fromkeys(PHASES, 0)  # nanoseconds
        self._began: int | None = None
        self._open: str | None = None
        # One reusable object a phase: a generator-based context would cost more than the reading.
        self._phases = {name: _Phase(self, name) for name in PHASES if name != "other"}

    def start(self) -> None:
        """Begin a measurement. One that an exception left unfinished is dropped."""
        self._spent = dict.fromkeys(PHASES, 0)
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
        if self._waits:
            import torch

            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns()


class _Phase:
    __slots__ = ("_began", "_meter", "_name")

    def __init__(self, meter: Meter, name: str):
        self._meter = meter
        self._name = name
        self._began = 0

    def __enter__(self) -> None:
        meter = self._meter
        if meter._began is None:
            raise RuntimeError(f"phase {self._name!r} outside Meter.start() … stop()")
        if meter._open is not None:
            raise RuntimeError(f"phase {self._name!r} inside phase {meter._open!r}: phases do not nest")
        meter._open = self._name
        self._began = meter._now()

    def __exit__(self, *_: object) -> None:
        meter = self._meter
        meter._spent[self._name] += meter._now() - self._began
        meter._open = None
