"""Drives of the papers as twins: their times by hand, and attention to parts of the pages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.store.unhurried import PATIENCE_S
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.offload import DriveProfile, OffloadConfig
from vllm_ssdkv.kernels.dense import CpuKernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, PartialState, Rows
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.offload.host import HostDevice
from vllm_ssdkv.offload.offloader import Offloader, Outcome
from vllm_ssdkv.offload.open import open_offloader
from vllm_ssdkv.offload.protocol import ContextKernels, ContextWork, DeviceSetup
from vllm_ssdkv.offload.testing.drive_timing import DRIVES, DriveTiming
from vllm_ssdkv.offload.testing.flash import BLOCK_BYTES, ERASE_S, FlashTiming
from vllm_ssdkv.offload.testing.throttled_drives import ThrottledDrives

LAYOUT = BlockLayout.unpadded(16, 16, 2, 128, torch.bfloat16)
"""Pages of 8 KiB: two of flash."""
HEADS, BLOCKS = 4, 11
SLOW = DriveTiming(
    FlashTiming(channels=2, dies=2, page_bytes=4096, read_s=3.5, channel_bandwidth=8192.0),
    latency_s=5.0,
    attend_bandwidth=None,
    write_bandwidth=4096.0,
    link_bandwidth=1.0,
)
"""A page takes a channel two seconds: its die four, of which there are two. A write takes one."""


class Contexts:
    """Contexts of two rows, the second half as long, in whole or some pages of it."""

    def __init__(self, *, listed: bool):
        torch.manual_seed(0)
        self.cache = torch.randn(2 * BLOCKS, LAYOUT.block_bytes // 2).to(torch.bfloat16)
        self.query = torch.randn(2, HEADS, LAYOUT.head_size)
        self.listed = listed
        self.selection_bytes = 0
        index = [*range(BLOCKS), *range(BLOCKS // 2)]
        self.ids = np.arange(len(index))
        self.position = np.array(index, dtype=np.int64) * LAYOUT.block_tokens
        self.edges = np.array([0, BLOCKS, len(index)])
        self.last = np.array([BLOCKS, BLOCKS // 2], dtype=np.int64) * LAYOUT.block_tokens

    @property
    def slots(self) -> NDArray[np.int64]:
        return self.ids

    @property
    def nbytes(self) -> int:
        return len(self.ids) * LAYOUT.block_bytes

    @property
    def pages(self) -> PageList:
        """Every page of the even blocks, and of head 0 every page."""
        base = self.cache.data_ptr() + self.ids * LAYOUT.block_bytes
        address, position, begin, end = [], [], [], []
        for row in range(2):
            mine = np.arange(self.edges[row], self.edges[row + 1])
            for head in range(LAYOUT.kv_heads):
                those = mine if head == 0 else mine[self.position[mine] // 16 % 2 == 0]
                begin.append(sum(map(len, address)))
                address.append(base[those] + head * LAYOUT.page_stride_bytes)
                position.append(self.position[those])
                end.append(begin[-1] + len(those))
        return PageList(
            np.arange(2, dtype=np.int32),
            self.last,
            np.array(begin, dtype=np.int32),
            np.array(end, dtype=np.int32),
            np.concatenate(address).astype(np.uint64),
            np.concatenate(position),
        )

    def fold_by(
        self,
        kernels: ContextKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: object,
        lease: AbstractContextManager[None],
    ) -> None:
        del clock, lease
        if self.listed:
            kernels.paged.attend_pages(query, state, self.pages, LAYOUT, scale)
            return
        rows = Rows.build([0, 1], [1, 1], self.last, self.edges[:-1], self.edges[1:])
        source = BlockSource.of_cache(self.cache, self.ids, self.position)
        kernels.dense.attend(query, state, rows, source, LAYOUT, scale)

    def restart(self) -> None:
        pass


class Reclaiming(HostDevice):
    """Keeps the slots that it is told of."""

    reclaimed: tuple[int, ...] = ()

    def reclaim(self, slots: NDArray[np.int64]) -> None:
        self.reclaimed = (*self.reclaimed, *slots.tolist())


class Counting(ThrottledDrives):
    """Tells how many pages of flash each drive reads from each channel."""

    def __init__(self, inner: HostDevice, timing: DriveTiming, drives: int):
        super().__init__(inner, timing, drives)
        self.seen: list[NDArray[np.int64]] = []

    def occupy(self, begun: float, pages: NDArray[np.int64]) -> float:
        self.seen.append(pages)
        return super().occupy(begun, pages)


def attended(made: Offloader, contexts: Contexts) -> torch.Tensor:
    """Output over the contexts."""
    state = PartialState.empty(*contexts.query.shape, contexts.query.device)
    work = ContextWork(contexts.query, contexts, LAYOUT.head_size**-0.5)
    assert made.fold(made.submit(work), state) is Outcome.FOLDED
    out = torch.empty_like(contexts.query)
    CpuKernels(1).finish(state, out)
    return out


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("drives", [1, 2, 3, 8])
def test_drives_attend_to_their_parts(drives: int, listed: bool) -> None:
    contexts, host, counters = Contexts(listed=listed), HostDevice(1), Counters()
    want = attended(Offloader(host, 30.0, Counters()), contexts)
    device = Counting(HostDevice(1), DRIVES["instinfer"], drives)
    made = Offloader(device, 30.0, counters)
    got = attended(made, contexts)
    assert torch.allclose(got, want, atol=1e-5)
    # A page of KV is one of flash of K and one of V; each head and both sides begin elsewhere.
    want_pages = np.zeros((drives, 8), np.int64)
    for head, i in itertools.product((0, 1), (*range(BLOCKS), *range(BLOCKS // 2))):
        if head == 0 or not listed or i % 2 == 0:
            for side in (0, 1):
                want_pages[i % drives, (i // drives + 2 * head + side) % 8] += 1
    assert len(device.seen) == 1
    assert device.seen[0].tolist() == want_pages.tolist()
    # Each drive gets the queries, and sends states of its own.
    made.count_step()
    q, d = HEADS, LAYOUT.head_size
    assert counters.total("offload_bytes", payload="query") == drives * 2 * 4 * q * d
    assert counters.total("offload_bytes", payload="partials") == drives * 2 * q * (4 * d + 8)
    assert made.close(PATIENCE_S)
    assert host.close(PATIENCE_S)


@pytest.mark.parametrize(("listed", "pages"), [(False, 2 * BLOCKS), (True, BLOCKS + 6)])
def test_a_block_that_rows_share_is_read_once(listed: bool, pages: int) -> None:
    contexts = Contexts(listed=listed)
    contexts.ids[BLOCKS:] = contexts.ids[: BLOCKS // 2]
    device = Counting(HostDevice(1), DRIVES["instinfer"], 1)
    ticket = device.submit(ContextWork(contexts.query, contexts, 1.0))
    assert ticket.wait(PATIENCE_S)
    assert device.seen[0].sum() == 2 * pages
    assert device.close(PATIENCE_S)


def test_times_of_the_papers_drives() -> None:
    assert set(DRIVES) == set(get_args(DriveProfile))
    one = DRIVES["instinfer"]
    # A page of 4 KiB on one of eight channels of eight dies.
    assert one.read_bandwidth == one.flash.bandwidth
    assert one.attend_s(1) == one.attend_s(8) == one.flash.page_s
    assert one.attend_s(9) == 2 * one.flash.page_s
    assert one.attend_pages_s([3, 0, 0, 5, 0, 0, 0, 0]) == 5 * one.flash.page_s
    assert one.flash_pages(1) == one.flash_pages(4096) == 1
    assert one.flash_pages(4097) == 2
    # A context of 4,096 tokens, 8 KiB per token and layer: 32 MiB.
    assert one.attend_s(8192) == pytest.approx(32 * 2**20 / one.read_bandwidth)
    smart = DRIVES["smartssd"]
    assert smart.read_bandwidth == pytest.approx(3.0e9)
    assert smart.attend_s(3) == pytest.approx(3 * 4096 / 3.0e9)
    assert smart.read_bandwidth / smart.link_bandwidth == pytest.approx(3)
    # 16 pages are programmed side by side in 185 us.
    assert smart.write_s(16) == pytest.approx(185e-6)
    assert one.write_s(8) == pytest.approx(8 * 4096 / 2.15e9)
    # Where the engine is slower than the flash, it is the limit.
    slow = DriveTiming(one.flash, 0.0, 1e9, 1.0, 1.0)
    assert slow.attend_s(1000) == pytest.approx(4.096e-3)
    assert slow.attend_pages_s([125] * 8) == pytest.approx(4.096e-3)
    assert slow.read_bandwidth == 1e9


def test_the_last_drive_ends_the_work() -> None:
    now = [100.0]
    device = ThrottledDrives(HostDevice(1), SLOW, 2, dilation=3.0, clock=lambda: now[0])
    # Four pages on two channels: two turns of 2 s; slower by three; then the latency.
    assert device.occupy(100.0, by_channel([2, 2], [1, 1])) == 100.0 + 3 * (4 + 5)
    # Drive 0 is occupied until 112, drive 1 until 106; latencies occupy nobody. The channel with
    # the most pages ends last.
    assert device.occupy(100.0, by_channel([0, 0], [3, 1])) == 106.0 + 3 * (6 + 5)
    assert device.occupy(100.0, by_channel([1, 1], [0, 0])) == 112.0 + 3 * (2 + 5)
    # A write of three pages: two on each drive at most, behind what they do.
    device.write(3)
    assert device.occupy(100.0, by_channel([1, 1], [0, 0])) == 118.0 + 6 + 3 * (2 + 5)
    assert device.occupy(1e4, by_channel([0, 0], [0, 0])) == 1e4
    assert device.statistics().late == 0
    now[0] = 1e5
    device.occupy(100.0, by_channel([1, 0], [1, 0]))
    assert device.statistics().late == 1
    assert device.close(PATIENCE_S)


def by_channel(*pages: Sequence[int]) -> NDArray[np.int64]:
    return np.array(pages, np.int64)


def test_slots_that_get_other_bytes_are_erased_in_idle_time() -> None:
    """Nothing waits for an erase that has not begun; one that has is ended."""
    now, one, none = [100.0], [1, 0], [0, 0]
    inner = Reclaiming(1)
    device = ThrottledDrives(inner, SLOW, 2, 2.0, clock=lambda: now[0], slot_bytes=BLOCK_BYTES)
    # Four blocks for each of two drives, whose four dies erase one each, in twice as long.
    busy, turn = 2 * (2 + 5), 2 * ERASE_S
    assert device.occupy(100.0, by_channel(one, one)) == 100.0 + busy
    device.reclaim(np.arange(8))
    assert [erasure.stale for erasure in device.erasures] == [4, 4]
    # Until 104 drives are busy: work that comes then waits for no erase.
    assert device.occupy(104.0, by_channel(one, none)) == 104.0 + busy
    # Drive 1 fell idle at 104, and erases when the work comes, a quarter of a turn later.
    came = 104.0 + turn / 4
    assert device.occupy(came, by_channel(none, one)) == pytest.approx(104.0 + turn + busy)
    assert [erasure.erased for erasure in device.erasures] == [0, 4]
    # Nothing is left to erase, and a long idle time has ended all there was.
    assert device.occupy(300.0, by_channel(one, one)) == 300.0 + busy
    assert [erasure.erased for erasure in device.erasures] == [4, 4]
    # Idle time before a slot was given up erases nothing of it.
    now[0] = 500.0
    device.reclaim(np.arange(8, 16))
    assert device.occupy(500.0 + turn / 4, by_channel(one, none)) == pytest.approx(
        500.0 + turn + busy
    )
    assert inner.reclaimed == (*range(16),)
    assert device.close(PATIENCE_S)


def test_an_answer_waits_for_the_model() -> None:
    contexts, now, inner = Contexts(listed=False), [100.0], HostDevice(1)
    device = ThrottledDrives(inner, SLOW, 2, clock=lambda: now[0])
    work = ContextWork(contexts.query, contexts, 1.0)
    ticket = device.submit(work)
    assert inner.submit(work).wait(PATIENCE_S)  # the other is done behind the model
    # 16 blocks of 2 pages of KV, 9 of them on the first drive: 36 pages on two channels.
    due = 100.0 + 18 * 2 + 5
    now[0] = due - 0.1
    assert not ticket.done()
    now[0] = due + 0.1
    assert ticket.wait(PATIENCE_S)
    assert ticket.statistics.query_bytes == 2 * contexts.query.nbytes
    assert device.close(PATIENCE_S)


def test_an_option_names_the_drives() -> None:
    throttle = {"profile": "smartssd", "drives": 3, "dilation": 2}
    options = {"mode": "page", "offload": {"threads": 1, "throttle": throttle}}
    parsed = SSDKVConfig.from_extra_config(options)
    config = parsed.offload
    assert isinstance(config, OffloadConfig)
    contexts, counters = Contexts(listed=False), Counters()
    none: Any = None
    opened: Any = SimpleNamespace(
        files=SimpleNamespace(geometry=SimpleNamespace(slot_bytes=2 * BLOCK_BYTES))
    )
    setup = DeviceSetup(
        parsed,
        config,
        counters,
        0,
        1,
        LAYOUT,
        LAYOUT.kv_heads,
        opened=opened,
        checksums=none,
        drives=none,
    )
    made = open_offloader(setup, 30.0)
    assert bool((attended(made, contexts) != 0).all())
    made.count_step()
    nbytes = contexts.query.nbytes
    assert counters.total("offload_bytes", payload="query") == 3 * nbytes
    made.reclaim(np.arange(6))
    device = made.device
    assert isinstance(device, ThrottledDrives)
    assert [erasure.stale for erasure in device.erasures] == [4, 4, 4]
    assert made.close(PATIENCE_S)
