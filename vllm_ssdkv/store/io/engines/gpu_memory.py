"""Memory of a GPU as an engine sees it: bytes by offset that the CPU never touches.

KvikIO moves them between GPU and file: with GPUDirect Storage without a copy in the host's memory,
else (its compatibility mode) through one.
"""

from __future__ import annotations

from typing import Any, Protocol, Self


class OnGpu(Protocol):
    """Interface of torch, cupy and others to memory of a GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of CUDA's array interface."""


class GpuMemory:
    """Bytes of a GPU. A slice is a part of the same bytes; all keep their owner alive.

    Nobody else may write what an engine reads into, or the other way round: there is no stream to
    order both, so synchronize before a batch is submitted.
    """

    def __init__(self, address: int, size: int, owner: object):
        """``size`` bytes from ``address`` on, which belong to ``owner``."""
        self.size = size
        self._address = address
        self._owner = owner

    @classmethod
    def of(cls, array: OnGpu) -> Self:
        """All bytes of a contiguous array or tensor.

        Raises:
            ValueError: it is not contiguous, or read-only.
        """
        found = array.__cuda_array_interface__
        address, read_only = found["data"]
        if found.get("strides") is not None or read_only:
            raise ValueError("an engine needs contiguous memory that may be written")
        size = int(found["typestr"][2:])
        for count in found["shape"]:
            size *= count
        return cls(address, size, array)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> GpuMemory:
        begin, end, step = part.indices(self.size)
        if step != 1:
            raise ValueError("a part of a GPU's memory has no gaps")
        return GpuMemory(self._address + begin, max(0, end - begin), self._owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self._address, False),
            "strides": None,
            "version": 3,
        }
