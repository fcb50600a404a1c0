import time
import timeit
from random import Random

import pytest
import torch

from tracedraft.meter import PHASES, Meter

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that each reading advances by a random step; ``clock.now`` is its last reading."""

    class Clock:
        now = 10**15
        random = Random(0)

        def __call__(self):
            self.now += self.random.randrange(1, 10**7)
            return self.now

    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    return clock


def test_phases_sum_to_the_whole(clock):
    meter = Meter(CPU)
    for _ in range(20):
        meter.start()
        began = clock.now
        for _ in range(50):
            with meter.phase(clock.random.choice([p for p in PHASES if p != "other"])):
                pass
        seconds = meter.stop()
        assert list(seconds) == list(PHASES)
        assert sum(round(s * 1e9) for s in seconds.values()) == clock.now - began
        assert seconds["other"] > 0


def test_time_goes_to_the_phase_it_was_spent_in():
    meter = Meter(CPU)
    meter.start()
    with meter.phase("verify"):
        time.sleep(0.02)
    time.sleep(0.01)
    with meter.phase("verify"):
        time.sleep(0.02)
    seconds = meter.stop()
    assert seconds["verify"] >= 0.04
    assert seconds["other"] >= 0.01
    assert {p for p, s in seconds.items() if s == 0.0} == {"prefill", "propose", "observe", "update", "outer"}


def test_each_start_counts_from_zero():
    meter = Meter(CPU)
    meter.start()
    with meter.phase("prefill"):
        time.sleep(0.01)
    meter.stop()
    meter.start()
    assert meter.stop()["prefill"] == 0.0


def test_misuse_is_an_error():
    meter = Meter(CPU)
    with pytest.raises(RuntimeError, match="without"):
        meter.stop()
    with pytest.raises(RuntimeError, match="outside"), meter.phase("verify"):
        pass
    meter.start()
    for name in ("other", "decode"):
        with pytest.raises(ValueError, match=rf"{name}.*prefill"):
            meter.phase(name)
    with meter.phase("verify"):
        with pytest.raises(RuntimeError, match="'verify' inside phase 'verify'"), meter.phase("verify"):
            pass
        with pytest.raises(RuntimeError, match="'observe' inside phase 'verify'"), meter.phase("observe"):
            pass
        with pytest.raises(RuntimeError, match="verify"):
            meter.stop()
    meter.stop()


def test_an_exception_closes_its_phase_and_a_new_start_forgets_it():
    meter = Meter(CPU)
    meter.start()
    with pytest.raises(ValueError, match="sleep"), meter.phase("update"):
        time.sleep(-1)
    with meter.phase("verify"):
        pass
    meter.start()
    assert meter.stop()["update"] == 0.0


class Queue:
    """A GPU as the meter sees it: marks pass when the queue comes to them, and waiting empties it."""

    def __init__(self, monkeypatch):
        self.now, self.waits = 0.0, 0  # milliseconds on the device
        queue = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                self.at = queue.now

            def elapsed_time(self, end):
                assert queue.waits % 2 == 0, "read before the device had passed it"
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def wait(self, device):
        assert device == torch.device("cuda:0")
        self.waits += 1


def test_a_gpu_is_waited_for_at_the_ends_alone_and_phases_are_its_own(monkeypatch, clock):
    queue = Queue(monkeypatch)
    meter = Meter(torch.device("cuda:0"))
    for _ in range(2):
        meter.start()
        began = clock.now
        for name, work in (("propose", 0.25), ("verify", 1.5), ("propose", 0.5)):
            with meter.phase(name):
                queue.now += work
            queue.now += 0.125
        seconds = meter.stop()
        assert (seconds["propose"], seconds["verify"]) == (0.75e-3, 1.5e-3)
        assert sum(round(s * 1e9) for s in seconds.values()) == clock.now - began
    assert queue.waits == 4


def test_the_cpu_is_never_waited_for(monkeypatch):
    queue = Queue(monkeypatch)
    meter = Meter(CPU)
    meter.start()
    with meter.phase("verify"):
        pass
    meter.stop()
    assert queue.waits == 0


def test_six_phases_cost_less_than_a_thousandth_of_a_round():
    meter = Meter(CPU)
    meter.start()

    def phase():
        with meter.phase("verify"):
            pass

    best = min(timeit.repeat(phase, number=1000, repeat=20)) / 1000
    assert 6 * best < 20e-3 / 1000  # measured: 6 us in all
