"""Devices that are small files, an arena, and every engine over them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.cli.doctor.check_io_uring import io_uring_errno
from vllm_ssdkv.config.io_engine import EngineOptions
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.engines.protocol import Batch, IoEngine, Op
from vllm_ssdkv.store.memory.arena import Arena


@dataclass
class Rig:
    """Files of ``device_bytes`` each, opened for reading and writing, and an arena."""

    folder: Path
    arena: Arena
    paths: list[Path] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    engines: list[IoEngine] = field(default_factory=list)

    def add_device(self, content: bytes, flags: int = os.O_RDWR) -> int:
        path = self.folder / f"device{len(self.paths)}"
        path.write_bytes(content)
        self.paths.append(path)
        self.fds.append(os.open(path, flags))
        return len(self.fds) - 1

    def open(self, options: EngineOptions) -> IoEngine:
        skip_if_absent(options.engine)
        engine = open_engine(options, self.fds, self.paths, self.arena)
        self.engines.append(engine)
        return engine

    @property
    def memory(self) -> NDArray[np.uint8]:
        return self.arena.view(0, self.arena.nbytes)


def skip_if_absent(engine: str) -> None:
    """Skip the test where this machine cannot run ``engine``, by signs outside of the engine."""
    if engine == "uring" and not _io.has_uring:
        pytest.skip("this build has no io_uring: liburing was missing")
    if engine == "uring" and (error := io_uring_errno()):
        pytest.skip(f"no io_uring on this machine: {os.strerror(error)}")
    if engine == "kvikio" and find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed: pip install kvikio-cu12")
    if engine == "kvikio":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            pytest.skip(f"kvikio needs the CUDA driver: {error}")


Submit = Callable[..., Batch]


def submit(engine: IoEngine, op: Op, *requests: tuple[int, int, int, int]) -> Batch:
    """Submit tuples (device, offset, length, buffer)."""
    columns = np.array(requests, dtype=np.int64).reshape(-1, 4)
    return engine.submit(
        op,
        columns[:, 0].astype(np.uint16),
        columns[:, 1].astype(np.uint64),
        columns[:, 2].astype(np.uint32),
        columns[:, 3].astype(np.uint64),
    )


@pytest.fixture(name="submit")
def submit_fixture() -> Submit:
    return submit


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, Arena(4 << 20))
    yield rig
    for engine in rig.engines:
        engine.close(0.1)  # some tests leave a hung one
    for fd in rig.fds:
        os.close(fd)
    rig.arena.close()
