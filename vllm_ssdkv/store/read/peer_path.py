"""Path of a streamed context into memory of the device that attends: past the host's.

Drives write the pages there themselves. The host does not look at them: the device makes their
checksums while it reads them, and its answer counts once these are those of the table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import DeviceError
from vllm_ssdkv.store.integrity.slot_codec import Digests
from vllm_ssdkv.store.io.buffer_pool import BufferPool
from vllm_ssdkv.store.io.digest_source import PageCodec
from vllm_ssdkv.store.io.engines.protocol import U64, IoEngine, Op
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.memory.arena import Arena

_TRIED_BYTES: Final = 4096
"""Read from each drive at the start, to see that it can write there."""


class UncheckedPages:
    """See ``PageCodec``: pages that have arrived may be used, by who checks them."""

    def unseal(
        self, seals: Digests, first_page: int, at: U64, *, final: bool = False
    ) -> NDArray[np.bool_]:
        """See ``PageCodec``; looks at nothing."""
        del first_page, at, final
        return np.ones(seals.marks.shape[:2], dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class ReadPath:
    """A way of pages into memory. Used by one thread at a time.

    Attributes:
        files: Their engine reads into that memory.
        codec: Check of what has arrived.
        staging: Pieces of the memory, of ``layer_bytes``.
        address: Of the memory.
        unchecked: Whether who attends has to compare checksums.

    Example:
        path = ReadPath(files, files.codec, staging, arena.address)
    """

    files: SlotIO
    codec: PageCodec
    staging: BufferPool
    address: int
    unchecked: bool = False

    @classmethod
    def to_device(
        cls, files: SlotIO, engine: IoEngine, devices: int, memory: Arena, pieces: int
    ) -> ReadPath:
        """The path into a device's ``memory``, by an engine over it and so many ``devices``.

        Raises:
            DeviceError: a drive cannot write there; found now, it is not charged for it.
        """
        every = np.arange(devices, dtype=np.uint16)
        nothing = np.zeros(devices, dtype=np.uint64)
        length = np.full(devices, _TRIED_BYTES, dtype=np.uint32)
        batch = engine.submit(Op.READ, every, nothing, length, nothing)
        ended = batch.wait(files.deadline_s)
        for path, result in zip(files.health.paths, batch.results().tolist(), strict=False):
            if not ended or result != _TRIED_BYTES:
                why = os.strerror(-result) if -4096 < result < 0 else "it does not answer"
                raise DeviceError(f"{path} cannot be read into memory of another device: {why}")
        staging = BufferPool(0, files.geometry.layer_bytes, pieces)
        return cls(
            replace(files, engine=engine), UncheckedPages(), staging, memory.address, unchecked=True
        )
