"""The store that nobody gave a size: it starts small, and grows segment by segment as it fills.

A thread gives the data files their space, some MiB at a time, since a file that is being extended
holds up those who read from it. Then the manifest has the new segment, and then its slots are
handed out. A kill before the manifest has it leaves files that are too long, which the next start
cuts.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import DeviceError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import format_size
from vllm_ssdkv.store.devices.owner import open_regular, owner
from vllm_ssdkv.store.format.segment import Segment

logger = logging.getLogger(__name__)

SPARE = 0.05
"""Share of its file system that a store leaves free when it grows."""

RETRY_S = 60.0
"""Delay before a store that found no room looks again."""

PIECE_BYTES = 64 << 20
PAUSE_S = 0.002


class GrowingStore(Protocol):
    """The part that grows: the rebalancer, which has segments and index."""

    @property
    def segments(self) -> Sequence[Segment]:
        """Slots there are."""

    def add(self, segment: Segment) -> bool:
        """Have one more, whose space is reserved, among :attr:`segments` when the manifest has it;
        False: not now, ask again. Never blocks."""


class DataFileSpace:
    """Gives the data files of all ranks on a device more space. Used by one thread."""

    def __init__(self, files: Sequence[Path], store: str, *, pause_s: float = PAUSE_S) -> None:
        """``files`` are on one file system; ``store`` is the UUID that they have to name."""
        self._files, self._store = tuple(files), store
        self._pause_s = pause_s
        self._cannot = False

    def reserve(self, nbytes: Sequence[int]) -> None:
        """Give each file so many bytes, durably. Blocks.

        Raises:
            DeviceError: there is no room, or the system refuses; files may be longer than before.
        """
        for path, needed in zip(self._files, nbytes, strict=True):
            try:
                # Not locked: the ranks of this engine hold these files.
                fd = open_regular(path, os.O_RDWR)
            except OSError as error:
                raise DeviceError(f"{path}: {error.strerror}") from error
            try:
                self._extend(fd, path.name, needed)
                os.fsync(fd)  # the manifest must not name space that a power loss takes back
            except OSError as error:
                raise DeviceError(f"{path}: {error.strerror}") from error
            finally:
                os.close(fd)

    def _extend(self, fd: int, name: str, nbytes: int) -> None:
        """Raises OSError."""
        if owner(fd, name) != self._store:
            raise OSError(errno.ESTALE, "it is not the store's file any more")
        status = os.fstatvfs(fd)
        at = os.fstat(fd).st_size
        missing = max(0, nbytes - at)
        spare = int(status.f_blocks * status.f_frsize * SPARE)
        if missing + spare > status.f_bavail * status.f_frsize:
            raise OSError(
                errno.ENOSPC,
                f"{format_size(missing)} more would leave less than a "
                f"{round(1 / SPARE)}th of the file system free",
            )
        while at < nbytes:
            at = min(nbytes, at + PIECE_BYTES)
            code = errno.EOPNOTSUPP if self._cannot else _io.preallocate(fd, at)
            if code == errno.EOPNOTSUPP:
                self._cannot = True
                os.ftruncate(fd, nbytes)
                return
            if code:
                raise OSError(code, os.strerror(code))
            time.sleep(self._pause_s)


class StoreGrowth:
    """Decides when the store grows. Its methods belong to the scheduler's thread; none blocks."""

    def __init__(
        self,
        store: GrowingStore,
        following: Callable[[Sequence[Segment]], Segment | None],
        reserve: Callable[[Segment], None],
        slots: int,
        free_now: Callable[[], int],
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Args:
        store: What grows.
        following: The segment after those there are; None: it is as large as it may be.
        reserve: Gives a segment its space, and blocks; raises DeviceError.
        slots: Of the store when it is as large as it may be.
        free_now: Slots that are free.
        counters: For ``growth_errors``.
        clock: Monotonic seconds.
        """
        self._store, self._following, self._reserve = store, following, reserve
        self._slots, self._free_now = slots, free_now
        self._counters, self._clock = counters, clock
        self._next = following(store.segments)
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        """Why the last reservation failed; empty: it did not; None: none has ended."""
        self._adding: Segment | None = None
        """A segment that the store has taken, and does not use yet."""
        self.reserving_since: float | None = None
        """Instant at which the reservation that is under way began."""
        self._again_at = 0.0
        self._told = False

    @property
    def busy(self) -> bool:
        """Check whether more slots are on their way."""
        return self._thread is not None or self._adding is not None

    @property
    def to_come(self) -> int:
        """Slots that the store may still get; none while it finds no room."""
        if self._next is None or self._told:
            return 0
        return max(0, self._slots - sum(segment.slots for segment in self._store.segments))

    def step(self, wanted: int = 0) -> None:
        """Grow when few slots are free: fewer than a segment has, or than are ``wanted``."""
        if self._thread is not None and not self._thread.is_alive():
            self._end()
        if self._adding is not None:
            first = self._adding.first
            if any(segment.first == first for segment in self._store.segments):
                self._adding = None
        if self.busy or self._next is None or self._clock() < self._again_at:
            return
        if self._free_now() < max(self._next.slots, wanted):
            self._problem = None
            self.reserving_since = self._clock()
            self._thread = threading.Thread(
                target=self._run, args=(self._next,), name="ssdkv-growth", daemon=True
            )
            self._thread.start()

    def _end(self) -> None:
        """A reservation has ended."""
        self.reserving_since = None
        if self._problem or self._next is None:
            self._counters.add("growth_errors")
            self._again_at = self._clock() + RETRY_S
            self._thread = None
            if not self._told:
                logger.warning(
                    "ssdkv: the store does not grow beyond %d of %d blocks (%s); it goes on as it "
                    "is, and tries again every %d s",
                    sum(segment.slots for segment in self._store.segments),
                    self._slots,
                    self._problem,
                    RETRY_S,
                )
            self._told = True
        elif self._store.add(self._next):
            self._thread = None
            if self._told:
                logger.info("ssdkv: the store grows again")
            self._told = False
            self._adding = self._next
            self._next = self._following([*self._store.segments, self._next])

    def _run(self, segment: Segment) -> None:
        try:
            self._reserve(segment)
        except DeviceError as error:
            self._problem = str(error)
        except Exception as error:  # whatever it is, the store works as it is
            logger.exception("ssdkv: the store cannot grow")
            self._problem = str(error) or type(error).__name__
        else:
            self._problem = ""
