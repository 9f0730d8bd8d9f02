"""A rank's device that attends, for as long as it is in use, and the fold of its answers.

The thread of the forward pass hands work in, attends to the window, and waits at the end of the
layer only. A device that raises, answers with something else than was asked for, or shows no
progress for its deadline is out of use from then on. Its work is taken back and done by the waiting
thread, with the same result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.exact import NO_LEASE, LayerContext, StreamedContext
from vllm_ssdkv.base.metrics import Counters, counter_key
from vllm_ssdkv.kernels.dense import AttentionKernels, select_kernels
from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.kernels.paged import select_page_kernels
from vllm_ssdkv.kernels.step_clock import WAIT, StepClock
from vllm_ssdkv.offload.protocol import (
    ContextDevice,
    ContextKernels,
    ContextWork,
    DeviceCaps,
    Foldable,
    Ticket,
)
from vllm_ssdkv.offload.share_rule import Attended
from vllm_ssdkv.offload.sharing import Sharing
from vllm_ssdkv.offload.tickets import LocalTicket

logger = logging.getLogger(__name__)

Cause = Literal["error", "answer", "deadline"]

Here = Callable[[Foldable], None]
"""Attends to pages on the thread of the forward pass, into the state of the layer."""

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
        device: The device.
        failed: Whether it is out of use; it stays so.
        busy: Pieces of work that were handed in, and are not folded yet.
        sharing: How much is the device's.
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
        self.device = device
        self.caps: DeviceCaps = device.caps
        self._deadline_s = deadline_s + self.caps.silent_s
        self._counters = counters
        self._gains = [0.0] * len(KEYS)
        self.sharing = Sharing(1.0 if self.caps.elsewhere else share, counters)
        self.busy = 0
        self.failed = False
        for cause in ("error", "answer", "deadline"):
            counters.add("offload_failures", 0, cause=cause)
        self._told_in_use = -1
        self._tell_in_use()

    @property
    def in_use(self) -> bool:
        """Check whether there is anything that attends."""
        return self._tell_in_use() > 0

    def _tell_in_use(self) -> int:
        here = 0 if self.failed else self.device.in_use
        if here != self._told_in_use:
            self._told_in_use = here
            self._counters.set("offload_in_use", here)
        return here

    def takes(self, tokens: int) -> bool:
        """Check whether a step of so many query tokens is handed in."""
        most = self.caps.max_tokens
        return self.in_use and (most is None or tokens <= most)

    def context(
        self, streamed: StreamedContext, requests: Sequence[str], lose: Callable[[], None]
    ) -> LayerContext:
        """Contexts of a layer of a step that is handed in; see :class:`OffloadedContext`."""
        if self.failed and not self.caps.elsewhere:
            streamed.stream.come_checked()
            return streamed
        return OffloadedContext(streamed, self, requests, lose)

    def submit(self, work: ContextWork) -> Ticket:
        """Hand in work; does not block. A device that refuses it fails as if it had answered so."""
        begin = time.perf_counter()
        try:
            ticket = self.device.submit(work)
        except Exception as error:  # noqa: BLE001  # whoever waits has it
            ticket = refused = LocalTicket(work)
            refused.fail(error)
        self.busy += 1
        self._gains[6] += time.perf_counter() - begin
        return ticket

    def fold(self, ticket: Ticket, state: PartialState) -> Outcome:
        """Wait for the work, and fold its states into ``state``."""
        self.busy -= 1
        ended, gains, counts = self._wait(ticket), self._gains, ticket.statistics
        gains[0] += counts.tickets
        gains[1] += counts.query_bytes
        gains[2] += counts.selection_bytes
        if not ended:
            return self._give_up("deadline", f"no progress in {self._deadline_s:g} s", ticket)
        begin = time.perf_counter()
        try:
            parts = ticket.partials()
        except Exception as error:  # noqa: BLE001  # counted, and told
            return self._give_up("error", repr(error), ticket, error)
        kernels = select_kernels(state.acc.device)
        try:
            # All before the first is folded: of work that is taken back nothing is in the state.
            for part in parts:
                part.check(tuple(state.acc.shape), part.acc.device)
            for part in parts:
                kernels.merge(state, part)
        except ValueError as error:
            return self._give_up("answer", str(error), ticket)
        gains[3] += counts.partial_bytes
        gains[4] += counts.wait_s
        gains[5] += counts.attend_s
        gains[6] += time.perf_counter() - begin
        return Outcome.FOLDED

    def finish(self, ticket: Ticket, state: PartialState, here: Here, clock: StepClock) -> Outcome:
        """Fold all of some work: what the device left to ``here`` from the start, what it attended
        to, and what it did not attend to after all. Work that is taken back is done ``here``."""
        if ticket.own is not None:
            here(ticket.own)
        outcome = self.fold(ticket, state)
        clock.lap(WAIT)
        if outcome is Outcome.TAKEN_BACK:
            ticket.taken.restart()
            here(ticket.taken)
        elif outcome is Outcome.FOLDED and (left := ticket.left()) is not None:
            here(left)
        return outcome

    def attend(self, work: ContextWork, state: PartialState, here: Here, clock: StepClock) -> bool:
        """Have the device attend to chosen pages, or ``here``, whichever is to. False: the device
        does not give them back."""
        begin = time.perf_counter()
        # Who has contexts of the layer may use the store, and nobody else meanwhile.
        bound = self.busy > 0
        theirs = not self.failed and (bound or self.sharing.pages.share >= 0.5)
        outcome = Outcome.FOLDED
        if theirs:
            outcome = self.finish(self.submit(work), state, here, clock)
        else:
            here(work.pages)
        if not bound and not self.caps.elsewhere:
            seconds, nbytes = time.perf_counter() - begin, work.pages.nbytes
            self.sharing.pages.note(
                Attended(nbytes, nbytes if theirs else 0, seconds, seconds, seconds)
            )
        return outcome is not Outcome.LOST

    def reclaim(self, slots: NDArray[np.int64]) -> None:
        """Slots get other bytes, see ``ContextDevice``."""
        if not self.failed:
            self.device.reclaim(slots)

    def count_stored(self, nbytes: int) -> None:
        """New K and V has gone to where the device reads it."""
        if not self.failed:
            self._counters.add("offload_bytes", nbytes, payload="kv")

    def count_step(self) -> None:
        """A step with contexts has ended."""
        self.device.end_step()
        nbytes, theirs = self.sharing.end_step()
        handed_in = self._gains[0] > 0
        by = "step" if not handed_in else "both" if theirs < nbytes else "device"
        self._counters.add("offload_steps", by=by)
        self._counters.add_keyed(KEYS, self._gains)
        self._gains = [0.0] * len(KEYS)

    def close(self, timeout_s: float) -> bool:
        """End the device; False: it may still read pages."""
        counts = self.device.statistics()
        logger.info("ssdkv: offload: the %s device ends: %s", self.device.name, counts)
        if self.device.close(timeout_s):
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
        if not self.failed:
            self.failed = True
            self._tell_in_use()
            logger.error(
                "ssdkv: offload: the %s device is out of use until the engine starts again: %s; "
                "contexts are attended to without it",
                self.device.name,
                text,
                exc_info=error,
            )
        if back:
            return Outcome.TAKEN_BACK
        logger.error(
            "ssdkv: offload: the %s device holds the pages of this step, whose requests are "
            "computed again",
            self.device.name,
        )
        return Outcome.LOST


@dataclass(slots=True)
class OffloadedContext:
    """Contexts of a layer that a device attends to, or to a part of. See ``LayerContext``.

    Attributes:
        streamed: The same, attended to by who folds them.
        offloader: Of the rank.
        requests: See ``ContextWork``.
        lose: Called when the device does not give them back.
    """

    streamed: StreamedContext
    offloader: Offloader
    requests: Sequence[str]
    lose: Callable[[], None]
    _theirs: StreamedContext | None = None
    _own: StreamedContext | None = None
    _ticket: Ticket | None = None
    _began: float = 0.0

    def begin(self, query: torch.Tensor, scale: float) -> None:
        """See ``LayerContext``."""
        self._began = time.perf_counter()
        made = self.offloader
        share = None if made.caps.elsewhere else made.sharing.contexts.share
        self._theirs, self._own = self.streamed.cut(share)
        if self._theirs.pairs and not made.failed:
            self._ticket = made.submit(ContextWork(query, self._theirs, scale, self.requests))

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

        def here(pages: Foldable) -> None:
            every = ContextKernels(kernels, select_page_kernels(query.device))
            pages.fold_by(every, query, state, scale, clock, NO_LEASE)

        if own.pairs:
            own.fold(kernels, query, state, scale, clock)
        step_s = time.perf_counter() - self._began
        seconds, device_s = step_s, 0.0
        if ticket is not None:
            early = ticket.done()
            if self.offloader.finish(ticket, state, here, clock) is Outcome.LOST:
                self.lose()
            seconds = time.perf_counter() - self._began
            counts = ticket.statistics
            device_s = counts.wait_s + counts.attend_s if early else seconds
        elif theirs.pairs:  # the device has failed since the step began
            theirs.restart()
            theirs.fold(kernels, query, state, scale, clock)
        if not self.offloader.caps.elsewhere:
            per_block = self.streamed.block_bytes
            nbytes = (own.pairs + theirs.pairs) * per_block
            self.offloader.sharing.contexts.note(
                Attended(nbytes, theirs.pairs * per_block, seconds, step_s, device_s)
            )
