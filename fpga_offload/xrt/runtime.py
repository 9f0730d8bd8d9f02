"""XRT as the backend uses it: a card, buffers of its memory, runs of its kernels.

:class:`BridgeRuntime` calls XRT's C++ API by ``bridge.cpp``, which ``make fpga`` builds.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import FpgaError, FpgaVersionError
from vllm_ssdkv.fpga_offload.library import library_function
from vllm_ssdkv.fpga_offload.rtlsim import FOLDER_VARIABLE

COMPLETED: Final = 4
"""XRT's state of a run that has ended well."""
STATES: Final = {5: "error", 6: "abort"}
"""XRT's names of those that have ended badly; in others it has not ended."""
NO_ANSWER: Final = {8: "timeout", 9: "no response"}
"""XRT's names of those in which it has given up waiting."""

BRIDGE: Final = "libssdkv_xrt.so"
BRIDGE_VERSION: Final = 2
"""Version of its functions."""
_TEXT_BYTES: Final = 1 << 16

KernelArguments: TypeAlias = Mapping[str, Sequence[tuple[str, int, int]]]
"""Arguments of the kernels of a file, by the kernel's name: name, offset and size of each."""


@dataclass(frozen=True, slots=True)
class CardBuffer:
    """Memory of the card.

    Attributes:
        handle: Of the runtime.
        mapped: Its bytes in this process, uint8.
        address: In the card's memory.
        peer: Whether drives can read and write it, and it needs no sync.
    """

    handle: object
    mapped: NDArray[np.uint8]
    address: int
    peer: bool = False


Argument: TypeAlias = CardBuffer | tuple[int, int]
"""A buffer, or a number with its bytes, 4 or 8."""


class Runtime(Protocol):
    """A card with kernels. One thread at a time."""

    def name(self) -> str:
        """Name of the card."""
        ...

    def buffer(self, kernel: str, argument: int, nbytes: int, *, peer: bool) -> CardBuffer:
        """Memory that an argument of a kernel reaches."""
        ...

    def release(self, buffer: CardBuffer) -> None:
        """Give it back; nobody may use its bytes any more."""
        ...

    def sync(self, buffer: CardBuffer, nbytes: int, *, to_card: bool) -> None:
        """Copy the first bytes to the card, or from it."""
        ...

    def run(self, kernel: str, arguments: Sequence[Argument], timeout_s: float) -> int:
        """Run a kernel and wait, at most so long; the GIL is free. Returns XRT's state."""
        ...

    def close(self) -> None:
        """Give the card back."""
        ...


class _Argument(ctypes.Structure):
    _fields_ = (
        ("buffer", ctypes.c_void_p),
        ("value", ctypes.c_uint64),
        ("bytes", ctypes.c_uint32),
    )


