"""Share of a step's time: the borders that are timed, with no engine."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from vllm_ssdkv import _io
from vllm_ssdkv.profiling import python_time
from vllm_ssdkv.profiling.python_time import PythonTime, engine_borders


class Base:
    """Its subclass inherits."""

    def wait(self) -> None:
        """Wait."""


class Ours(Base):
    """Stands for what vLLM calls."""

    def step(self, calls: int) -> list[int]:
        """Python, and so many native calls."""
        page = np.zeros(4096, np.uint8)
        address = np.array([page.ctypes.data], np.uint64)
        return [len(_io.checksum(address, page.nbytes, 1)) for _ in range(calls)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by one second whenever somebody looks."""
    ticks = iter(range(1000))
    monkeypatch.setattr(python_time.time, "perf_counter", lambda: float(next(ticks)))


def test_every_second_is_somebodys(clock: None) -> None:
    def borders() -> list[tuple[object, str, str]]:
        return [(Ours, "step", "python"), *python_time._native(_io)]

    before = _io.checksum, Ours.step
    found, ours = PythonTime(borders), Ours()
    found.start()
    assert ours.step(2) == [1, 1]
    other = threading.Thread(target=ours.step, args=(5,))
    other.start()
    other.join()
    found.stop()
    # Looked at: start, into step, into and out of each native call, out of step, stop.
    assert found.seconds == {"engine": 2, "python": 3, "native": 2}
    assert found.figures(1)["python_share"] == pytest.approx(3 / 7)
    assert found.calls == 2
    assert (_io.checksum, Ours.step) == before


def test_what_vllm_calls_and_what_is_native_is_found() -> None:
    found = {(owner.__name__, name): whose for owner, name, whose in engine_borders()}
    assert found["SSDKVConnector", "build_connector_meta"] == "python"
    assert found["PagedAttentionImpl", "forward"] == "python"
    assert found["vllm_ssdkv._kernels", "attend"] == "native"
    assert found["PageCache", "acquire"] == "native"
    assert found["SlotRequest", "over"] == "native"


def test_an_inherited_method_is_timed_and_inherited_again() -> None:
    found = PythonTime(lambda: [(Ours, "wait", "native")])
    found.start()
    Ours().wait()
    found.stop()
    assert found.calls == 1
    assert "wait" not in vars(Ours)
