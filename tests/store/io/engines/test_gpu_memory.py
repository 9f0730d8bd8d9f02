"""A GPU's memory through the kvikio engine, with twins of both: no GPU and no KvikIO is needed."""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.io.conftest import Rig, submit
from vllm_ssdkv.store.io.engines.gpu_memory import GpuMemory
from vllm_ssdkv.store.io.engines.kvikio import KvikioEngine
from vllm_ssdkv.store.io.engines.protocol import Op

PAGE = 4096
PATIENCE_S = 30.0


class Tensor:
    """What a tensor on a GPU shows of itself; only KvikIO's twin looks behind it."""

    def __init__(self, data: NDArray[np.uint8], /, **changes: object) -> None:
        self.data = data
        self.__cuda_array_interface__ = {
            "shape": data.shape,
            "typestr": data.dtype.str,
            "data": (data.ctypes.data, False),
            "version": 3,
            **changes,
        }


class Done:
    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def get(self) -> int:
        return self._nbytes


class FakeCuFile:
    """Moves bytes between a file and an address."""

    def __init__(self, path: str, flags: str) -> None:
        self._fd = os.open(path, os.O_RDWR if "+" in flags else os.O_RDONLY)
        self.moved_on_gpu = 0

    def __enter__(self) -> FakeCuFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def _bytes(self, memory: Any, nbytes: int) -> Any:  # noqa: ANN401
        if isinstance(memory, np.ndarray):
            return memory[:nbytes]
        address, read_only = memory.__cuda_array_interface__["data"]
        assert not read_only
        assert memory.__cuda_array_interface__["shape"][0] >= nbytes
        return (ctypes.c_uint8 * nbytes).from_address(address)

    def pread(self, memory: Any, size: int, file_offset: int = 0) -> Done:  # noqa: ANN401
        return Done(os.preadv(self._fd, [self._bytes(memory, size)], file_offset))

    def pwrite(self, memory: Any, size: int, file_offset: int = 0) -> Done:  # noqa: ANN401
        return Done(os.pwritev(self._fd, [self._bytes(memory, size)], file_offset))


@pytest.fixture
def fake_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    package, defaults = ModuleType("kvikio"), ModuleType("kvikio.defaults")
    settings: dict[str, int] = {"num_threads": 1}
    defaults.get = settings.__getitem__  # type: ignore[attr-defined]  # a stand-in for the module
    defaults.set = settings.__setitem__  # type: ignore[attr-defined]  # likewise
    package.defaults = defaults  # type: ignore[attr-defined]  # likewise
    package.CuFile = FakeCuFile  # type: ignore[attr-defined]  # likewise
    monkeypatch.setitem(sys.modules, "kvikio", package)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)


@pytest.mark.usefixtures("fake_kvikio")
def test_bytes_go_from_gpu_to_file_and_back(rig: Rig) -> None:
    random = np.random.default_rng(1)
    on_gpu = random.integers(0, 256, 8 * PAGE, dtype=np.uint8)
    before = on_gpu.copy()
    number = rig.add_device(bytes(16 * PAGE))
    engine = KvikioEngine(rig.fds, GpuMemory.of(Tensor(on_gpu)), 4)
    rig.engines.append(engine)
    out = submit(engine, Op.WRITE, (number, 3 * PAGE, 2 * PAGE, 0), (number, 0, PAGE, 5 * PAGE))
    assert out.wait(PATIENCE_S)
    assert out.results().tolist() == [2 * PAGE, PAGE]
    stored = rig.paths[number].read_bytes()
    assert stored[3 * PAGE : 5 * PAGE] == before[: 2 * PAGE].tobytes()
    assert stored[:PAGE] == before[5 * PAGE : 6 * PAGE].tobytes()
    back = submit(engine, Op.READ, (number, 3 * PAGE, 2 * PAGE, 6 * PAGE))
    assert back.wait(PATIENCE_S)
    assert back.results().tolist() == [2 * PAGE]
    assert np.array_equal(on_gpu[6 * PAGE :], before[: 2 * PAGE])
    assert np.array_equal(on_gpu[: 6 * PAGE], before[: 6 * PAGE])


@pytest.mark.usefixtures("fake_kvikio")
def test_requests_outside_of_the_gpus_memory_are_refused(rig: Rig) -> None:
    number = rig.add_device(bytes(4 * PAGE))
    engine = KvikioEngine(rig.fds, GpuMemory.of(Tensor(np.zeros(2 * PAGE, np.uint8))), 1)
    rig.engines.append(engine)
    with pytest.raises(ValueError, match="arena"):
        submit(engine, Op.READ, (number, 0, PAGE, 2 * PAGE))
    # At the end of the file fewer bytes come, as from every engine.
    batch = submit(engine, Op.READ, (number, 3 * PAGE, 2 * PAGE, 0))
    assert batch.wait(PATIENCE_S)
    assert batch.results().tolist() == [PAGE]


@given(begin=st.integers(-20, 20), end=st.integers(-20, 20), again=st.integers(0, 12))
def test_slices_are_those_of_an_array(begin: int, end: int, again: int) -> None:
    data = np.arange(12, dtype=np.uint8)
    part, same = GpuMemory.of(Tensor(data))[begin:end][again:], data[begin:end][again:]
    assert (len(part), part.size) == (len(same), same.size)
    if len(same):
        assert part.__cuda_array_interface__["data"][0] == same.ctypes.data


def test_its_size_is_counted_in_bytes() -> None:
    data = np.zeros((3, 5), dtype=np.uint32)
    assert GpuMemory.of(Tensor(data)).size == data.nbytes


def test_memory_with_gaps_or_only_for_reading_is_refused() -> None:
    data = np.zeros((4, 4), dtype=np.uint8)
    for changes in ({"strides": (8, 1)}, {"data": (data.ctypes.data, True)}):
        with pytest.raises(ValueError, match="contiguous memory that may be written"):
            GpuMemory.of(Tensor(data, **changes))
    with pytest.raises(ValueError, match="no gaps"):
        GpuMemory.of(Tensor(data))[::2]
