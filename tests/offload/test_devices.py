"""Devices by their protocol: order, errors, deadlines, work that is taken back, and the twins."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.kit.waiting import until
from tests.store.unhurried import PATIENCE_S
from vllm_ssdkv.base.errors import WithdrawnError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, PartialState, Rows
from vllm_ssdkv.kernels.step_clock import AttentionClock
from vllm_ssdkv.offload.host import HostDevice
from vllm_ssdkv.offload.offloader import Offloader, Outcome
from vllm_ssdkv.offload.protocol import ContextKernels, ContextWork, Lease
from vllm_ssdkv.offload.testing.throttled import ThrottledDevice
from vllm_ssdkv.offload.tickets import LocalTicket

QUERY = torch.zeros(3, 4, 8)


@dataclass
class Pages:
    """Pages whose attention is whatever a test wants; by default the state of one key."""

    attend: Callable[[PartialState], None] = lambda state: None
    nbytes: int = 1000
    selection_bytes: int = 0
    parts: int = 1
    threads: list[int] = field(default_factory=list)

    @property
    def slots(self) -> NDArray[np.int64]:
        return np.zeros(0, dtype=np.int64)

    def fold_by(
        self,
        kernels: ContextKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: object,
        lease: AbstractContextManager[None],
    ) -> None:
        del kernels, query, clock
        self.threads.append(threading.get_ident())
        for _ in range(self.parts):
            with lease:
                pass
            self.attend(state)
        state.m.fill_(0.0)
        state.l.fill_(1.0)
        state.acc.fill_(scale)

    def restart(self) -> None:
        pass


def work(pages: Pages, scale: float = 1.0) -> ContextWork:
    return ContextWork(QUERY, pages, scale)


def folded(made: Offloader, pages: Pages) -> tuple[Outcome, PartialState]:
    state = PartialState.empty(3, 4, 8, QUERY.device)
    return made.fold(made.submit(work(pages)), state), state


def test_any_number_in_flight_end_in_order() -> None:
    device = HostDevice(1)
    go = threading.Event()
    first = Pages(lambda _: go.wait(PATIENCE_S) and None)
    rest = [Pages() for _ in range(20)]
    tickets = [device.submit(work(pages, i)) for i, pages in enumerate([first, *rest])]
    assert not any(ticket.done() for ticket in tickets)
    assert not tickets[0].wait(0.01)
    go.set()
    assert tickets[-1].wait(PATIENCE_S)
    assert all(ticket.done() for ticket in tickets)
    assert [float(t.partials()[0].acc[0, 0, 0]) for t in tickets] == list(range(21))
    # All on one thread, which is not the caller's.
    used = {ident for pages in [first, *rest] for ident in pages.threads}
    assert len(used) == 1
    assert threading.get_ident() not in used
    assert device.statistics().tickets == 21
    assert device.close(PATIENCE_S)
    with pytest.raises(ValueError, match="closed"):
        device.submit(work(Pages()))


@pytest.mark.parametrize("threads", [1, 2])
def test_no_more_threads_than_asked_for(threads: int) -> None:
    """Neither kernels nor states have torch start a team of its own."""
    blocks, layout = 256, BlockLayout.unpadded(16, 16, 4, 64, torch.float32)
    query = torch.randn(64, 32, 64)
    cache = torch.randn(blocks, layout.block_bytes // 4)

    class Large(Pages):
        def fold_by(
            self,
            kernels: ContextKernels,
            query: torch.Tensor,
            state: PartialState,
            scale: float,
            clock: object,
            lease: AbstractContextManager[None],
        ) -> None:
            ids = np.arange(blocks)
            source = BlockSource.of_cache(cache, ids, ids * 16)
            begin = np.zeros(64)
            rows = Rows.build(np.arange(64), begin + 1, begin + 16 * blocks, begin, begin + blocks)
            kernels.dense.attend(query, state, rows, source, layout, scale)

    before = set(os.listdir("/proc/self/task"))
    device = HostDevice(threads)
    ticket = device.submit(ContextWork(query, Large(), 0.1))
    assert ticket.wait(PATIENCE_S)
    assert bool((ticket.partials()[0].l > 0).all())
    # Some of those before may be about to end.
    assert len(set(os.listdir("/proc/self/task")) - before) == threads
    assert device.close(PATIENCE_S)


def test_an_error_is_its_own_tickets() -> None:
    def fail(state: PartialState) -> None:
        raise KeyError("a page")

    device = HostDevice(1)
    wrong, right = device.submit(work(Pages(fail))), device.submit(work(Pages()))
    assert right.wait(PATIENCE_S)
    with pytest.raises(KeyError, match="a page"):
        wrong.partials()
    assert float(right.partials()[0].l.sum()) == 12
    assert device.close(PATIENCE_S)


def test_work_that_was_taken_back_is_not_begun() -> None:
    device = HostDevice(1)
    go = threading.Event()
    device.submit(work(Pages(lambda _: go.wait(PATIENCE_S) and None)))
    pages = Pages()
    waiting = device.submit(work(pages))
    assert waiting.withdraw(0.0)
    go.set()
    assert waiting.wait(PATIENCE_S)
    with pytest.raises(WithdrawnError):
        waiting.partials()
    assert pages.threads == []
    assert device.close(PATIENCE_S)


def test_nobody_enters_a_lease_that_was_withdrawn() -> None:
    lease = Lease()
    with lease:
        assert not lease.withdraw(0.01)  # somebody is inside
    assert lease.turns == 1
    assert lease.withdraw(0.01)
    with pytest.raises(WithdrawnError), lease:
        pytest.fail("entered")
    assert lease.withdraw(0.01)


def test_who_gets_on_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sign of progress begins it anew."""
    device = HostDevice(1)
    made = Offloader(device, 0.01, Counters())
    go_on = threading.Semaphore(0)
    wait, missed = LocalTicket.wait, []

    def wait_for_a_part(ticket: LocalTicket, timeout_s: float) -> bool:
        """Miss the deadline, in which the device has got on."""
        before = ticket.progress
        if wait(ticket, timeout_s):
            return True
        missed.append(before)
        go_on.release()
        until(lambda: ticket.done() or ticket.progress > before, "progress")
        return ticket.done()

    with monkeypatch.context() as patch:
        patch.setattr(LocalTicket, "wait", wait_for_a_part)
        pages = Pages(lambda _: go_on.acquire(timeout=PATIENCE_S) and None, parts=8)
        outcome, state = folded(made, pages)
    assert outcome is Outcome.FOLDED
    assert len(missed) >= 8
    assert float(state.l.sum()) == 12
    assert made.in_use
    # Amid a part without end the work is taken back, and the device does not see it any more.
    begun, pause = threading.Event(), threading.Event()
    pages = Pages(lambda _: begun.set() or (pause.wait(PATIENCE_S) and None))
    ticket = made.submit(work(pages))
    state = PartialState.empty(3, 4, 8, QUERY.device)
    assert begun.wait(PATIENCE_S)
    assert made.fold(ticket, state) is Outcome.TAKEN_BACK
    assert float(state.l.sum()) == 0
    assert not made.in_use
    assert not made.close(0.05)  # it may still read pages
    pause.set()
    assert device.close(PATIENCE_S)


