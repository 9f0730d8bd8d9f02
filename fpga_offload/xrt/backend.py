"""Kernels on a card. See ``Backend``.

Pages in memory of the host go to the card first, those of one call together. Pages that a drive has
written into the card's memory itself (:meth:`XrtBackend.peer_memory`) are used where they lie.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import (
    FpgaDeadlineError,
    FpgaError,
    FpgaLimitError,
    FpgaVersionError,
)
from vllm_ssdkv.fpga_offload.backend import AttendWork, Limits, Partials, check_status
from vllm_ssdkv.fpga_offload.description import (
    ATTEND,
    BEAT_BYTES,
    KERNELS,
    STATUS,
    VERSION,
    Flag,
    Kernel,
    KernelShape,
    Status,
)
from vllm_ssdkv.fpga_offload.library import KernelBackend
from vllm_ssdkv.fpga_offload.trial import random_problem, run_problem
from vllm_ssdkv.fpga_offload.xrt.runtime import (
    COMPLETED,
    NO_ANSWER,
    STATES,
    Argument,
    BridgeRuntime,
    CardBuffer,
    KernelArguments,
    Runtime,
    inspect,
)

logger = logging.getLogger(__name__)

LEAST_BYTES: Final = 4096
"""Minimum size of a buffer: one page of memory."""

POOL_BYTES: Final = 1 << 30
"""Bytes of the card's memory for pages that come from the host: a SmartSSD has 4 GiB."""

TRIAL_TOKENS: Final = 40
"""Tokens of the context that each card attends to first: three pages, the last of them partial."""
TRIAL_ERROR: Final = 1e-4
"""Largest distance from float64, over the largest output."""

_WORD: Final = (1 << 32) - 1


def check_xclbin(found: KernelArguments, path: str) -> None:
    """Compare an xclbin's kernels with the description.

    Raises:
        FpgaError: it lacks one.
        FpgaVersionError: their arguments are not those of this version.
    """
    for kernel in KERNELS:
        if kernel.name not in found:
            listed = ", ".join(sorted(found)) or "none"
            raise FpgaError(f"{path} has no kernel {kernel.name}, only {listed}")
        wanted = [
            (one.argument.name, one.offset, one.argument.nbytes) for one in kernel.registers()
        ]
        there = list(found[kernel.name])
        if there == wanted:
            continue
        first = next((one for one in wanted if one not in there), wanted[-1])
        raise FpgaVersionError(
            f"{path}: kernel {kernel.name} is of another version than {VERSION}: it has "
            f"{len(there)} arguments for {len(wanted)}, and {first[0]} is not {first[2]} bytes at "
            f"{first[1]:#x}; build it again from this package's sources"
        )


