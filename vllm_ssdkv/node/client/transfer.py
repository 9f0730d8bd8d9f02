"""Memory of a worker's session: its transfer region, and frames that hits are copied from."""

from __future__ import annotations

import mmap
import os
from collections import deque

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import ProtocolError
from vllm_ssdkv.node.protocol.shared_memory import make_shared, map_shared

I32 = NDArray[np.int32]


class MappedFrames:
    """Frames in a mapping, by number. Any thread may read; it lives as long as this does.

    Example:
        frames = MappedFrames(mapping, frame_bytes=4096)
        frames.address(np.array([1], dtype=np.int32))
    """

    def __init__(self, mapping: mmap.mmap, frame_bytes: int):
        self._bytes: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self._frame_bytes = frame_bytes
        self.count = len(self._bytes) // frame_bytes
        self.nbytes = len(self._bytes)
        self.start = int(self._bytes.ctypes.data)
        """Absolute address of the first byte."""

    def address(self, frames: I32) -> NDArray[np.uint64]:
        """Absolute address of each frame, [n]."""
        return np.uint64(self.start) + frames.astype(np.uint64) * np.uint64(self._frame_bytes)

    def view(self, frame: int) -> NDArray[np.uint8]:
        """Bytes of a frame, without a copy."""
        return self._bytes[frame * self._frame_bytes : (frame + 1) * self._frame_bytes]

    def views(self, frames: I32) -> list[memoryview]:
        """Bytes of some frames, without a copy."""
        return [self.view(frame).data for frame in frames.tolist()]


class ArrivedFrames:
    """Frames of the blocks that a node told of last, by their place in that message.

    The thread that copies them is the only one that uses this.

    Example:
        frames = ArrivedFrames()
        frames.show(memory, offsets, frame_bytes=4096)
    """

    def __init__(self) -> None:
        self._frame_bytes = 0
        self._bytes: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._offsets: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def show(self, memory: NDArray[np.uint8], offsets: NDArray[np.int64], frame_bytes: int) -> None:
        """Frames are at these offsets of a memory from now on.

        Raises:
            ProtocolError: one is not inside.
        """
        if len(offsets) and not (offsets.min() >= 0 and offsets.max() + frame_bytes <= len(memory)):
            raise ProtocolError("place", "a frame is outside the memory of the node")
        self._bytes, self._offsets, self._frame_bytes = memory, offsets, frame_bytes

    def address(self, frames: I32) -> NDArray[np.uint64]:
        """Absolute address of each frame, [n]."""
        start = np.uint64(self._bytes.ctypes.data)
        return start + self._offsets[frames].astype(np.uint64)

    def view(self, frame: int) -> NDArray[np.uint8]:
        """Bytes of a frame, without a copy."""
        begin = int(self._offsets[frame])
        return self._bytes[begin : begin + self._frame_bytes]


class TransferRegion:
    """Places for blocks on their way to a node. Used by one thread, but for :attr:`frames`.

    Example:
        region = TransferRegion(nbytes=1 << 20, frame_bytes=4096, shared=True)
        places = region.take(3)
    """

    def __init__(self, nbytes: int, frame_bytes: int, *, shared: bool):
        """``shared``: the memory has a descriptor, which a node on this machine may map.

        Raises:
            NodeError: there is no memory for it.
        """
        count = max(1, nbytes // frame_bytes)
        size = -(-count * frame_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = -1
        if shared:
            self.descriptor = make_shared("ssdkv-transfer", size)
            mapping = map_shared(self.descriptor, size, writable=True)
        else:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.nbytes = size
        self.frames = MappedFrames(mapping, frame_bytes)
        self._free: deque[int] = deque(range(count))

    @property
    def free(self) -> int:
        """Places that nobody has."""
        return len(self._free)

    def take(self, count: int) -> I32:
        """Up to ``count`` places, [k]."""
        count = min(count, len(self._free))
        return np.array([self._free.popleft() for _ in range(count)], dtype=np.int32)

    def give_back(self, places: I32) -> None:
        """These places may be used again."""
        self._free.extend(places.tolist())

    def close_descriptor(self) -> None:
        """Close the descriptor; mappings stay."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
