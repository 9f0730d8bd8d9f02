"""TRIM: tell raw block devices which slots hold nothing, so that they need not keep the bytes.

For block devices only. A data file keeps its space: punching a hole would give it back to the file
system, and a later write could meet a full disk. (A file that is deleted or shortened is trimmed by
the file system: mount option ``discard``, or ``fstrim``.) And only for slots that are dropped in
bulk: one that is evicted is written again at once, which tells the drive the same.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import GIB, MIB
from vllm_ssdkv.store.devices.data_device import OpenDevice
from vllm_ssdkv.store.devices.data_file import read_superblock
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES
from vllm_ssdkv.store.placement.placement import Placement

logger = logging.getLogger(__name__)

BYTES_PER_SECOND = GIB
"""Drives serve other commands badly while they trim: an idle second in four suffices for 1 TiB."""

BATCH_BYTES = 64 * MIB

_BLKDISCARD = 0x1277

I64 = NDArray[np.int64]


def discard_range(fd: int, offset: int, nbytes: int) -> None:
    """Tell a block device that these bytes are not needed. Blocks; they may read as anything.

    Raises:
        OSError: the device cannot, or its range is wrong.
    """
    fcntl.ioctl(fd, _BLKDISCARD, struct.pack("=QQ", offset, nbytes))


def is_block_device(fd: int) -> bool:
    """Check whether the descriptor is that of a block device."""
    return stat.S_ISBLK(os.fstat(fd).st_mode)


def trim_new(device: OpenDevice, label: str) -> None:
    """Trim a block device that holds no store yet, as making a file system does. Blocks.

    Raises:
        FormatError: it holds something else, which is left alone.
        DeviceError: it cannot be read.
    """
    if not is_block_device(device.fd) or read_superblock(device) is not None:
        return
    try:
        # Not where superblocks will be: whether that is empty is looked at once more.
        discard_range(device.fd, SUPERBLOCK_BYTES, device.nbytes - SUPERBLOCK_BYTES)
    except OSError as error:
        logger.warning("ssdkv: %s cannot be trimmed: %s", label, error.strerror)


class SlotTrimmer:
    """Slots to be trimmed. Not thread-safe: the writer calls it with its lock held, but for
    :meth:`discard`, which blocks and is for the writer's thread alone.
    """

    def __init__(
        self,
        devices: Sequence[OpenDevice],
        labels: Sequence[str],
        placement: Placement,
        num_slots: int,
        counters: Counters,
        *,
        discard: Callable[[int, int, int], None] = discard_range,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``labels`` name the devices in metrics and the log."""
        self._fds = {i: d.fd for i, d in enumerate(devices) if is_block_device(d.fd)}
        self._labels = tuple(labels)
        self._placement = placement
        self._counters = counters
        self._discard = discard
        self._clock = clock
        self._waiting = np.zeros(num_slots, dtype=np.bool_)
        self._count = 0
        self._slot_bytes = placement.geometry.slot_bytes
        self._due_at = 0.0

    def add(self, slots: I64) -> None:
        """These slots hold nothing any more."""
        if self._fds:
            new = np.unique(slots[~self._waiting[slots]])
            self._waiting[new] = True
            self._count += len(new)

    def keep(self, slots: I64) -> None:
        """These will be written: leave them alone."""
        if self._count:
            gone = np.unique(slots[self._waiting[slots]])
            self._waiting[gone] = False
            self._count -= len(gone)

    def wait_s(self) -> float | None:
        """Seconds until the next batch may go, or None when there is none."""
        return max(0.0, self._due_at - self._clock()) if self._count else None

    def take(self, busy: Sequence[int]) -> I64:
        """The next batch, the lowest slots first, which lie side by side.

        ``busy`` are slots that an I/O may still write to; they are given up.
        """
        self.keep(np.array(busy, dtype=np.int64))
        batch = np.flatnonzero(self._waiting)[: max(1, BATCH_BYTES // self._slot_bytes)]
        self._waiting[batch] = False
        self._count -= len(batch)
        self._due_at = self._clock() + len(batch) * self._slot_bytes / BYTES_PER_SECOND
        return batch

    def discard(self, slots: I64) -> None:
        """Trim a batch. A device that refuses is not asked again."""
        first, second = self._placement.copies(slots, 0, self._slot_bytes)
        for device, fd in list(self._fds.items()):
            copies = [e for e in (first, second) if e is not None]
            found = [(e.offset[e.device == device], e.length[e.device == device]) for e in copies]
            # Of a slot with one copy, both are the same.
            offset, index = np.unique(np.concatenate([o for o, _ in found]), return_index=True)
            length = np.concatenate([n for _, n in found])[index]
            begins, ends = _joined(offset.astype(np.int64), length.astype(np.int64))
            try:
                for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                    self._discard(fd, begin, end - begin)
                    self._counters.add("bytes_trimmed", end - begin, device=self._labels[device])
            except OSError as error:
                del self._fds[device]
                self._counters.add("trim_errors", device=self._labels[device])
                logger.warning(
                    "ssdkv: %s cannot be trimmed: %s", self._labels[device], error.strerror
                )


def _joined(begin: I64, length: I64) -> tuple[I64, I64]:
    """Rising ranges with neighbours as one: their begins and ends."""
    end = begin + length
    apart = begin[1:] != end[:-1]
    first, last = np.ones(len(begin), dtype=np.bool_), np.ones(len(begin), dtype=np.bool_)
    first[1:], last[:-1] = apart, apart
    return begin[first], end[last]
