"""A rank's device that attends, for as long as it is in use, and the fold of its answers.

The thread of the forward pass hands work in, attends to the window, and waits at the end of the
layer only. A device that raises, answers with something else than was asked for, or shows no
progress for its deadline is out of use from then on. Its work is taken back and done by the waiting
thread, with the same result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.exact import StreamedContext
from vllm_ssdkv.base.metrics import Counters, counter_key
from vllm_ssdkv.kernels.dense import AttentionKernels, select_kernels
from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.kernels.step_clock import MERGE, WAIT, StepClock
from vllm_ssdkv.offload.protocol import ContextDevice, ContextWork, Ticket
from vllm_ssdkv.offload.share_rule import Attended
from vllm_ssdkv.offload.sharing import Sharing
from vllm_ssdkv.offload.tickets import LocalTicket
from vllm_ssdkv.store.read.peer_path import ReadPath

logger = logging.getLogger(__name__)

Cause = Literal["error", "answer", "deadline"]

KEYS: Final[tuple[str, ...]] = (
    counter_key("offload_tickets"),
    counter_key("offload_bytes", payload="query"),
    counter_key("offload_bytes", payload="selection"),
    counter_key("offload_bytes", payload="partials"),
    counter_key("offload_seconds", part="wait"),
    counter_key("offload_seconds", part="attend"),
    counter_key("offload_step_seconds"),
)


class Outcome(Enum):
    """End of work that was handed in.

    ``FOLDED``: its states are in the state. ``TAKEN_BACK``: they are not, and the caller attends.
    ``LOST``: they are not, and the device may use the store: its rows cannot be attended to.
    """

    FOLDED = auto()
    TAKEN_BACK = auto()
    LOST = auto()


class Offloader:
    """Hands work to a device and folds its answers. Used by the thread of the forward pass.

    Attributes:
        in_use: Whether the device is; once it is not, it never is again.
        busy: Pieces of work that were handed in, and are not folded yet.
        sharing: How much is the device's.
        peer: Path of pages into the device's memory; None: they come through the host's.
    """

    def __init__(
        self,
        device: ContextDevice,
        deadline_s: float,
        counters: Counters,
        share: float | Literal["auto"] = 1.0,
    ):
        """``deadline_s``: for each sign of progress, longer than any wait for I/O; ``share``: see
        :class:`Sharing`."""
        self._device = device
        self._deadline_s = deadline_s
        self._counters = counters
        self._gains = [0.0] * len(KEYS)
        self.sharing = Sharing(share, counters)
        self.peer: ReadPath | None = None
        self.busy = 0
        self.in_use = True
        for cause in ("error", "answer", "deadline"):
            counters.add("offload_failures", 0, cause=cause)
        counters.set("offload_in_use", 1)

    def submit(self, work: ContextWork) -> Ticket:
        """Hand in work; does not block. A device that refuses it fails as if it had answered so."""
        begin = time.perf_counter()
        try:
            ticket = self._device.submit(work)
        except Exception as error:  # noqa: BLE001  # whoever waits has it
            ticket = refused = LocalTicket(work)
            refused.fail(error)
        gains = self._gains
        self.busy += 1
        gains[0] += 1
        gains[1] += work.query.nbytes * ticket.devices
        gains[2] += work.pages.selection_bytes
        gains[6] += time.perf_counter() - begin
        return ticket

    def fold(self, ticket: Ticket, state: PartialState) -> Outcome:
        """Wait for the work, and fold its states into ``state``."""
        self.busy -= 1
        if not self._wait(ticket):
            return self._give_up("deadline", f"no progress in {self._deadline_s:g} s", ticket)
        begin = time.perf_counter()
        try:
            part = ticket.partials()
        except Exception as error:  # noqa: BLE001  # counted, and told
            return self._give_up("error", repr(error), ticket, error)
        try:
            select_kernels(state.acc.device).merge(state, part)
        except ValueError as error:
            return self._give_up("answer", str(error), ticket)
        wait_s, attend_s = ticket.seconds
        gains = self._gains
        gains[3] += (part.acc.nbytes + 2 * part.m.nbytes) * ticket.devices
        gains[4] += wait_s
        gains[5] += attend_s
        gains[6] += time.perf_counter() - begin
        return Outcome.FOLDED

    def attend(self, work: ContextWork, state: PartialState, clock: StepClock) -> Outcome:
        """Hand in work and wait for it."""
        outcome = self.fold(self.submit(work), state)
        clock.lap(WAIT)
        return outcome

    def attend_or(
        self, here: Callable[[], None], work: ContextWork, state: PartialState, clock: StepClock
    ) -> Outcome:
        """Have the device attend, or ``here``, whichever is to. Work that is taken back is done."""
        begin = time.perf_counter()
        # Who has contexts of the layer may use the store, and nobody else meanwhile.
        bound = self.busy > 0
        theirs = bound or self.sharing.pages.share >= 0.5
        outcome = self.attend(work, state, clock) if theirs else Outcome.TAKEN_BACK
        if outcome is Outcome.TAKEN_BACK:
            here()
            outcome = Outcome.FOLDED
        if not bound:
            seconds, nbytes = time.perf_counter() - begin, work.pages.nbytes
            self.sharing.pages.note(
                Attended(nbytes, nbytes if theirs else 0, seconds, seconds, seconds)
            )
        return outcome

    def reclaim(self, slots: NDArray[np.int64]) -> None:
        """Slots get other bytes, see ``ContextDevice``."""
        if self.in_use:
            self._device.reclaim(slots)

    def count_stored(self, nbytes: int) -> None:
        """New K and V has gone to where the device reads it."""
        if self.in_use:
            self._counters.add("offload_bytes", nbytes, payload="kv")

    def count_step(self) -> None:
        """A step with contexts has ended."""
        nbytes, theirs = self.sharing.end_step()
        handed_in = self._gains[0] > 0
        by = "step" if not handed_in else "both" if theirs < nbytes else "device"
        self._counters.add("offload_steps", by=by)
        self._counters.add_keyed(KEYS, self._gains)
        self._gains = [0.0] * len(KEYS)

    def close(self, timeout_s: float) -> bool:
        """End the device; False: it may still read pages."""
        counts = ", ".join(f"{name} {n:.6g}" for name, n in self._device.statistics().items())
        logger.info("ssdkv: offload: the %s device ends: %s", self._device.name, counts)
        if self._device.close(timeout_s):
            return True
        logger.error("ssdkv: offload: a thread is still at work; the memory of the store stays")
        return False

    def _wait(self, ticket: Ticket) -> bool:
        progress = -1
        while not ticket.wait(self._deadline_s):
            if ticket.progress == progress:
                return False
            progress = ticket.progress
        return True

    def _give_up(
        self, cause: Cause, text: str, ticket: Ticket, error: Exception | None = None
    ) -> Outcome:
        """The device is out of use; see whether the work can be done elsewhere."""
        back = ticket.withdraw(self._deadline_s)
        self._counters.add("offload_failures", cause=cause)
        if self.in_use:
            self.in_use = False
            self._counters.set("offload_in_use", 0)
            logger.error(
                "ssdkv: offload: the %s device is out of use until the engine starts again: %s; "
                "contexts are attended to without it",
                self._device.name,
                text,
                exc_info=error,
            )
        if back:
            return Outcome.TAKEN_BACK
        logger.error(
            "ssdkv: offload: the %s device holds the pages of this step, whose requests are "
            "computed again",
            self._device.name,
        )
        return Outcome.LOST


@dataclass(slots=True)
class OffloadedContext:
    """Contexts of a layer that a device attends to, or to a part of. See ``LayerContext``.

    Attributes:
        streamed: The same, attended to by who folds them.
        offloader: Of the rank.
        lose: Called when the device does not give them back.
    """

    streamed: StreamedContext
    offloader: Offloader
    lose: Callable[[], None]
    _theirs: StreamedContext | None = None
    _own: StreamedContext | None = None
    _ticket: Ticket | None = None
    _began: float = 0.0

    def begin(self, query: torch.Tensor, scale: float) -> None:
        """See ``LayerContext``."""
        self._began = time.perf_counter()
        self._theirs, self._own = self.streamed.cut(self.offloader.sharing.contexts.share)
        if self._theirs.pairs:
            self._ticket = self.offloader.submit(ContextWork(query, self._theirs, scale))

    def fold(
        self,
        kernels: AttentionKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
    ) -> None:
        """See ``LayerContext``.

        Raises:
            RuntimeError: it was not begun.
        """
        theirs, own, ticket = self._theirs, self._own, self._ticket
        if theirs is None or own is None:
            raise RuntimeError("there is nothing to fold: begin() comes first")
        if own.pairs:
            own.fold(kernels, query, state, scale, clock)
        step_s = time.perf_counter() - self._began
        seconds, device_s = step_s, 0.0
        if ticket is not None:
            early = ticket.done()
            outcome = self.offloader.fold(ticket, state)
            clock.lap(WAIT if outcome is not Outcome.FOLDED else MERGE)
            if outcome is Outcome.TAKEN_BACK:
                theirs.restart()
                theirs.fold(kernels, query, state, scale, clock)
            elif outcome is Outcome.LOST:
                self.lose()
            seconds = time.perf_counter() - self._began
            device_s = sum(ticket.seconds) if early else seconds
        per_block = self.streamed.block_bytes
        nbytes = (own.pairs + theirs.pairs) * per_block
        self.offloader.sharing.contexts.note(
            Attended(nbytes, theirs.pairs * per_block, seconds, step_s, device_s)
        )
