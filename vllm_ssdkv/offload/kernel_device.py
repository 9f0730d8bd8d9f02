"""Devices whose kernels read pages in memory of the host: frames, and pages as drives deliver them.

One thread takes tickets in order, and calls the kernels. It brings pages by the step's own stream,
so all that holds there holds here: read-ahead, verification, the other copy, poisoned rows.
"""

from __future__ import annotations

import logging
import os
import queue
import threading

from vllm_ssdkv.base.host import nearby_cpus
from vllm_ssdkv.kernels.step_clock import ATTEND, WAIT, AttentionClock
from vllm_ssdkv.offload.protocol import (
    ContextDeviceClass,
    ContextKernels,
    ContextWork,
    DeviceStatistics,
)
from vllm_ssdkv.offload.tickets import LocalTicket, PinnedQuery, empty_state

logger = logging.getLogger(__name__)

_Job = tuple[LocalTicket, PinnedQuery | None]


class KernelDevice(ContextDeviceClass):
    """See ``ContextDevice``; its tickets end in the order in which they were handed in.

    Example:
        device = KernelDevice("host", ContextKernels(CpuKernels(8), CpuPageKernels(8)))
        ticket = device.submit(ContextWork(query, pages, scale))
    """

    def __init__(self, name: str, kernels: ContextKernels):
        """Start its thread, on the CPUs of the NUMA node that the calling thread is bound to.

        Args:
            name: See ``ContextDevice``.
            kernels: Called by its thread alone.
        """
        self.name = name
        self._kernels = kernels
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._counts = DeviceStatistics()
        self._cpus = nearby_cpus(os.sched_getaffinity(0))
        # A thread that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name="ssdkv-offload", daemon=True)
        self._thread.start()

    def submit(self, work: ContextWork) -> LocalTicket:
        """See ``ContextDevice``.

        Raises:
            ValueError: it is closed.
        """
        if self._closed:
            raise ValueError("the device is closed")
        ticket = LocalTicket(work)
        self._jobs.put((ticket, PinnedQuery(work.query) if work.query.is_cuda else None))
        return ticket

    def statistics(self) -> DeviceStatistics:
        """See ``ContextDevice``."""
        with self._lock:
            return self._counts

    def close(self, timeout_s: float) -> bool:
        """See ``ContextDevice``; work that was handed in before is done."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            os.sched_setaffinity(0, self._cpus)
        except OSError as error:
            logger.warning("ssdkv: offload: threads stay where the step's are: %s", error)
        while (job := self._jobs.get()) is not None:
            self._attend(*job)
            del job

    def _attend(self, ticket: LocalTicket, query: PinnedQuery | None) -> None:
        clock = AttentionClock()
        clock.start()
        work = ticket.work
        try:
            with ticket.lease:  # not if it was withdrawn meanwhile
                state = empty_state(work.query)
            here = work.query if query is None else query.wait()
            work.pages.fold_by(self._kernels, here, state, work.scale, clock, ticket.lease)
        except Exception as error:  # noqa: BLE001  # whoever waits has it
            ticket.fail(error)
            return
        seconds = clock.seconds
        ticket.seconds = seconds[WAIT], seconds[ATTEND]
        with self._lock:
            self._counts += ticket.statistics
        ticket.answer(state)
