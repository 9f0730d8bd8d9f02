"""The RTL kernels, simulated clock by clock: shared libraries that ``make fpga`` builds.

A library is of one head size and group, and of both dtypes. Its memory is this process's: every
port answers one beat a cycle, in order.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from vllm_ssdkv.base.errors import FpgaError
from vllm_ssdkv.fpga_offload.backend import Limits
from vllm_ssdkv.fpga_offload.description import KernelShape
from vllm_ssdkv.fpga_offload.library import LibraryBackend, library_function

FOLDER_VARIABLE = "SSDKV_FPGA_BUILD"
Port = Literal["list", "page", "out"]
PORTS: Final[Sequence[Port]] = get_args(Port)


def rtlsim_library(shape: KernelShape) -> Path:
    """Library of the kernels of a shape."""
    return build_folder() / f"rtlsim_d{shape.head_size}_g{shape.group}.so"


def build_folder() -> Path:
    """Folder of ``make fpga``: the one that ``SSDKV_FPGA_BUILD`` names, or ``build/fpga``."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "build/fpga").absolute()


class RtlsimBackend(LibraryBackend):
    """See ``Backend``. ``sparf`` is in libraries that were built with it: ``scripts/fpga.sh
    64:2:sparf``; others refuse it.

    Example:
        backend = RtlsimBackend(KernelShape(head_size=128, group=1, dtype="float16"))
    """

    def __init__(self, shape: KernelShape, limits: Limits | None = None) -> None:
        """Load the library of a shape.

        Raises:
            FpgaError: there is none, or it cannot be loaded.
            FpgaVersionError: it is of another version.
        """
        path = rtlsim_library(shape)
        if not path.exists():
            raise FpgaError(
                f"{path}: no simulated kernels of head size {shape.head_size} and group "
                f"{shape.group}; scripts/fpga.sh {shape.head_size}:{shape.group} builds them, and "
                f"{FOLDER_VARIABLE} names another folder"
            )
        super().__init__("rtlsim", path, shape, limits)
        types = (ctypes.c_void_p, *(ctypes.c_uint32,) * 3)
        for name in ("ssdkv_fpga_rtl_memory", "ssdkv_fpga_rtl_fault"):
            library_function(self._library, path, name, types, None)

    def set_memory(self, *, seed: int = 0, stalls: float = 0.0, latency: int = 64) -> None:
        """Set how memory behaves in the calls to come.

        Args:
            seed: Of the stalls.
            stalls: Chance that a channel of a port is held back, in each cycle; below 1.
            latency: Cycles from a question to its first answer.
        """
        if not 0 <= stalls < 1:
            raise ValueError(f"stalls is a chance below 1, not {stalls}")
        with self._lock:
            chance = round(stalls * 256)
            self._library.ssdkv_fpga_rtl_memory(self._opened(), seed, chance, latency)

    def set_fault(self, port: Port, answers: int, *, silent: bool = False) -> None:
        """Let memory fail in the next call.

        Args:
            port: ``list``: jobs, queries and entries. ``page``. ``out``: all that is written.
            answers: Beats that the port reads, or bursts that it writes, before that.
            silent: Never answer again, in place of one error.
        """
        with self._lock:
            place = PORTS.index(port)
            self._library.ssdkv_fpga_rtl_fault(self._opened(), place, answers, int(silent))

    def _opened(self) -> int:
        if not self._device:
            raise FpgaError(f"{self.name} is closed")
        return int(self._device)
