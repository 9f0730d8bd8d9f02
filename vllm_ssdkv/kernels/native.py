"""The native kernels' module, loaded on demand."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch

from vllm_ssdkv.base.errors import UnsupportedError

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
