"""Answers to a device that lacks pages in the middle of a step, which the host has no part in.

Native code (``csrc/decode/miss_service.hpp``) takes the device's requests, looks pages up in the
page cache, and reads the first copies of those that are missing, unless others may be better. What
did not come so is read here: by the one verified read, in a thread that waits for such work.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.cache.selected_pages import SelectedPageCache
from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
from vllm_ssdkv.store.io.engines.native import NativeEngine
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.io.thread_errors import ThreadErrors
from vllm_ssdkv.store.io.verified_read import VerifiedRead, union
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.read.page_fetcher import PageFetcher

_LOOK_S: Final = 0.2
"""Interval at which the thread checks whether it is to end."""

_HELD: Final = 2
"""State of a page that did not come, and whose place a read may still write to."""

_Lent: TypeAlias = tuple[NDArray[np.int32], SlotRequest]
"""Places, and the read that may still write to them."""


class MissAnswers:
    """Answers to the requests of a device. Used by the thread of the forward pass.

    Between :meth:`begin` and :meth:`end` of a step nobody else uses the page cache.

    Example::

        base = answers.begin([slots of a row, ...])  # tickets of the step are counted from it
        served = answers.end()
        answers.release(served.places)  # when the device has done with them
    """

    def __init__(
        self,
        files: SlotIO,
        seals: ChecksumTable,
        cache: SelectedPageCache,
        fetcher: PageFetcher,
        arena: Arena,
        mail: _io.Mailbox,
    ):
        """Start the threads. ``mail``: memory by which the device asks, which outlives this."""
        self._most = mail.most
        self._files, self._cache, self._fetcher = files, cache, fetcher
        geometry = files.geometry
        engine = files.engine if isinstance(files.engine, NativeEngine) else None
        stored = _io.StoredPages(
            arena.address + int(cache.buffer_offset(np.zeros(1, dtype=np.int32))[0]),
            geometry.page_bytes,
            geometry.header_bytes,
            arena.address,
            geometry.payload_bytes,
            *seals.arrays,
        )
        self._service = _io.MissService(
            cache.tables,
            mail,
            stored,
            None if engine is None else engine.native,
            engine is not None and engine.joined,
            files.deadline_s,
        )
        self.patience_s = 3 * files.deadline_s
        """Seconds after which a device that has no answer need not wait for one."""
        self._armed = self._closing = False
        self._errors = ThreadErrors(files.counters, "misses")
        self._lock = threading.Lock()
        self._step = 0
        self._ended: list[tuple[int, VerifiedRead, list[_Lent]]] = []
        """Reads of the thread that have ended since the last look, and the steps that they are
        of."""
        self._thread = threading.Thread(target=self._run, name="ssdkv-misses", daemon=True)
        self._thread.start()

    @property
    def answered(self) -> int:
        """Requests answered since the start."""
        return self._service.answered

    @property
    def room(self) -> int:
        """Distinct pages that a layer can get."""
        return min(self._most, self._cache.usable())

    def begin(self, slots: Sequence[NDArray[np.int64]]) -> int:
        """Begin a step whose rows have these slots. Waits for what is being read ahead.

        Returns:
            Number from which tickets of the step are counted; 0: nobody answers any more.
        """
        self._fetcher.settle(wait=True)
        self._step += 1
        self._settle()
        base = self._service.arm(list(slots), self._stripes())
        self._armed = base != 0
        return base

    def _stripes(self) -> _io.Stripes | None:
        """Placement by which native code reads first copies; None: others may be better."""
        files = self._files
        if files.health.any_avoided(Op.READ):
            return None
        better = files.replicas.any_suspect or files.speed.any_slow
        if better and files.placement.most_copies > 1:
            return None
        return files.placement.stripes

    def end(self) -> _io.Served | None:
        """End the step, and take in the outcome of its requests; None: it has not begun."""
        if not self._armed:
            return None
        self._armed = False
        served = self._service.disarm()
        health, read = self._files.health, np.array(served.bytes, dtype=np.int64)
        for device in np.flatnonzero(read).tolist():
            path = health.paths[device]
            self._files.counters.add("bytes_read", int(read[device]), device=path)
        health.answered(Op.READ, read > 0)
        for batch, device, length in served.overdue:
            health.judge(Op.READ, device, batch.results(), length, batch, again=False)
        self._settle()
        return served

    def release(self, places: NDArray[np.int32]) -> None:
        """The device does not read these places any more."""
        self._cache.release(places)

    def close(self) -> None:
        """End the threads. What the device asks for from now on has no answer."""
        self._closing = True
        self._service.close()
        self._thread.join(self.patience_s)

    def _settle(self) -> None:
        """Take in what the thread has read. Of a step that is over it has found nothing out: its
        slots may have been another's meanwhile."""
        with self._lock:
            ended, self._ended = self._ended, []
        for step, read, lent in ended:
            slots = read.extents.slots
            if step == self._step:
                self._fetcher.bad += np.unique(slots[read.bad]).tolist()
                self._fetcher.unread += np.unique(slots[read.unread]).tolist()
            for places, request in lent:
                self._cache.lend(places, request)

    # ---- the thread ----

    def _run(self) -> None:
        while not self._closing:
            work = self._service.next(_LOOK_S)
            if work is None:
                continue
            states = np.zeros(len(work[0]), dtype=np.uint8)
            devices = np.zeros(len(work[0]), dtype=np.uint16)
            with self._errors.swallowed("rows of a step are lost, and computed again"):
                self._read(*work, states, devices)
            self._service.answer(states, devices)

    def _read(
        self,
        keys: NDArray[np.int64],
        places: NDArray[np.int32],
        states: NDArray[np.uint8],
        devices: NDArray[np.uint16],
    ) -> None:
        """Read pages; what became of each, and its device, are written."""
        step, mine = self._step, self._fetcher.submit(keys, places)
        read = mine.read
        states[:], lent = _HELD, [(places, read.request)]
        try:
            states[:] = read.finish()
            devices[:] = mine.devices()
            holders = read.holders()
            lent = [(places[held], request) for request, held in holders]
            states[union(holders, len(states))] = _HELD
        finally:
            with self._lock:
                self._ended.append((step, read, lent))
