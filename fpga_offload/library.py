"""Kernels in a shared library with the generated C ABI: the base of ``csim`` and ``rtlsim``.

The library gets host addresses as they are, so pages may lie anywhere in this process.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import FpgaError, FpgaVersionError
from vllm_ssdkv.fpga_offload.backend import (
    AttendWork,
    Limits,
    Partials,
    SparfResult,
    SparfWork,
    check_attend,
    check_sparf,
    check_status,
    float_bits,
    partials_of,
    scale_log2e_bits,
)
from vllm_ssdkv.fpga_offload.description import (
    ATTEND,
    BEAT_BYTES,
    CHOICE,
    KERNELS,
    SPARF,
    STATUS,
    VERSION,
    Flag,
    Kernel,
    KernelShape,
    layout_fingerprint,
)

_TYPES: Mapping[str, Any] = {
    "address": ctypes.c_uint64,
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
}


def _structure(kernel: Kernel) -> type[ctypes.Structure]:
    fields = [(one.name, _TYPES[one.kind]) for one in kernel.arguments]
    return type(f"{kernel.name}_args", (ctypes.Structure,), {"_fields_": fields})


_AGAIN: Final = "build it again from this package's sources"

ARGUMENTS = {kernel.name: _structure(kernel) for kernel in KERNELS}
"""The C ABI's structures of arguments, by kernel."""


class KernelBackend(ABC):
    """Arguments of the kernels from work, and results from what they wrote. See ``Backend``.

    Attributes:
        shape: Of the kernels.
        limits: The most that one call takes.
    """

    shape: KernelShape
    limits: Limits

    def attend(self, work: AttendWork) -> Partials:
        """See ``Backend``."""
        check_attend(work, self.shape, self.limits)
        queries, entries, jobs = _aligned(work.queries), _aligned(work.entries), _aligned(work.jobs)
        out = _room(work.partials * self.shape.partial_bytes)
        digests = np.zeros(len(entries) if work.checksum else 0, np.uint64)
        flags = self.shape.flags
        flags |= Flag.MASK if work.mask else Flag(0)
        flags |= Flag.CHECKSUM if work.checksum else Flag(0)
        status = self._call(
            ATTEND,
            q=queries,
            pages=0,
            entries=entries,
            jobs=jobs,
            out=out,
            digests=digests,
            job_count=len(jobs),
            entry_count=len(entries),
            v_offset=work.v_offset or self.shape.page_bytes // 2,
            scale_log2e=scale_log2e_bits(work.scale),
            flags=int(flags),
        )
        return Partials(
            *partials_of(out, self.shape, work.partials),
            digests if work.checksum else None,
            int(status["cycles"]),
            int(status["beats"]),
        )

    def sparf(self, work: SparfWork) -> SparfResult:
        """See ``Backend``."""
        check_sparf(work, self.shape, self.limits)
        queries, entries, jobs = _aligned(work.queries), _aligned(work.entries), _aligned(work.jobs)
        channels = np.ascontiguousarray(work.channels, np.uint64)
        mean = np.zeros(0, np.float32) if work.mean_value is None else _aligned(work.mean_value)
        out = _room(work.partials * self.shape.partial_bytes if work.attend else 0)
        masks = np.zeros(len(entries), np.uint32)
        choices = _room(work.partials * CHOICE.nbytes).view(CHOICE.dtype)
        status = self._call(
            SPARF,
            q=queries,
            pages=0,
            channel_pages=0,
            entries=entries,
            jobs=jobs,
            channels=channels,
            mean_value=mean,
            out=out,
            masks=masks,
            choices=choices,
            job_count=len(jobs),
            entry_count=len(entries),
            channel_count=len(channels),
            block_tokens=work.block_tokens,
            page_tokens=work.page_tokens,
            keep_channels=work.keep_channels,
            channel_group=work.channel_group,
            sinks=work.sinks,
            v_offset=work.v_offset or self.shape.page_bytes // 2,
            scale=float_bits(work.scale),
            scale_log2e=scale_log2e_bits(work.scale),
            flags=int(self.shape.flags | _sparf_flags(work)),
        )
        group = self.shape.group
        partials = None
        if work.attend:
            partials = Partials(
                *partials_of(out, self.shape, work.partials),
                cycles=int(status["cycles"]),
                beats=int(status["beats"]),
            )
        return SparfResult(
            masks,
            np.ascontiguousarray(choices["alpha"][:, :group]),
            np.ascontiguousarray(choices["lse"][:, :group]),
            np.ascontiguousarray(choices["window_mass"]),
            choices["tokens"].astype(np.int64),
            choices["pages"].astype(np.int64),
            partials,
            int(status["cycles"]),
            int(status["beats"]),
        )

    @abstractmethod
    def _call(self, kernel: Kernel, **values: int | NDArray[Any]) -> NDArray[np.void]:
        """Run a kernel. Arrays stand for their addresses, and those of outputs are written.

        Returns:
            The status record, which is checked.
        """


