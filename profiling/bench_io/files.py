"""The files that everybody reads and writes: made before the run, gone after it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import BenchError, StoreError
from vllm_ssdkv.base.sizes import MIB, approximate_size
from vllm_ssdkv.store.devices.direct_io import turn_on_direct
from vllm_ssdkv.store.devices.preallocate import reserve_space
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

logger = logging.getLogger(__name__)

FOLDER = ".ssdkv-bench"
_CHUNK = 4 * MIB
_PAGE = 4096
_WORDS = _PAGE // 8


@dataclass(frozen=True, slots=True)
class BenchFile:
    """One device's file: a region that is read, then one of the same size that is overwritten.

    Every 4 KiB page of the region for reads begins with its number and device as int64; all
    extents are written before anything is measured.

    Attributes:
        folder: Directory on the device for what a contender makes itself.
        path: The file.
        fd: Open for reading and writing, with O_DIRECT where the file system has it.
        device: Position among the devices.
        region_bytes: Size of each region, a multiple of 4 MiB.
        direct: Whether O_DIRECT is on.
    """

    folder: Path
    path: Path
    fd: int
    device: int
    region_bytes: int
    direct: bool

    def begin(self, op: Op) -> int:
        """Offset of the region for ``op``."""
        return self.region_bytes if op == Op.WRITE else 0

    def stamps(self, offset: int, nbytes: int) -> NDArray[np.int64]:
        """First word of each page of ``[offset, offset + nbytes)``, shape [pages]."""
        first = offset // _PAGE
        pages = np.arange(first, first + nbytes // _PAGE, dtype=np.int64)
        return pages | (self.device << 48)


def read_stamps(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """First word of each page of ``data`` (uint8, a multiple of 4096), shape [pages]."""
    return data.view(np.int64)[::_WORDS].copy()


def write_stamps(data: NDArray[np.uint8], stamps: NDArray[np.int64]) -> None:
    """Put the words at the beginning of each page of ``data``."""
    data.view(np.int64)[::_WORDS] = stamps


def require_stamps(file: BenchFile, offset: int, data: NDArray[np.uint8], who: str) -> None:
    """Check that ``data`` is what the file holds at ``offset``.

    Raises:
        BenchError: it is not.
    """
    wrong = int(np.count_nonzero(read_stamps(data) != file.stamps(offset, data.size)))
    if wrong:
        raise BenchError(
            f"{who}: {wrong} of {data.size // _PAGE} pages at {offset} of {file.path} hold "
            "something else than was written"
        )


def _lock_folder(directory: Path) -> tuple[Path, int]:
    folder = directory / FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BenchError(f"{directory} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BenchError(f"another bench is running in {directory}; wait for its end") from None
    stale = list(folder.iterdir())
    if stale:
        logger.warning("%s: removing what a bench that was killed left behind", folder)
        for path in stale:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return folder, fd


@contextmanager
def _folder(directory: Path) -> Iterator[Path]:
    folder, lock = _lock_folder(directory)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def _fill(file: BenchFile) -> None:
    arena = Arena(_CHUNK)
    try:
        data = arena.view(0, _CHUNK)
        data[:] = np.random.default_rng(file.device).integers(0, 256, _CHUNK, np.uint8)
        for offset in range(0, 2 * file.region_bytes, _CHUNK):
            write_stamps(data, file.stamps(offset, _CHUNK))
            written = os.pwritev(file.fd, [data.data], offset)
            if written != _CHUNK:
                raise BenchError(f"{file.path}: only {written} of {_CHUNK} bytes were written")
        os.fsync(file.fd)
    finally:
        arena.close()


@contextmanager
def _file(folder: Path, device: int, region_bytes: int) -> Iterator[BenchFile]:
    path = folder / f"{device}.data"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        reserve_space(fd, path, str(path), 2 * region_bytes, created=True)
        direct = turn_on_direct(fd, str(path), "auto")
        yield BenchFile(folder, path, fd, device, region_bytes, direct)
    finally:
        os.close(fd)


@contextmanager
def bench_files(
    directories: Sequence[Path], devices: int, region_bytes: int
) -> Iterator[list[BenchFile]]:
    """Files for ``devices`` devices, dealt to the directories in turn; removed at the end.

    Blocks for as long as it takes to write them. What a killed bench left in the directories is
    removed first.

    Raises:
        BenchError: a directory cannot be used, or another bench uses it.
    """
    with ExitStack() as stack:
        try:
            folders = [stack.enter_context(_folder(directory)) for directory in directories]
            files = [
                stack.enter_context(_file(folders[device % len(folders)], device, region_bytes))
                for device in range(devices)
            ]
            with ThreadPoolExecutor(devices) as pool:
                list(pool.map(_fill, files))
        except OSError as error:
            room = error.errno in {errno.ENOSPC, errno.EDQUOT}
            cure = f"; make room for {approximate_size(2 * region_bytes)} a device" if room else ""
            raise BenchError(f"{error.filename or 'a device'}: {error.strerror}{cure}") from error
        except StoreError as error:
            raise BenchError(str(error)) from error
        yield files
