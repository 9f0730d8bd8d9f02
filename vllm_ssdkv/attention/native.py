"""The native kernels' module, loaded on demand, and how it names element types."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch

from vllm_ssdkv.errors import UnsupportedError

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


def dtype_codes(native: ModuleType) -> dict[torch.dtype, int]:
    """The module's number of each element type that it takes."""
    return {
        torch.float32: native.FLOAT32,
        torch.float16: native.FLOAT16,
        torch.bfloat16: native.BFLOAT16,
    }
