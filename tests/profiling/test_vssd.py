"""Virtual SSDs: the model, every fault, and that nothing of them stays behind."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.waiting import until
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.bench_io.model import GEN4, DeviceModel
from vllm_ssdkv.profiling.vssd import build, system
from vllm_ssdkv.profiling.vssd.ssds import Ssds, ssds
from vllm_ssdkv.profiling.vssd.throttle import ThrottleGroup

FAST = DeviceModel(bandwidth=1e12, latency_s=0.0, iops=1e9, dilation=1.0)
CAPACITY = 32 * MIB


def missing() -> str | None:
    """What keeps virtual SSDs from running here."""
    if os.geteuid() != 0:
        return "virtual SSDs need root"
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse"
    found = shutil.which("pkg-config") and subprocess.run(
        ["pkg-config", "--exists", "fuse3"], timeout=30, check=False
    )
    return None if found and found.returncode == 0 else "libfuse 3 is not installed"


needs_fuse = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ssds, list[Path]]]:
    folder = tmp_path_factory.mktemp("vssd") / "ssds"
    with ssds("fuse", 2, CAPACITY, FAST, folder) as made:
        yield made
    assert not folder.exists()
    assert system.processes_of(folder / "devices") == []


@contextlib.contextmanager
def opened(path: Path, nbytes: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        yield fd
    finally:
        os.close(fd)
        path.unlink()


def transfer(call: Callable[..., int], fd: int, offset: int, fill: bytes = b"\0") -> bytes:
    with mmap.mmap(-1, 4096) as page:
        page[:] = fill * 4096
        done = call(fd, [page], offset)
        return page[:done]


def code_of(call: Callable[..., int], fd: int, offset: int) -> int | None:
    try:
        transfer(call, fd, offset)
    except OSError as error:
        return error.errno
    return None


@needs_fuse
def test_files_behave_as_on_a_disk(devices: tuple[Ssds, list[Path]]) -> None:
    _, (first, second) = devices
    (first / "a").mkdir()
    (first / "a" / "x").write_bytes(b"hello")
    (first / "a" / "x").rename(first / "a" / "y")
    assert [p.name for p in (first / "a").iterdir()] == ["y"]
    assert (first / "a" / "y").read_bytes() == b"hello"
    with pytest.raises(OSError, match="not empty"):
        (first / "a").rmdir()
    with pytest.raises(OSError, match="cross-device"):
        (first / "a" / "y").rename(second / "y")
    with (first / "a" / "y").open("r+b") as file:
        file.truncate(2)
        (first / "a" / "y").unlink()
        assert file.read() == b"he"  # an open file outlives its name
        assert os.fstat(file.fileno()).st_nlink == 0
    (first / "a").rmdir()
    assert list(first.iterdir()) == []


@needs_fuse
def test_space_is_limited_and_given_back(devices: tuple[Ssds, list[Path]]) -> None:
    made, (first, _) = devices
    path = first / "big"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, CAPACITY - MIB)
        assert made.counters()[0]["used_bytes"] == CAPACITY - MIB
        assert os.statvfs(first).f_bavail * 4096 == MIB
        with pytest.raises(OSError, match="No space"):
            (first / "more").write_bytes(bytes(2 * MIB))
    path.unlink()
    (first / "more").unlink()
    until(lambda: not made.counters()[0]["used_bytes"])


@needs_fuse
def test_faults(devices: tuple[Ssds, list[Path]]) -> None:
    made, (first, second) = devices
    with opened(first / "f", MIB) as fd, opened(second / "f", MIB) as other:
        transfer(os.pwritev, fd, 8192, b"x")
        before = made.counters()[0]
        assert transfer(os.preadv, fd, 8192) == b"x" * 4096
        after = made.counters()[0]
        assert after["reads"] - before["reads"] == 1
        assert after["read_bytes"] - before["read_bytes"] == 4096

        made.command("0 eio f 8192 1")
        assert code_of(os.preadv, fd, 8192) == code_of(os.pwritev, fd, 8192) == errno.EIO
        assert code_of(os.preadv, fd, 4096) is code_of(os.preadv, fd, 12288) is None
        made.command("0 heal", "0 full")
        assert code_of(os.pwritev, fd, 8192) == errno.ENOSPC
        assert code_of(os.preadv, fd, 8192) is None
        made.command("0 heal", "0 dead")
        assert code_of(os.preadv, fd, 0) == code_of(os.pwritev, fd, 0) == errno.EIO
        with pytest.raises(OSError, match="Input/output"):
            os.fsync(fd)
        assert code_of(os.preadv, other, 0) is None
        made.command("0 heal", "0 corrupt f 8193 2")
        assert transfer(os.preadv, fd, 8192)[:4] == bytes([120, 120 ^ 255, 120 ^ 255, 120])


@needs_fuse
@pytest.mark.parametrize("fault", ["hang", "stall 60000"])
def test_what_hangs_does_not_end_before_it_is_healed(
    devices: tuple[Ssds, list[Path]], fault: str
) -> None:
    made, (first, second) = devices
    with (
        opened(first / "f", MIB) as fd,
        opened(second / "f", MIB) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        made.command(f"0 {fault}")
        reading = pool.submit(transfer, os.preadv, fd, 0)
        assert len(transfer(os.preadv, other, 0)) == 4096
        time.sleep(0.1)
        assert not reading.done()
        made.command("0 heal")
        assert len(reading.result(30)) == 4096
        assert code_of(os.preadv, fd, 4096) is None


@needs_fuse
@pytest.mark.parametrize(
    "line", ["2 dead", "x dead", "0", "0 nothing", "0 bandwidth 0", "0 latency -1", "0 eio f 0",
             "0 iops nan", "0 corrupt no 0 1"],
)  # fmt: skip
def test_commands_that_mean_nothing_are_refused(
    devices: tuple[Ssds, list[Path]], line: str
) -> None:
    with pytest.raises(BenchError, match=r"Invalid argument|No such file"):
        devices[0].command(line)


@needs_fuse
def test_requests_take_the_time_of_the_model(devices: tuple[Ssds, list[Path]]) -> None:
    """A lower bound only: a busy machine may add to it."""
    made, (first, second) = devices
    model = DeviceModel(bandwidth=4e6, latency_s=0.02, iops=1e6, dilation=1.0)
    made.slow_down(0, model)
    with opened(first / "f", MIB) as fd, ThreadPoolExecutor(8) as pool:
        begin = time.monotonic()
        list(pool.map(lambda n: transfer(os.preadv, fd, n * 4096), range(100)))
        # 100 pages at 4 MB/s one after the other, and one latency at the end: they overlap.
        assert time.monotonic() - begin >= 100 * 4096 / 4e6 + 0.02
        begin = time.monotonic()
        transfer(os.preadv, fd, 0)
        assert time.monotonic() - begin >= 0.021
    made.slow_down(0, FAST)
    del second


KILLED = """
import os, signal, sys
from pathlib import Path
from vllm_ssdkv.profiling.bench_io.model import GEN4
from vllm_ssdkv.profiling.vssd.ssds import ssds
with ssds(sys.argv[2], 2, 33 << 20, GEN4, Path(sys.argv[1])) as (made, directories):
    for directory in directories:
        (directory / "x").write_bytes(b"x")
    if sys.argv[2] == "fuse":
        made.command("0 hang")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_fuse
