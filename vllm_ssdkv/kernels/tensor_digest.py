"""Digests of tensors on a host or a GPU, and a cheap look whether they are still the same.

Both devices compute the same number (``csrc/io/slot/digest.hpp``, ``triton_kernels/digest.py``), at
the speed of their memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import UnsupportedError

U64 = NDArray[np.uint64]

SAMPLED_WORDS = 4
"""Words of a tensor that a probe looks at."""

_WORD = 8


def digest_tensors(tensors: Sequence[torch.Tensor]) -> U64:
    """Digest of the bytes of each tensor, [n]; 0 for one without memory ("meta").

    Tensors may be of any dtype, on any of the devices "cpu", "cuda" and "meta", and strided. The
    bytes are those of memory where the tensor fills a stretch of it, in whatever order, and those
    of a contiguous copy otherwise. Blocks until all is computed.

    Raises:
        UnsupportedError: a tensor is on another kind of device.
    """
    found = np.zeros(len(tensors), dtype=np.uint64)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.numel() and not tensor.is_meta:
            by_device.setdefault(tensor.device, []).append(i)
    for device, which in by_device.items():
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"weights on a device of type {device.type}: use a CPU or a GPU")
        stretches = [_as_bytes(tensors[i]) for i in which]
        if device.type == "cpu":
            found[which] = _io.digest(
                np.array([one.data_ptr() for one in stretches], np.uint64),
                np.array([one.numel() for one in stretches], np.uint64),
            )
        else:
            from vllm_ssdkv.triton_kernels.digest import digest

            found[which] = digest(stretches).cpu().numpy().view(np.uint64)
    return found


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 [nbytes], beginning at a multiple of 8 on a GPU."""
    tensor = tensor.detach()
    if not _fills_memory(tensor):
        tensor = tensor.contiguous()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    nbytes = tensor.numel() * tensor.itemsize
    raw.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (nbytes,), (1,))
    return raw.clone() if tensor.is_cuda and raw.data_ptr() % _WORD else raw


def _fills_memory(tensor: torch.Tensor) -> bool:
    """Check whether the elements fill a stretch of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class TensorProbe:
    """Remembers a few words of each tensor, and finds whether any of them has changed.

    Tensors are not kept alive. A look costs some microseconds per hundred tensors; on a GPU it is
    one small kernel on a stream of its own, which is waited for.

    Example:
        >>> weight = torch.zeros(100)
        >>> probe = TensorProbe([weight])
        >>> probe.changed()
        False
        >>> _ = weight.fill_(1)
        >>> probe.changed()
        True
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        """``tensors``: on CPUs and GPUs; those of less than a word, or "meta", are left out."""
        there = [t for t in tensors if t.numel() * t.itemsize >= 2 * _WORD and not t.is_meta]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in there:
            by_device.setdefault(tensor.device, []).append(tensor)
        self._groups = [_Words(device, group) for device, group in by_device.items()]

    def changed(self) -> bool:
        """Check whether a tensor is gone, lies elsewhere or holds other words than at first."""
        return any(group.changed() for group in self._groups)


class _Words:
    """The words of the tensors of one device."""

    def __init__(self, device: torch.device, tensors: Sequence[torch.Tensor]):
        self._device = device
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        base = _addresses(tensors)
        self._places = np.concatenate(
            [_places(int(at), tensor) for at, tensor in zip(base, tensors, strict=True)]
        )
        self._base = base.tobytes()
        self._seen = self._read()

    def changed(self) -> bool:
        there = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        if len(there) != len(self._tensors):
            return True
        return _addresses(there).tobytes() != self._base or self._read() != self._seen

    def _read(self) -> bytes:
        if self._stream is None:
            return _io.read_words(self._places).tobytes()
        from vllm_ssdkv.triton_kernels.digest import read_words

        with torch.cuda.stream(self._stream):
            places = torch.from_numpy(self._places.view(np.int64)).to(self._device)
            return read_words(places).cpu().numpy().tobytes()


def _addresses(tensors: Sequence[torch.Tensor]) -> U64:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)


def _places(address: int, tensor: torch.Tensor) -> U64:
    """Aligned addresses of words of a tensor at ``address``: spread over it where it fills a
    stretch of memory, else its first one."""
    first = -(-address // _WORD) * _WORD
    nbytes = tensor.numel() * tensor.itemsize if _fills_memory(tensor) else 2 * _WORD
    last = (address + nbytes - _WORD) // _WORD * _WORD
    steps = (last - first) // _WORD
    words = {steps * i // (SAMPLED_WORDS - 1) for i in range(SAMPLED_WORDS)}
    return np.array([first + _WORD * word for word in sorted(words)], dtype=np.uint64)
