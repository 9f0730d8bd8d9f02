"""Launch of kernels: a typed ``jit``, the right device, padded tile sizes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar, cast

import torch
import triton
import triton.language as tl

from vllm_ssdkv.kernels.operands.block_layout import FLOAT8


class Kernel(Protocol):
    """A compiled or interpreted kernel: index it by its grid, call the result."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """The launcher for a grid of up to three dimensions."""
        ...


jit = cast("Callable[[Callable[..., None]], Kernel]", triton.jit)
"""``triton.jit``, which carries no types of its own."""

_Function = TypeVar("_Function", bound=Callable[..., object])

inline = cast("Callable[[_Function], _Function]", triton.jit)
"""``triton.jit`` for a function that kernels call."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter, on CPU tensors."""

TL_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
"""Triton's names of the element types."""

EXPONENT_BITS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
"""Bits of the exponent of types of 8 bits, which kernels read as bytes: not every device of today
has instructions for them."""


@inline
def widened(byte: torch.Tensor, EXPONENT: tl.constexpr) -> torch.Tensor:
    """Numbers of 8 bits as float32: they are float16 but for where their bits stand, and for the
    exponent's bias."""
    bits = tl.cast(byte, tl.uint16)
    if EXPONENT == 5:
        half = bits << 8
        factor = 1.0
    else:
        size = bits & 0x7F
        half = (bits & 0x80) << 8 | tl.where(size == 0x7F, 0x7E00, size << 7).to(tl.uint16)
        factor = 256.0
    number: torch.Tensor = half.to(tl.float16, bitcast=True).to(tl.float32) * factor
    return number


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make ``tensor``'s device the current one, which is where Triton launches.

    Raises ``ValueError`` for a tensor that no kernel here can reach.
    """
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    if not INTERPRETED:
        raise ValueError(f"a Triton kernel needs a CUDA tensor, got one on {tensor.device}")
    return nullcontext()


def padded(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``size`` and ``least`` (tiles are such)."""
    return max(least, 1 << max(0, size - 1).bit_length())


def dot_dtype(query: torch.dtype, kv: torch.dtype) -> object:
    """Element type that tensor cores multiply: the inputs' own, float32 when they differ.

    Queries hold numbers of 8 bits exactly. The interpreter multiplies bfloat16 as the integers it
    stores it in, so it gets float32.
    """
    kv = query if kv in FLOAT8 else kv
    if query != kv or (INTERPRETED and kv == torch.bfloat16):
        return tl.float32
    return TL_DTYPES[kv]


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)
