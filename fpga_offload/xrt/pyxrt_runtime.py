"""XRT's own Python bindings, where they are installed: AMD's packages of XRT bring ``pyxrt``.

Written to the documented interface (XRT 2.13, ``pybind11/src/pyxrt.cpp``), never run with the
real bindings, which are in no package index.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from vllm_ssdkv.base.errors import FpgaError
from vllm_ssdkv.fpga_offload.description import KERNELS
from vllm_ssdkv.fpga_offload.xrt.runtime import Argument, CardBuffer

_SIGN: Final = 1 << 31


def has_pyxrt() -> bool:
    """Check whether the bindings can be imported."""
    return importlib.util.find_spec("pyxrt") is not None


class PyxrtRuntime:
    """See ``Runtime``; by ``pyxrt``. It does not tell offsets of arguments, so kernels of another
    version are found by their status record alone.

    Example:
        runtime = PyxrtRuntime(0, "kernels.xclbin")
    """

    def __init__(self, card: int, path: str):
        """Open card number ``card`` and load the kernels of the xclbin at ``path``.

        Raises:
            FpgaError: there is no such card, it does not take the file, or lacks a kernel.
        """
        self._xrt: Any = importlib.import_module("pyxrt")
        try:
            self._card = self._xrt.device(card)
            loaded = self._card.load_xclbin(path)
            shared = self._xrt.kernel.shared
            self._kernels = {
                one.name: self._xrt.kernel(self._card, loaded, one.name, shared) for one in KERNELS
            }
        except (RuntimeError, ValueError, TypeError) as error:
            raise FpgaError(f"XRT: card {card} with {path}: {error}") from error

    def name(self) -> str:
        """See ``Runtime``."""
        return str(self._card.get_info(self._xrt.xrt_info_device.name))

    def buffer(self, kernel: str, argument: int, nbytes: int, *, peer: bool) -> CardBuffer:
        """See ``Runtime``.

        Raises:
            FpgaError: the card has no such memory left, or no peer-to-peer.
        """
        kind = self._xrt.bo.p2p if peer else self._xrt.bo.normal
        try:
            made = self._xrt.bo(self._card, nbytes, kind, self._kernels[kernel].group_id(argument))
            mapped = np.frombuffer(made.map(), np.uint8)
            return CardBuffer(made, mapped, int(made.address()), peer)
        except RuntimeError as error:
            raise FpgaError(f"XRT: a buffer of {nbytes} bytes for {kernel}: {error}") from error

    def release(self, buffer: CardBuffer) -> None:
        """See ``Runtime``: the bindings free it with their last reference."""

    def sync(self, buffer: CardBuffer, nbytes: int, *, to_card: bool) -> None:
        """See ``Runtime``.

        Raises:
            FpgaError: the card refuses.
        """
        ways = self._xrt.xclBOSyncDirection
        way = ways.XCL_BO_SYNC_BO_TO_DEVICE if to_card else ways.XCL_BO_SYNC_BO_FROM_DEVICE
        made: Any = buffer.handle
        try:
            made.sync(way, nbytes, 0)
        except RuntimeError as error:
            raise FpgaError(f"XRT: a copy of {nbytes} bytes: {error}") from error

    def run(self, kernel: str, arguments: Sequence[Argument], timeout_s: float) -> int:
        """See ``Runtime``.

        Raises:
            FpgaError: the card refuses.
        """
        try:
            run = self._xrt.run(self._kernels[kernel])
            for place, argument in enumerate(arguments):
                run.set_arg(place, _value(argument))
            run.start()
            return int(run.wait(max(1, round(timeout_s * 1000))))
        except (RuntimeError, TypeError) as error:
            raise FpgaError(f"XRT: a run of {kernel}: {error}") from error

    def close(self) -> None:
        """See ``Runtime``: the bindings close with their last reference."""
        self._kernels.clear()


def _value(argument: Argument) -> Any:  # noqa: ANN401 - what the bindings take
    """A buffer, or a number as the signed one of the same 32 bits: larger ones are dropped
    silently."""
    if isinstance(argument, CardBuffer):
        return argument.handle
    number, nbytes = argument
    if nbytes != 4:
        raise TypeError("a number of 64 bits cannot be passed; addresses are buffers")
    return number - 2 * _SIGN if number >= _SIGN else number
