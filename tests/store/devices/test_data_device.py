"""Opening devices: what is created, locked, reserved, and how each refusal reads."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.kit.child import Child
from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import DeviceError, StoreLockedError
from vllm_ssdkv.base.file_lock import lock_holder
from vllm_ssdkv.store.devices import data_device as device_module
from vllm_ssdkv.store.devices import direct_io, preallocate
from vllm_ssdkv.store.devices.data_device import OpenDevice, check_capacity, open_device
from vllm_ssdkv.store.devices.direct_io import turn_on_direct

if TYPE_CHECKING:
    from vllm_ssdkv.store.devices.direct_io import DirectMode

PAGE = 4096
MIB = 1 << 20
PATIENCE_S = 60.0


def open_at(
    path: Path,
    *,
    rank: int = 0,
    nbytes: int = MIB,
    direct: DirectMode = "auto",
    patience_s: float = 0.0,
) -> OpenDevice:
    return open_device(
        path, index=3, rank=rank, nbytes=nbytes, direct=direct, lock_timeout_s=patience_s
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


def test_a_missing_directory_is_made_private(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        device = open_at(folder, rank=2)
    assert device.path == folder / "rank2.data"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(device.path.stat().st_mode) == 0o600
    assert f"created directory {folder}" in caplog.text
    assert device.created
    device.close()


def test_the_file_has_its_size_and_its_blocks(folder: Path) -> None:
    device = open_at(folder, nbytes=8 * MIB)
    status = device.path.stat()
    assert status.st_size == device.nbytes == 8 * MIB
    if device.preallocated:
        assert status.st_blocks * 512 >= 8 * MIB
    assert device.free_bytes() > 0
    device.close()


def test_bytes_survive_and_the_file_grows_but_never_shrinks(folder: Path) -> None:
    first = open_at(folder, nbytes=2 * MIB, direct="off")
    os.pwrite(first.fd, b"kept" * 1024, MIB)
    first.close()
    for nbytes, size in ((4 * MIB, 4 * MIB), (MIB, 4 * MIB)):
        device = open_at(folder, nbytes=nbytes, direct="off")
        assert not device.created
        assert device.path.stat().st_size == size
        assert os.pread(device.fd, 4096, MIB) == b"kept" * 1024
        device.close()


def test_close_is_idempotent_and_frees_the_lock(folder: Path) -> None:
    device = open_at(folder)
    device.close()
    device.close()
    assert device.fd == -1
    open_at(folder).close()


def test_it_notices_that_its_file_was_deleted(folder: Path) -> None:
    device = open_at(folder)
    state = device.state()
    assert not state.lost
    assert 0 < state.stored_bytes <= device.nbytes + 4096
    device.path.unlink()
    assert device.state().lost
    device.close()


def test_the_descriptor_is_not_inherited(folder: Path) -> None:
    device = open_at(folder)
    assert not os.get_inheritable(device.fd)
    device.close()


# Users


@pytest.mark.parametrize(
    ("directory", "before", "after"),
    [
        (0o700, 0o660, 0o660),  # nobody but the group: as somebody wanted it
        (0o2770, 0o660, 0o660),
        (0o700, 0o664, 0o600),
        (0o2775, 0o664, 0o660),
    ],
    ids=oct,
)
def test_a_file_is_closed_to_others_and_left_to_its_group(
    folder: Path, caplog: pytest.LogCaptureFixture, directory: int, before: int, after: int
) -> None:
    device = open_at(folder)
    device.close()
    folder.chmod(directory)
    device.path.chmod(before)
    open_at(folder).close()
    assert stat.S_IMODE(device.path.stat().st_mode) == after
    assert ("was open to other users" in caplog.text) == (before != after)


def test_the_mode_of_a_file_of_somebody_else_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = open_at(folder)
    device.close()
    device.path.chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: device.path.stat().st_uid + 1)
    open_at(folder).close()
    assert stat.S_IMODE(device.path.stat().st_mode) == 0o666
    assert "is open to other users, and belongs to uid" in caplog.text


# Direct I/O


def test_direct_io_is_on_unless_refused(folder: Path) -> None:
    device = open_at(folder, direct="auto")
    assert device.direct == bool(fcntl.fcntl(device.fd, fcntl.F_GETFL) & os.O_DIRECT)
    device.close()
    device = open_at(folder, direct="off")
    assert not device.direct
    assert not fcntl.fcntl(device.fd, fcntl.F_GETFL) & os.O_DIRECT
    device.close()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no memory file system")
def test_a_memory_file_system_works_whatever_it_supports() -> None:
    folder = Path("/dev/shm") / f"ssdkv-test-{os.getpid()}"
    try:
        device = open_at(folder, direct="auto")
        assert device.direct == bool(fcntl.fcntl(device.fd, fcntl.F_GETFL) & os.O_DIRECT)
        device.close()
    finally:
        (folder / "rank0.data").unlink(missing_ok=True)
        folder.rmdir()


@pytest.fixture(params=["flag", "read", "write"])
def no_direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses the flag, or takes it and refuses reads, or only writes."""
    real = fcntl.fcntl

    def refuse_flag(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, argument)

    def refuse_io(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    if request.param == "flag":
        monkeypatch.setattr(direct_io.fcntl, "fcntl", refuse_flag)
    else:
        call = "preadv" if request.param == "read" else "pwrite"
        monkeypatch.setattr(direct_io.os, call, refuse_io)


@pytest.mark.usefixtures("no_direct")
def test_auto_falls_back_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        device = open_at(folder, direct="auto")
    assert not device.direct
    assert not fcntl.fcntl(device.fd, fcntl.F_GETFL) & os.O_DIRECT
    assert f"device 3 ({folder}) does not support O_DIRECT" in caplog.text
    device.close()


@pytest.mark.usefixtures("no_direct")
def test_on_does_not_fall_back(folder: Path) -> None:
    with pytest.raises(DeviceError, match=r'does not support O_DIRECT.*io.direct to "auto"'):
        open_at(folder, direct="on")
    open_at(folder, direct="off").close()  # the lock is free again


def test_a_write_that_finds_no_room_says_nothing_of_direct_io(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, page: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    open_at(folder, direct="auto").close()
    monkeypatch.setattr(direct_io.os, "pwrite", full)
    device = open_at(folder, direct="auto")
    assert device.direct
    assert not caplog.records
    device.close()


@pytest.mark.parametrize("size", [0, 5000, 1 << 20])
def test_finding_out_whether_direct_io_works_changes_no_byte(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    before = np.random.default_rng(size).bytes(size)
    path.write_bytes(before)
    fd = os.open(path, os.O_RDWR)
    try:
        turn_on_direct(fd, "file", "auto")
    finally:
        os.close(fd)
    assert path.read_bytes() == before


# Lock


def test_the_same_device_twice_is_refused(folder: Path) -> None:
    device = open_at(folder)
    with pytest.raises(StoreLockedError, match=r"this process .*named twice"):
        open_at(folder)
    device.close()


def test_ranks_do_not_exclude_each_other(folder: Path) -> None:
    devices = [open_at(folder, rank=rank) for rank in range(2)]
    assert [device.path.name for device in devices] == ["rank0.data", "rank1.data"]
    for device in devices:
        device.close()


HOLDER = """
import sys
from vllm_ssdkv.store.devices.data_device import open_device
device = open_device(sys.argv[1], index=0, rank=0, nbytes=1 << 20, direct="auto", lock_timeout_s=0)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(folder: Path) -> Iterator[Child]:
    """Another process that has the device open."""
    with Child.python("-c", HOLDER, folder, cwd=folder.parent) as process:
        assert process.hear() == "locked"
        yield process


def test_another_process_is_named(folder: Path, holder: Child) -> None:
    begin = time.monotonic()
    with pytest.raises(StoreLockedError, match="in use by") as caught:
        open_at(folder, patience_s=0.1)
    assert time.monotonic() - begin >= 0.1
    assert str(folder / "rank0.data") in str(caught.value)
    with (folder / "rank0.data").open("rb") as file:
        known = lock_holder(file.fileno())
    assert known in {holder.pid, None}  # some containers hide /proc/locks
    if known is not None:
        assert f"process {holder.pid}" in str(caught.value)


def test_a_killed_process_lets_go(folder: Path, holder: Child) -> None:
    holder.send_signal(signal.SIGKILL)
    open_at(folder, patience_s=PATIENCE_S).close()


def test_a_lock_is_taken_as_soon_as_it_is_free(folder: Path, holder: Child) -> None:
    holder.close_input()  # ends it, while we already wait
    open_at(folder, patience_s=PATIENCE_S).close()


def test_a_file_replaced_before_the_lock_is_opened_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last owner may delete the file between our open and our lock."""
    open_at(folder).close()
    real, path, times = device_module.lock_file, folder / "rank0.data", []

    def lock(fd: int, *arguments: object) -> None:
        if not times:
            path.unlink()
            path.write_bytes(b"")
        times.append(fd)
        real(fd, *arguments)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(device_module, "lock_file", lock)
    device = open_at(folder)
    assert len(times) == 2
    assert not device.state().lost
    device.close()


# Space


def test_too_little_room_is_found_before_the_disk_is_full(folder: Path) -> None:
    with pytest.raises(DeviceError, match=r"too full: .*rank0\.data needs .* free are \d+ bytes"):
        open_at(folder, nbytes=1 << 55)
    assert list(folder.iterdir()) == []


def refuse_space(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(preallocate._io, "preallocate", lambda _fd, _nbytes: code)


def test_a_disk_that_fills_meanwhile_leaves_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_space(monkeypatch, errno.ENOSPC)
    with pytest.raises(DeviceError, match="too full"):
        open_at(folder)
    assert list(folder.iterdir()) == []


def test_an_old_file_keeps_its_size_when_it_cannot_grow(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_at(folder, nbytes=MIB).close()
    refuse_space(monkeypatch, errno.EDQUOT)
    with pytest.raises(DeviceError, match="too full"):
        open_at(folder, nbytes=2 * MIB)
    assert (folder / "rank0.data").stat().st_size == MIB


def test_a_limit_on_file_size_is_named(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(DeviceError, match="ulimit -f"):
            open_at(folder, nbytes=2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(folder.iterdir()) == []


def test_without_preallocation_the_file_is_sparse_and_it_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_space(monkeypatch, errno.EOPNOTSUPP)
    with caplog.at_level(logging.WARNING):
        device = open_at(folder)
    assert not device.preallocated
    assert device.path.stat().st_size == MIB
    assert "cannot be preallocated" in caplog.text
    device.close()


def test_any_other_refusal_is_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_space(monkeypatch, errno.EIO)
    with pytest.raises(DeviceError, match=r"cannot reserve space.*Input/output error"):
        open_at(folder)


def test_preallocate_reports_errors(tmp_path: Path) -> None:
    assert _io.preallocate(-1, PAGE) == errno.EBADF
    with (tmp_path / "file").open("wb") as file:
        assert _io.preallocate(file.fileno(), 0) == errno.EINVAL


# Wrong places


def test_a_missing_parent_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "mnt" / "ssd"
    with pytest.raises(DeviceError, match=f"mkdir -p {path}"):
        open_at(path)
    assert not path.parent.exists()


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(DeviceError, match="is a file; name the directory"):
        open_at(path)
    with pytest.raises(DeviceError, match=r"device 3 .*cannot be looked at"):
        open_at(path / "below")


def test_other_kinds_of_files_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DeviceError, match="neither a directory nor a block device"):
        open_at(Path(os.devnull))
    pipe = tmp_path / "rank0.data"
    os.mkfifo(pipe)
    with pytest.raises(DeviceError, match="not a regular file"):
        open_at(tmp_path)
    folder.mkdir()
    (folder / "rank0.data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeviceError, match="cannot open"):
        open_at(folder)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_open_to_others_becomes_private(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    path = folder / "rank0.data"
    path.touch(0o666)
    path.chmod(0o666)
    with caplog.at_level(logging.WARNING):
        open_at(folder).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "open to other users" in caplog.text


AS_NOBODY = """
import os, sys
from vllm_ssdkv.base.errors import DeviceError
from vllm_ssdkv.store.devices.data_device import open_device
try:
    os.setresuid(65534, 65534, 65534)
except PermissionError:
    pass  # an ordinary user already
try:
    open_device(sys.argv[1], index=0, rank=0, nbytes=4096, direct="auto", lock_timeout_s=0)
except DeviceError as error:
    print(error)
"""


@pytest.mark.parametrize("where", ["", "new"])
def test_an_unwritable_directory_is_explained(where: str) -> None:
    # Not below tmp_path, which only its owner may enter.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(Path(folder, where))],
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
    assert "Permission denied" in done.stdout
    assert folder in done.stdout
    # An ordinary user owns the directory; root's child is another user.
    assert ("this process is uid 65534" in done.stdout) == (os.geteuid() in {0, 65534})


@pytest.mark.parametrize(("nbytes", "rank"), [(0, 0), (PAGE + 1, 0), (-PAGE, 0), (PAGE, -1)])
def test_impossible_numbers_are_refused(folder: Path, nbytes: int, rank: int) -> None:
    with pytest.raises(ValueError, match="impossible"):
        open_at(folder, nbytes=nbytes, rank=rank)


# Block devices


def test_a_block_device_must_be_large_enough() -> None:
    check_capacity(MIB, "device 0", MIB)
    with pytest.raises(DeviceError, match=f"too small: {MIB} bytes needed, it has {MIB - 1}"):
        check_capacity(MIB - 1, "device 0", MIB)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    """A loop device of 4 MiB."""
    image = tmp_path / "image"
    image.write_bytes(bytes(4 * MIB))
    try:
        made = subprocess.run(
            ["losetup", "--find", "--show", str(image)],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"loop devices need root: {error}")
    path = made.stdout.strip()
    yield Path(path)
    subprocess.run(["losetup", "--detach", path], check=True, timeout=PATIENCE_S)


def test_a_block_device_is_used_as_it_is(loop: Path) -> None:
    device = open_at(loop, nbytes=4 * MIB)
    assert (device.path, device.preallocated, device.created) == (loop, True, False)
    with pytest.raises((DeviceError, StoreLockedError)):
        open_at(loop)
    device.close()
    with pytest.raises(DeviceError, match="too small"):
        open_at(loop, nbytes=8 * MIB)
    with pytest.raises(DeviceError, match="serves one rank"):
        open_at(loop, rank=1)
