"""The native kernels' module, loaded on demand, and vectors of tokens as it takes them."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch

from vllm_ssdkv import _kernels
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.kernels.operands.block_layout import DTYPES, NATIVE_DTYPES

logger = logging.getLogger(__name__)


def load_native(threads: int) -> ModuleType:
    """``vllm_ssdkv._kernels``; logs a warning where it cannot use ``threads`` threads.

    Raises ``UnsupportedError`` if it does not load.
    """
    try:
        native = importlib.import_module("vllm_ssdkv._kernels")
    except ImportError as error:
        raise UnsupportedError(
            f"the native attention kernels do not load ({error}); reinstall the package"
        ) from error
    if threads > 1 and not native.team_available():
        logger.warning(
            "ssdkv: torch has no OpenMP runtime here; attention runs on one thread of %d", threads
        )
    return native


class NativeKernels:
    """Base of every class of native kernels."""

    def __init__(self, threads: int | None = None) -> None:
        """Load the module. ``threads`` bounds the threads of one call (default: torch's).

        Raises:
            UnsupportedError: it does not load.
        """
        self.threads = threads or torch.get_num_threads()
        self._native = load_native(self.threads)


def vectors(name: str, tensor: torch.Tensor, heads: int, head_size: int) -> _kernels.Vectors:
    """``[T, heads, head_size]`` as native kernels take it; ``ValueError`` if heads have holes."""
    shape, stride = tensor.shape, tensor.stride()
    if (
        len(shape) != 3
        or shape[1:] != (heads, head_size)
        or tensor.dtype not in DTYPES
        or (stride[1:] != (head_size, 1) and tensor.numel())
        or not tensor.is_cpu
    ):
        raise ValueError(
            f"{name} must be [T, {heads}, {head_size}] of {DTYPES} on the CPU with contiguous "
            f"heads, got {tensor.dtype} {tuple(shape)} strides {stride}"
        )
    # The stride of a dimension of size one is arbitrary.
    step = stride[0] if shape[0] > 1 else heads * head_size
    return _kernels.Vectors(
        tensor.data_ptr(),
        NATIVE_DTYPES[tensor.dtype],
        step * tensor.itemsize,
        shape[0],
        heads,
        head_size,
    )