class LibraryBackend(KernelBackend):
    """See ``Backend``. Calls wait for each other.

    Example:
        with contextlib.closing(LibraryBackend("csim", path, shape)) as backend: ...
    """

    address_space: Literal["host", "device"] = "host"

    def __init__(
        self, name: str, path: Path, shape: KernelShape, limits: Limits | None = None
    ) -> None:
        """Load the library and open its kernels of a shape.

        Args:
            name: Of the backend.
            path: Of the library.
            shape: Of the kernels.
            limits: If they are not the description's.

        Raises:
            FpgaError: it cannot be loaded, or has no such kernels.
            FpgaVersionError: it is of another version.
        """
        self.name = name
        self.shape = shape
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self._peer: NDArray[np.uint8] | None = None
        self._library = load_library(name, path)
        self._device = self._library.ssdkv_fpga_open(shape.head_size, shape.group, int(shape.flags))
        if not self._device:
            raise FpgaError(f"{path} has no kernels of {shape}")

    def peer_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """See ``Backend``: memory of the process, of which it is as good as any."""
        if self._peer is None or len(self._peer) < nbytes:
            self._peer = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return self._peer[:nbytes]

    def close(self, timeout_s: float) -> bool:
        """See ``Backend``."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            if self._device:
                self._library.ssdkv_fpga_close(self._device)
                self._device = None
        finally:
            self._lock.release()
        return True

    def _call(self, kernel: Kernel, **values: int | NDArray[Any]) -> NDArray[np.void]:
        """See :meth:`KernelBackend._call`."""
        status = _room(STATUS.nbytes).view(STATUS.dtype)
        arguments = ARGUMENTS[kernel.name]()
        for argument in kernel.arguments:
            value = status if argument.name == "status" else values[argument.name]
            setattr(arguments, argument.name, _value(value))
        with self._lock:
            if not self._device:
                raise FpgaError(f"{self.name} is closed")
            function = getattr(self._library, f"ssdkv_fpga_{kernel.name}")
            code = int(function(self._device, ctypes.byref(arguments)))
        record: NDArray[np.void] = status[0]
        check_status(kernel, code, int(record["index"]), int(record["version"]))
        return record


def _value(value: int | NDArray[Any]) -> int:
    return value.ctypes.data if isinstance(value, np.ndarray) else int(value)


def _sparf_flags(work: SparfWork) -> Flag:
    flags = Flag(0)
    for flag, on in (
        (Flag.BY_PAGE, work.by_page),
        (Flag.ATTEND, work.attend),
        (Flag.WINDOW, work.window),
        (Flag.MEAN_VALUE, work.mean_value is not None),
    ):
        flags |= flag if on else Flag(0)
    return flags


def load_library(name: str, path: Path) -> ctypes.CDLL:
    """Library with the generated C ABI, of this version and layout; nothing else of it is called.

    Raises:
        FpgaError: it cannot be loaded.
        FpgaVersionError: it is of another version or layout, or lacks a function.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise FpgaError(f"the library of {name} cannot be loaded: {error}") from error
    version = int(library_function(library, path, "ssdkv_fpga_version", (), ctypes.c_uint32)())
    if version != VERSION:
        raise FpgaVersionError(
            f"{path} has kernels of version {version}, and version {VERSION} is needed; {_AGAIN}"
        )
    layout = int(library_function(library, path, "ssdkv_fpga_layout", (), ctypes.c_uint32)())
    if layout != layout_fingerprint():
        raise FpgaVersionError(
            f"{path} has kernels of layout {layout:#010x}, and {layout_fingerprint():#010x} is "
            f"needed; {_AGAIN}"
        )
    device, number = ctypes.c_void_p, ctypes.c_uint32
    library_function(library, path, "ssdkv_fpga_open", (number,) * 3, device)
    library_function(library, path, "ssdkv_fpga_close", (device,), None)
    for kernel in KERNELS:
        arguments = (device, ctypes.POINTER(ARGUMENTS[kernel.name]))
        library_function(library, path, f"ssdkv_fpga_{kernel.name}", arguments, ctypes.c_int32)
    return library


def library_function(
    library: ctypes.CDLL,
    path: Path,
    name: str,
    arguments: Sequence[type[Any]],
    result: type[Any] | None,
) -> Callable[..., Any]:
    """Function of a library, with its types.

    Raises:
        FpgaVersionError: there is none: the library is older, or is none of kernels.
    """
    try:
        function = getattr(library, name)
    except AttributeError:
        raise FpgaVersionError(f"{path} has no function {name}; {_AGAIN}") from None
    function.argtypes, function.restype = list(arguments), result
    found: Callable[..., Any] = function
    return found


def _room(nbytes: int) -> NDArray[np.uint8]:
    """Zeros at an address that the kernels' ports can write to."""
    raw = np.zeros(nbytes + BEAT_BYTES, np.uint8)
    begin = -raw.ctypes.data % BEAT_BYTES
    return raw[begin : begin + nbytes]


def _aligned(array: NDArray[Any]) -> NDArray[Any]:
    """The array, or a copy, at such an address."""
    array = np.ascontiguousarray(array)
    if array.ctypes.data % BEAT_BYTES == 0:
        return array
    copy = _room(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