def bridge_path() -> Path:
    """The bridge: in the folder that ``SSDKV_FPGA_BUILD`` names, or in ``build/fpga``."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "build/fpga").absolute() / BRIDGE


def _load() -> ctypes.CDLL:
    path = bridge_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise FpgaError(
            f"XRT's bridge {path} cannot be loaded: {error}; build it by `make fpga`, which needs "
            "XRT's headers (Debian: libxrt-dev)"
        ) from error
    version = int(library_function(library, path, "ssdkv_xrt_version", (), ctypes.c_uint32)())
    if version != BRIDGE_VERSION:
        raise FpgaVersionError(
            f"{path} is XRT's bridge of version {version}, and version {BRIDGE_VERSION} is needed; "
            "build it again by `make fpga`"
        )
    pointer, text, room = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    word, number, flag = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
    out = ctypes.POINTER(ctypes.c_void_p)
    library_function(library, path, "ssdkv_xrt_error", (), text)
    for name, types in (
        ("inspect", (text, text, room)),
        ("open", (number, text, out)),
        ("name", (pointer, text, room)),
        ("buffer", (pointer, text, flag, word, flag, out, out, ctypes.POINTER(word))),
        ("sync", (pointer, flag, word, word)),
        ("run", (pointer, text, ctypes.POINTER(_Argument), flag, number, ctypes.POINTER(number))),
    ):
        library_function(library, path, f"ssdkv_xrt_{name}", types, ctypes.c_int)
    for name in ("close", "release"):
        library_function(library, path, f"ssdkv_xrt_{name}", (pointer,), None)
    return library


def _check(library: ctypes.CDLL, result: int, what: str) -> None:
    if result:
        reason = library.ssdkv_xrt_error().decode(errors="replace").strip()
        raise FpgaError(f"XRT: {what}: {reason}")


def inspect(path: str) -> KernelArguments:
    """Kernels of an xclbin, without a card.

    Raises:
        FpgaError: it cannot be read, or XRT's bridge is not there.
    """
    library = _load()
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    _check(library, library.ssdkv_xrt_inspect(path.encode(), text, len(text)), path)
    kernels: dict[str, list[tuple[str, int, int]]] = {}
    latest: list[tuple[str, int, int]] = []
    for line in text.value.decode().splitlines():
        kind, name, *numbers = line.split()
        if kind == "kernel":
            latest = kernels[name] = []
        else:
            latest.append((name, int(numbers[0]), int(numbers[1])))
    return kernels


class BridgeRuntime:
    """See :class:`Runtime`; by ``bridge.cpp``.

    Example:
        runtime = BridgeRuntime(0, "kernels.xclbin")
    """

    def __init__(self, card: int, path: str):
        """Open card number ``card`` and load the kernels of the xclbin at ``path``.

        Raises:
            FpgaError: there is no such card, or it does not take the file.
        """
        self._library = _load()
        self._card = ctypes.c_void_p()
        result = self._library.ssdkv_xrt_open(card, path.encode(), ctypes.byref(self._card))
        _check(self._library, result, f"card {card} with {path}")

    def name(self) -> str:
        """See :class:`Runtime`."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        if self._library.ssdkv_xrt_name(self._card, text, len(text)):
            return "a card without a name"
        return text.value.decode(errors="replace")

    def buffer(self, kernel: str, argument: int, nbytes: int, *, peer: bool) -> CardBuffer:
        """See :class:`Runtime`.

        Raises:
            FpgaError: the card has no such memory left, or no peer-to-peer.
        """
        handle, mapped = ctypes.c_void_p(), ctypes.c_void_p()
        address = ctypes.c_uint64()
        result = self._library.ssdkv_xrt_buffer(
            self._card,
            kernel.encode(),
            argument,
            nbytes,
            int(peer),
            ctypes.byref(handle),
            ctypes.byref(mapped),
            ctypes.byref(address),
        )
        _check(self._library, result, f"a buffer of {nbytes} bytes for {kernel}")
        room = (ctypes.c_uint8 * nbytes).from_address(mapped.value or 0)
        return CardBuffer(handle, np.ctypeslib.as_array(room), address.value, peer)

    def release(self, buffer: CardBuffer) -> None:
        """See :class:`Runtime`."""
        self._library.ssdkv_xrt_release(buffer.handle)

    def sync(self, buffer: CardBuffer, nbytes: int, *, to_card: bool) -> None:
        """See :class:`Runtime`.

        Raises:
            FpgaError: the card refuses.
        """
        result = self._library.ssdkv_xrt_sync(buffer.handle, int(to_card), nbytes, 0)
        _check(self._library, result, f"a copy of {nbytes} bytes")

    def run(self, kernel: str, arguments: Sequence[Argument], timeout_s: float) -> int:
        """See :class:`Runtime`.

        Raises:
            FpgaError: the card refuses.
        """
        packed = (_Argument * len(arguments))()
        for place, argument in enumerate(arguments):
            if isinstance(argument, CardBuffer):
                packed[place].buffer = getattr(argument.handle, "value", None)
            else:
                packed[place].value, packed[place].bytes = argument
        state = ctypes.c_uint32()
        result = self._library.ssdkv_xrt_run(
            self._card,
            kernel.encode(),
            packed,
            len(packed),
            max(1, round(timeout_s * 1000)),
            ctypes.byref(state),
        )
        _check(self._library, result, f"a run of {kernel}")
        return state.value

    def close(self) -> None:
        """See :class:`Runtime`."""
        if self._card:
            self._library.ssdkv_xrt_close(self._card)
            self._card = ctypes.c_void_p()