class XrtBackend(KernelBackend):
    """See ``Backend``.

    Example:
        backend = XrtBackend.open("kernels.xclbin", 0, shape, deadline_s=60)
    """

    name = "xrt"
    address_space: Literal["host", "device"] = "host"

    def __init__(
        self,
        runtime: Runtime,
        shape: KernelShape,
        deadline_s: float,
        pool_bytes: int = POOL_BYTES,
    ):
        """Use a card whose kernels have been checked.

        Args:
            runtime: Closed with the backend.
            shape: Of the kernels.
            deadline_s: Seconds that a run may take.
            pool_bytes: Of the card's memory for pages from the host.
        """
        self.shape = shape
        self.limits = Limits()
        self._runtime: Runtime | None = runtime
        self._deadline_s = deadline_s
        self._pool_bytes = pool_bytes
        self._buffers: dict[tuple[str, str], CardBuffer] = {}
        self._peer: CardBuffer | None = None
        self._stuck = ""
        """Why the card must not be used any more."""

    @classmethod
    def open(cls, path: str, card: int, shape: KernelShape, deadline_s: float) -> XrtBackend:
        """Open a card with the kernels of an xclbin, and see that they compute.

        Raises:
            FpgaError: there is no bridge, no such file, no such kernel or no such card; or it
                computes something else than attention.
            FpgaVersionError: the file is of another version.
        """
        if not os.access(path, os.R_OK):
            raise FpgaError(f"offload.xclbin: {path} cannot be read")
        check_xclbin(inspect(path), path)
        runtime = BridgeRuntime(card, path)
        logger.info("ssdkv: offload: card %d is %s", card, runtime.name())
        return cls(runtime, shape, deadline_s).tried(path)

    def attend(self, work: AttendWork) -> Partials:
        """See ``Backend``; in several runs, where the pages of all jobs do not fit on the card.

        Raises:
            FpgaDeadlineError: a run did not end in time; the card is not used any more.
        """
        room = self._pool_bytes // self.shape.page_bytes
        if len(work.entries) <= room or self._is_peer(work.entries["address"]):
            return super().attend(work)
        acc = np.zeros((work.partials, self.shape.group, self.shape.head_size), np.float32)
        m = np.full(acc.shape[:2], -np.inf, np.float32)
        total = np.zeros_like(m)
        digests = np.zeros(len(work.entries), np.uint64) if work.checksum else None
        cycles = beats = 0
        for jobs, used in _runs(work, room):
            moved = jobs.copy()
            moved["first"] = (np.cumsum(used) - used)[jobs["first"]] if used.any() else 0
            part = super().attend(replace(work, jobs=moved, entries=work.entries[used]))
            out = jobs["out"]
            acc[out], m[out], total[out] = part.acc[out], part.m[out], part.l[out]
            if digests is not None and part.digests is not None:
                digests[used] = part.digests
            cycles, beats = cycles + part.cycles, beats + part.beats
        return Partials(acc, m, total, digests, cycles, beats)

    def tried(self, source: str) -> XrtBackend:
        """Attend to a small context: nothing in an xclbin says which shape its kernels have.

        Raises:
            FpgaError: the answer is not that of attention.
        """
        found = run_problem(self, random_problem(self.shape, TRIAL_TOKENS))
        if not found.error < TRIAL_ERROR:
            raise FpgaError(
                f"{source}: its kernels do not attend as kernels of {self.shape} do; build them "
                "for this model's head size and query heads per KV head"
            )
        return self

    def peer_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of the card that drives write to, for pages of ``attend``: its bytes in this
        process, uint8. Entries of a call are all in it, or none is. Made once.

        Raises:
            FpgaError: the card has no peer-to-peer; ``xbutil`` can enable it.
        """
        if self._peer is None:
            place = ATTEND.index("pages")
            name = ATTEND.name
            self._peer = self._open().buffer(name, place, nbytes, peer=True)
        return self._peer.mapped

    def close(self, timeout_s: float) -> bool:
        """See ``Backend``. A run that did not end keeps its memory."""
        del timeout_s
        runtime, self._runtime = self._runtime, None
        if runtime is None or self._stuck:
            return not self._stuck
        peer = [] if self._peer is None else [self._peer]
        for buffer in [*self._buffers.values(), *peer]:
            runtime.release(buffer)
        runtime.close()
        return True

    # ---- a run ----

    def _call(self, kernel: Kernel, **values: int | NDArray[Any]) -> NDArray[np.void]:
        runtime, name = self._open(), kernel.name
        status = np.zeros(STATUS.nbytes, np.uint8)
        placed = self._placed(kernel, {**values, "status": status})
        arguments: list[Argument] = []
        outputs: list[tuple[CardBuffer, NDArray[Any]]] = []
        for argument in kernel.arguments:
            value = placed[argument.name]
            if isinstance(value, np.ndarray):
                buffer = self._filled(kernel, argument.name, value)
                if argument.direction == "out":
                    outputs.append((buffer, value))
                arguments.append(buffer)
            elif isinstance(value, CardBuffer):
                arguments.append(value)
            else:
                arguments.append((value & _WORD, argument.nbytes))
        self._run(runtime, name, arguments)
        for buffer, array in outputs:
            if array.nbytes:
                runtime.sync(buffer, array.nbytes, to_card=False)
                array.view(np.uint8).reshape(-1)[:] = buffer.mapped[: array.nbytes]
        record: NDArray[np.void] = status.view(STATUS.dtype)[0]
        if record["version"] == 0:
            raise FpgaError(
                f"xrt: {name} has written no status: the card computes nothing, as with "
                "XCL_EMULATION_MODE=noop"
            )
        check_status(kernel, int(record["code"]), int(record["index"]), int(record["version"]))
        return record

    def _open(self) -> Runtime:
        if self._runtime is None:
            raise FpgaError("xrt is closed")
        if self._stuck:
            raise FpgaError(f"xrt: {self._stuck}")
        return self._runtime

    def _run(self, runtime: Runtime, name: str, arguments: list[Argument]) -> None:
        state = runtime.run(name, arguments, self._deadline_s)
        if state == COMPLETED:
            return
        if state in STATES:
            raise FpgaError(f"xrt: a run of {name} ended with the state {STATES[state]}")
        self._stuck = (
            f"a run of {name} does not answer: it has not ended in {self._deadline_s:g} s "
            f"(offload.kernel_deadline), its state is {NO_ANSWER.get(state, state)}; reset the "
            "card with `xbutil reset`"
        )
        raise FpgaDeadlineError(f"xrt: {self._stuck}")

    def _filled(self, kernel: Kernel, argument: str, array: NDArray[Any]) -> CardBuffer:
        """Buffer of an argument, with these bytes. Outputs are zeros until they are written."""
        buffer = self._buffer(kernel, argument, array.nbytes)
        if array.nbytes:
            buffer.mapped[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            self._open().sync(buffer, array.nbytes, to_card=True)
        return buffer

    def _buffer(self, kernel: Kernel, argument: str, nbytes: int) -> CardBuffer:
        """Buffer of an argument that has room for so much."""
        key = kernel.name, argument
        found = self._buffers.get(key)
        if found is None or len(found.mapped) < nbytes:
            runtime = self._open()
            if found is not None:
                del self._buffers[key]
                runtime.release(found)
            room = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)
            name, place = kernel.name, kernel.index(argument)
            found = self._buffers[key] = runtime.buffer(name, place, room, peer=False)
        return found

    # ---- pages ----

    def _is_peer(self, address: NDArray[np.uint64]) -> bool:
        """Check whether these pages lie in the card's memory already: all of them, or none."""
        if self._peer is None or not len(address):
            return False
        begin = self._peer.mapped.ctypes.data
        inside = (address >= begin) & (address < begin + len(self._peer.mapped))
        if inside.any() and not inside.all():
            raise ValueError("some pages of a call are in the card's memory and others are not")
        return bool(inside.all())

    def _placed(
        self, kernel: Kernel, values: dict[str, int | NDArray[Any]]
    ) -> dict[str, int | NDArray[Any] | CardBuffer]:
        """The values with pages and channels in the card's memory, and lists that name them
        there."""
        placed: dict[str, int | NDArray[Any] | CardBuffer] = dict(values)
        entries, v_offset, flags = values["entries"], values["v_offset"], values["flags"]
        if not (isinstance(entries, np.ndarray) and isinstance(v_offset, int)):
            raise TypeError("entries are an array, and v_offset is a number")
        entries = entries.copy()
        address = entries["address"]
        looked_at = kernel is ATTEND or Flag(int(flags)) & Flag.ATTEND
        if kernel is ATTEND and self._peer is not None and self._is_peer(address):
            entries["address"] = address - np.uint64(self._peer.mapped.ctypes.data)
            placed["pages"] = self._peer
        else:
            broken = np.flatnonzero((address == 0) | (address % BEAT_BYTES != 0))
            if looked_at and len(broken):
                check_status(kernel, Status.ENTRY_ADDRESS, int(broken[0]), VERSION)
            half = self.shape.page_bytes // 2
            parts = ((0, half), (v_offset, half))
            placed["pages"], entries["address"] = self._uploaded(kernel, "pages", address, parts)
            placed["v_offset"] = half
        placed["entries"] = entries
        channels, tokens = values.get("channels"), values.get("block_tokens")
        if isinstance(channels, np.ndarray) and isinstance(tokens, int):
            whole = ((0, 2 * self.shape.head_size * tokens),)
            placed["channel_pages"], placed["channels"] = self._uploaded(
                kernel, "channel_pages", channels, whole
            )
        return placed

    def _uploaded(
        self,
        kernel: Kernel,
        argument: str,
        address: NDArray[np.uint64],
        parts: tuple[tuple[int, int], ...],
    ) -> tuple[CardBuffer, NDArray[np.uint64]]:
        """Bring what lies at these addresses of the host to the card, each once. Nothing is at 0.

        Args:
            kernel, argument: Base of what is brought.
            address: uint64 [n].
            parts: Offset from the address, and bytes, of what lies back to back on the card.

        Returns:
            The buffer, and the offset of each in it, uint64 [n].

        Raises:
            FpgaLimitError: it is more than the card has room for.
        """
        distinct, place = np.unique(address, return_inverse=True)
        each = sum(nbytes for _, nbytes in parts)
        if len(distinct) * each > self._pool_bytes:
            raise FpgaLimitError(
                f"xrt: a call of {kernel.name} needs {len(distinct) * each} bytes of "
                f"{argument}, and {self._pool_bytes} of the card's memory are for them"
            )
        buffer = self._buffer(kernel, argument, len(distinct) * each)
        target = np.uint64(buffer.mapped.ctypes.data) + np.arange(
            len(distinct), dtype=np.uint64
        ) * np.uint64(each)
        there = distinct != 0
        for offset, nbytes in parts:
            _io.copy(distinct[there] + np.uint64(offset), target[there], nbytes)
            target += np.uint64(nbytes)
        if len(distinct):
            self._open().sync(buffer, len(distinct) * each, to_card=True)
        return buffer, place.astype(np.uint64) * np.uint64(each)


def _runs(work: AttendWork, room: int) -> Iterator[tuple[NDArray[np.void], NDArray[np.bool_]]]:
    """Jobs of each run, and a mask of their entries, so that no run has more than ``room``."""
    begin = 0
    while begin < len(work.jobs):
        used = np.zeros(len(work.entries), np.bool_)
        end = begin
        for job in work.jobs[begin:]:
            first, count = int(job["first"]), int(job["entries"])
            more = count - int(np.count_nonzero(used[first : first + count]))
            if end > begin and int(np.count_nonzero(used)) + more > room:
                break
            used[first : first + count] = True
            end += 1
        yield work.jobs[begin:end], used
        begin = end
