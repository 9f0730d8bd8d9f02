"""Times of steps, on the CPU and on a GPU that is stood in for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch

from vllm_ssdkv.connector.worker.step_timer import StepTimer


def test_a_step_on_the_cpu() -> None:
    timer = StepTimer(torch.device("cpu"))
    assert timer.take() == []
    timer.begin(7)
    before = time.perf_counter()
    while time.perf_counter() - before < 0.01:
        pass
    timer.end()
    ((number, seconds),) = timer.take()
    assert number == 7
    assert 0.01 <= seconds < 10
    assert timer.take() == []


def test_an_end_without_a_begin_is_none() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.end()
    timer.begin(1)
    timer.end()
    timer.end()
    assert [number for number, _ in timer.take()] == [1]


@dataclass
class Gpu:
    """Reaches recorded events when the test says so; one millisecond passes between two."""

    recorded: int = 0
    reached: int = 0
    events: list[Event] = field(default_factory=list)


GPU = Gpu()


@dataclass
class Event:
    enable_timing: bool
    at: int = -1

    def record(self) -> None:
        self.at = GPU.recorded
        GPU.recorded += 1

    def query(self) -> bool:
        return self.at < GPU.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.enable_timing
        assert end.query()
        return float(end.at - self.at)


def test_on_a_gpu_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"))
    for number in range(3):
        timer.begin(number)
        timer.end()
    assert timer.take() == []
    GPU.reached = 4
    assert timer.take() == [(0, 0.001), (1, 0.001)]
    GPU.reached = 6
    assert timer.take() == [(2, 0.001)]


def test_a_gpu_that_hangs_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"))
    for number in range(100):
        timer.begin(number)
        timer.end()
    GPU.reached = GPU.recorded
    assert [number for number, _ in timer.take()] == list(range(92, 100))