def test_a_device_that_keeps_the_lease_loses_the_work() -> None:
    class Holding(Pages):
        def fold_by(
            self,
            kernels: ContextKernels,
            query: torch.Tensor,
            state: PartialState,
            scale: float,
            clock: object,
            lease: AbstractContextManager[None],
        ) -> None:
            with lease:
                held.set()
                pause.wait(PATIENCE_S)

    held, pause = threading.Event(), threading.Event()
    device, counters = HostDevice(1), Counters()
    made = Offloader(device, 0.05, counters)
    ticket = made.submit(work(Holding()))
    assert held.wait(PATIENCE_S)
    assert made.fold(ticket, PartialState.empty(3, 4, 8, QUERY.device)) is Outcome.LOST
    assert counters.total("offload_failures", cause="deadline") == 1
    pause.set()
    assert device.close(PATIENCE_S)


@pytest.mark.parametrize(("share", "elsewhere"), [(0.0, 0), (0.4, 0), (0.5, 1), (1.0, 1)])
def test_chosen_pages_go_one_way(share: float, elsewhere: int) -> None:
    made = Offloader(HostDevice(1), PATIENCE_S, counters := Counters(), share)
    pages = Pages()
    here: list[object] = []
    state = PartialState.empty(3, 4, 8, QUERY.device)
    clock = AttentionClock()

    def attend() -> bool:
        return made.attend(work(pages), state, here.append, clock)

    assert attend()
    assert (len(pages.threads), len(here)) == (elsewhere, 1 - elsewhere)
    made.count_step()
    by = "device" if elsewhere else "step"
    assert counters.total("offload_steps", by=by) == 1
    # While the device has contexts of the layer, nobody else uses the store.
    ticket = made.submit(work(Pages()))
    assert attend()
    assert len(pages.threads) == elsewhere + 1
    assert made.fold(ticket, state) is Outcome.FOLDED
    assert made.close(PATIENCE_S)


def test_chosen_pages_that_a_device_does_not_attend_to_are_attended_to_here() -> None:
    device = HostDevice(1)
    assert device.close(PATIENCE_S)
    made = Offloader(device, 1.0, Counters())
    pages, here = Pages(), []
    state = PartialState.empty(3, 4, 8, QUERY.device)
    clock = AttentionClock()
    assert made.attend(work(pages), state, here.append, clock)
    assert here == [pages]
    assert not made.in_use


def test_a_device_that_refuses_work_fails() -> None:
    device = HostDevice(1)
    assert device.close(PATIENCE_S)
    made = Offloader(device, 1.0, Counters())
    assert folded(made, Pages())[0] is Outcome.TAKEN_BACK
    assert not made.in_use


def test_a_throttled_device_answers_by_its_model() -> None:
    """Pieces of work occupy it one after the other; latencies occupy nobody."""
    now = [100.0]
    inner = HostDevice(1)
    device = ThrottledDevice(inner, 1000.0, 0.5, lambda: now[0])
    tickets = [device.submit(work(Pages(nbytes=2000))) for _ in range(2)]
    for ticket in tickets:
        ticket.wait(0.0)
    assert inner.submit(work(Pages())).wait(PATIENCE_S)  # both are done behind the model
    # Work took no time behind the model.
    counts = [ticket.statistics for ticket in tickets]
    assert [one.wait_s + one.attend_s for one in counts] == [pytest.approx(2.5), pytest.approx(4.5)]
    seen = []
    for later in (2.4, 2.6, 4.4, 4.6):
        now[0] = 100.0 + later
        seen.append([ticket.done() for ticket in tickets])
    assert seen == [[False, False], [True, False], [True, False], [True, True]]
    assert device.close(PATIENCE_S)