@pytest.mark.parametrize("kind", ["fuse", "loop"])
def test_down_removes_what_a_killed_process_left(tmp_path: Path, kind: str) -> None:
    if kind == "loop":
        reason = no_loops(tmp_path)
        if reason is not None:
            pytest.skip(reason)
    folder = tmp_path / "ssds"
    done = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, str(folder), kind], timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert system.mount_points(folder)
    for _ in range(2):  # idempotent
        Ssds(folder).down()
        assert system.mount_points(folder) == []
        assert system.loop_devices(folder) == []
        assert system.processes_of(folder / "devices") == []
        assert not folder.exists()


def no_loops(folder: Path) -> str | None:
    """What keeps throttled RAM disks from running here."""
    if not Path("/dev/loop-control").exists():
        return "there is no /dev/loop-control"
    try:
        ThrottleGroup(folder)
    except BenchError as error:
        return str(error)
    return None


# --- without root


def test_without_root_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BenchError, match="--emulate"):
        Ssds(tmp_path / "x").up("fuse", 2, CAPACITY, GEN4)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("count", "nbytes"), [(0, CAPACITY), (65, CAPACITY), (2, MIB)])
def test_impossible_devices_are_refused(tmp_path: Path, count: int, nbytes: int) -> None:
    with pytest.raises(BenchError, match="at most 64"):
        Ssds(tmp_path / "x").up("fuse", count, nbytes, GEN4)


def test_what_the_build_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="libfuse3-dev"):
        build.build(tmp_path / "cache")


def test_processes_of_others_are_not_ours(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert child.pid not in system.processes_of(tmp_path)
            assert child.pid not in system.processes_of(Path("60"))
        finally:
            child.kill()
