"""Division of DRAM: sizes that are given are used, and sizes that do not fit are told."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.conftest import OPAQUE, SHAPES
from vllm_ssdkv.base.errors import ConfigError, DramTooSmallError
from vllm_ssdkv.base.sizes import MIB, parse_size
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry
from vllm_ssdkv.store.memory.memory_plan import (
    MIN_FRAMES,
    PROBE_BYTES,
    PROBES,
    STAGING,
    FrameRuns,
    MemoryPlan,
    SparseMemory,
)
from vllm_ssdkv.store.memory.summary_rows import ChannelTier, with_summaries

KV = SlotGeometry("paged", 4, 8, 1, 8192)
BOUNDS = with_summaries(KV, 16, channels=False)


@given(geometry=SHAPES, staging=st.integers(0, 1 << 24), frames=st.integers(0, 40))
def test_the_plan_uses_what_it_was_given(geometry: SlotGeometry, staging: int, frames: int) -> None:
    least = MemoryPlan(geometry, 1 << 50, staging).frame_offset + MIN_FRAMES * geometry.slot_bytes
    given_bytes = least + (frames - MIN_FRAMES) * geometry.slot_bytes
    if frames < MIN_FRAMES:
        with pytest.raises(DramTooSmallError, match=r"at least .* per worker") as caught:
            MemoryPlan(geometry, given_bytes, staging)
        advice = str(caught.value).split("at least ")[1].split(" per worker")[0]
        assert least <= parse_size(advice) < least + MIB
        assert caught.value.needed == least
        return
    plan = MemoryPlan(geometry, given_bytes, staging)
    assert plan.frames == frames
    assert plan.nbytes == given_bytes
    assert plan.nbytes % 4096 == plan.frame_offset % 4096 == 0
    assert plan.staging_bytes <= max(staging, 4 * geometry.layer_bytes)
    assert plan.staging_bytes == plan.staging_pieces * geometry.layer_bytes


@pytest.mark.parametrize("tier", get_args(ChannelTier))
def test_summaries_and_channels_take_what_they_were_given(
    tier: ChannelTier,
) -> None:
    geometry = with_summaries(SlotGeometry("paged", 2, 2, 3, 8192), 16, channels=True)
    given_bytes = 1 << 20
    choice = SparseMemory(16, 1000, summaries=given_bytes, channels=tier)
    plan = MemoryPlan(geometry, 1 << 30, 1 << 20, choice=choice)
    taken = plan.frame_offset - plan.summary_offset
    row = taken / plan.summary_rows
    assert given_bytes - row < taken <= given_bytes + PAGE_ALIGN


@given(geometry=SHAPES, given_bytes=st.integers(0, 1 << 29), most=st.integers(0, 1 << 30))
def test_staging_that_is_not_given_follows(
    geometry: SlotGeometry, given_bytes: int, most: int
) -> None:
    """It is never what there is too little DRAM for, and DRAM grows where it may."""
    least = MemoryPlan(geometry, 1 << 50, 0).frame_offset + MIN_FRAMES * geometry.slot_bytes
    if max(given_bytes, most) < least:
        with pytest.raises(DramTooSmallError) as caught:
            MemoryPlan.of(geometry, given_bytes, None, most_bytes=most)
        assert "staging" not in str(caught.value)
        assert caught.value.needed == least
        return
    plan = MemoryPlan.of(geometry, given_bytes, None, most_bytes=most)
    assert plan.nbytes <= max(given_bytes, least)
    assert plan.staging_bytes <= max(min(STAGING, given_bytes / 4), 4 * geometry.layer_bytes)
    assert given_bytes < least or plan.nbytes > given_bytes - geometry.slot_bytes


@pytest.mark.parametrize(("dram", "staging"), [(4096, 64), (256, 64), (128, 32), (8, 2)])
def test_staging_takes_a_quarter_up_to_its_most(dram: int, staging: int) -> None:
    assert MemoryPlan.of(KV, dram * MIB, None).staging_bytes == staging * MIB


def test_staging_that_is_given_is_named_where_it_is_used() -> None:
    with pytest.raises(ConfigError, match=r"\(dram_gib\), or lower io.staging"):
        MemoryPlan.of(KV, 1 << 20, 1 << 20)
    with pytest.raises(ConfigError, match=r"per worker \(dram_gib\)$"):
        MemoryPlan.of(OPAQUE, OPAQUE.slot_bytes, 1 << 20)


def test_opaque_slots_need_no_staging() -> None:
    probes = PROBES * PROBE_BYTES
    plan = MemoryPlan(OPAQUE, probes + 10 * OPAQUE.slot_bytes, 1 << 30)
    assert (plan.frame_offset, plan.frames) == (probes, 10)


def test_what_contexts_can_use_goes_to_choosing_and_the_rest_to_frames() -> None:
    choice = SparseMemory(16, 100_000, contexts=50)
    plan = MemoryPlan(BOUNDS, 1 << 30, 1 << 20, choice=choice)
    assert plan.summary_rows == 50
    assert plan.page_places == 50 * BOUNDS.pages
    assert plan.frames * BOUNDS.slot_bytes > (1 << 30) - (20 << 20)


@pytest.mark.parametrize("layers", [3, 32])
def test_codes_of_all_contexts_fit_a_fifth_of_their_kv(layers: int) -> None:
    """Beside staging: 2 bits, 2 heads of 64, 16 bit, blocks of 128."""
    kv = SlotGeometry("paged", layers, 2, 8, 4096)
    geometry = with_summaries(kv, 16, channels=False, scaled_from=2, record="codes_2")
    contexts = 4000
    dram_bytes, staging = contexts * kv.kv_pages * kv.page_bytes // 5, 1 << 26
    choice = SparseMemory(16, 100_000, contexts=contexts)
    plan = MemoryPlan(geometry, dram_bytes + staging, staging, choice=choice)
    assert plan.summary_rows == contexts


def test_where_nobody_can_choose_nothing_is_spent_on_it() -> None:
    given_bytes, staging = 1 << 26, 1 << 20
    choice = SparseMemory(16, 100_000, contexts=0)
    plan = MemoryPlan(BOUNDS, given_bytes, staging, choice=choice)
    assert (plan.summary_rows, plan.page_places) == (1, choice.least_places(BOUNDS))
    spent = plan.frame_offset - plan.page_offset
    assert spent <= choice.least_places(BOUNDS) * BOUNDS.page_bytes + (1 << 17)


@pytest.mark.parametrize(("channels", "times"), [(False, 6.3), (True, 1.37)])
def test_memory_that_is_scarce_is_divided_by_need(channels: bool, times: float) -> None:
    """Contexts so many times larger than DRAM are chosen from: bounds take a 16th of their KV, and
    two fifths of DRAM; channels half of their KV, and more of DRAM, as they outweigh a choice."""
    given_bytes = 1 << 28
    geometry = with_summaries(KV, 16, channels=channels)
    plan = MemoryPlan(geometry, given_bytes, 0, choice=SparseMemory(16, 1_000_000))
    kv = geometry.kv_pages * geometry.page_bytes
    assert plan.summary_rows * kv == pytest.approx(times * given_bytes, rel=0.05)
    summaries = plan.frame_offset - plan.summary_offset
    left = given_bytes - plan.page_offset - summaries - MIN_FRAMES * geometry.frame_bytes
    assert plan.page_places * geometry.page_bytes == pytest.approx(0.8 * left, rel=0.01)


@given(
    geometry=SHAPES.map(lambda shape: replace(shape, payload_bytes=16 * shape.payload_bytes)),
    channels=st.booleans(),
    staging=st.integers(0, 1 << 22),
    given_bytes=st.integers(0, 1 << 26),
    page_cache=st.none() | st.integers(1 << 20, 1 << 24),
    summaries=st.none() | st.integers(1 << 20, 1 << 24),
    tier=st.sampled_from(get_args(ChannelTier)),
    contexts=st.none() | st.integers(0, 10_000),
    budget=st.floats(0.001, 1),
)
def test_dram_that_is_said_to_be_enough_is_enough(
    geometry: SlotGeometry,
    channels: bool,
    staging: int,
    given_bytes: int,
    page_cache: int | None,
    summaries: int | None,
    tier: ChannelTier,
    contexts: int | None,
    budget: float,
) -> None:
    geometry = with_summaries(geometry, 16, channels=channels)
    choice = SparseMemory(16, 5000, page_cache, summaries, "lru", tier, contexts, budget)
    try:
        plan = MemoryPlan(geometry, given_bytes, staging, choice=choice)
    except DramTooSmallError as error:
        said = parse_size(str(error).split("at least ")[1].split(" per worker")[0])
        given_bytes = error.needed
        assert given_bytes <= said < given_bytes + MIB
        plan = MemoryPlan(geometry, given_bytes, staging, choice=choice)
    assert plan.frames >= MIN_FRAMES
    assert given_bytes - geometry.slot_bytes < plan.nbytes <= given_bytes
    most = 5000 if contexts is None or summaries is not None else min(5000, contexts)
    assert 1 <= plan.summary_rows <= max(1, most)
    assert plan.page_places >= choice.least_places(geometry)
    if page_cache is not None:
        assert plan.page_places * geometry.page_bytes > page_cache - geometry.page_bytes
    assert plan.summary_offset % PAGE_ALIGN == plan.frame_offset % PAGE_ALIGN == 0
    row, page = choice.row_bytes(geometry), geometry.page_bytes
    assert_lent(plan, plan.page_runs, plan.page_offset, plan.page_places, page)
    assert_lent(plan, plan.summary_runs, plan.summary_offset, plan.summary_rows, row)
    assert len(plan.page_runs.firsts) == 0 or page_cache is None
    assert len(plan.summary_runs.firsts) == 0 or summaries is None


def assert_lent(
    plan: MemoryPlan, runs: FrameRuns, offset: int, pieces: int, piece_bytes: int
) -> None:
    """Frames one behind the other, each in the pieces of its run."""
    frame_bytes = (plan.nbytes - plan.frame_offset) // plan.frames
    begin = offset + runs.firsts.astype(np.int64) * piece_bytes
    end = begin + runs.length * piece_bytes
    assert not len(end) or (begin[0] >= offset and end[-1] <= offset + pieces * piece_bytes)
    frames = runs.offsets.astype(np.int64)
    assert (frames % PAGE_ALIGN == 0).all()
    assert (np.diff(frames) == frame_bytes).all()
    assert ((begin <= frames) & (frames + frame_bytes <= end)).all()
    assert runs.length < frame_bytes / piece_bytes + 2
    assert runs.step == frame_bytes / piece_bytes


@pytest.mark.parametrize("geometry", [BOUNDS, with_summaries(KV, 16, channels=True)], ids=str)
def test_next_to_all_that_is_divided_without_being_told_may_be_lent(geometry: SlotGeometry) -> None:
    """As if there were nothing but frames: what the store of exact attention has."""
    given_bytes, staging = 1 << 30, 1 << 26
    plan = MemoryPlan(geometry, given_bytes, staging, choice=SparseMemory(16, 1_000_000))
    assert (np.diff(np.sort(plan.lent_offsets)) >= geometry.frame_bytes).all()
    exact = MemoryPlan(KV, given_bytes, staging)
    assert 0.96 * exact.frames < plan.frames + len(plan.lent_offsets) <= exact.frames


@pytest.mark.parametrize("summaries", [None, 4 << 20])
def test_summaries_on_a_device_leave_their_dram_to_others(summaries: int | None) -> None:
    """Where it holds those of as many blocks as DRAM would, or more; else all is as without it."""
    given_bytes, row = 1 << 28, BOUNDS.summary_pages * BOUNDS.payload_bytes
    without = SparseMemory(16, 100_000, summaries=summaries, contexts=90_000)
    before = MemoryPlan(BOUNDS, given_bytes, 1 << 20, choice=without)
    enough = before.summary_rows * row
    for held in (enough - 1, enough, 3 * enough):
        choice = replace(without, hbm_summaries=held)
        plan = MemoryPlan(BOUNDS, given_bytes, 1 << 20, choice=choice)
        if held < enough:
            assert not plan.summaries_on_device
            assert (plan.summary_rows, plan.frames) == (before.summary_rows, before.frames)
            assert plan.frame_offset == before.frame_offset
            continue
        assert plan.summaries_on_device
        assert plan.summary_rows == held // row
        assert plan.frame_offset == plan.summary_offset
        assert len(plan.summary_runs.firsts) == 0
        assert plan.page_places > before.page_places
        assert plan.frames > before.frames
    plan = MemoryPlan(BOUNDS, given_bytes, 0, choice=replace(without, hbm_summaries=1 << 40))
    assert plan.summary_rows == 90_000


@pytest.mark.parametrize("channels", [True, False])
def test_the_host_keeps_sums_of_v(channels: bool) -> None:
    geometry = with_summaries(KV, 16, channels=channels, record="spread_with_values")
    choice = SparseMemory(16, 100_000, hbm_summaries=1 << 40)
    assert not MemoryPlan(geometry, 1 << 28, 1 << 20, choice=choice).summaries_on_device
