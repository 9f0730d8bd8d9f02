"""Pages that are checked, and that exactly the wrong ones of them are named."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.store.conftest import BLOCK_TOKENS, PAGED, MakeStore, array
from vllm_ssdkv.config.io import IoConfig
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.integrity.page_verification import SAMPLE, PageSampler, wrong_pages

SHAPE = SlotGeometry("paged", layers=1, heads=5, groups=1, payload_bytes=4000)
ENOUGH = 500
"""Reads after which a page was in no sample once in 10^14 times."""

NAMES = {slot: 100 + slot for slot in range(4)}


@given(
    rows=st.integers(0, 6),
    wrong=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 4))),
    start=st.integers(0, SAMPLE - 1),
    step=st.sampled_from((1, SAMPLE)),
)
def test_the_wrong_ones_are_named(
    rows: int, wrong: set[tuple[int, int]], start: int, step: int
) -> None:
    pages = SHAPE.pages
    memory = np.random.default_rng(rows).integers(
        0, 256, (max(rows, 1), pages, SHAPE.page_bytes), dtype=np.uint8
    )
    sums = np.array(
        [
            [xxhash.xxh3_64_intdigest(p[: SHAPE.payload_bytes].tobytes()) for p in row]
            for row in memory[:rows]
        ],
        dtype=np.uint64,
    ).reshape(rows, pages)
    memory[:, :, SHAPE.payload_bytes :] ^= 1  # padding may hold anything
    wrong = {(row, page) for row, page in wrong if row < rows}
    for row, page in wrong:
        memory[row, page, SHAPE.payload_bytes - 1] ^= 0x10
    base = np.uint64(memory.ctypes.data) + np.arange(rows, dtype=np.uint64) * np.uint64(
        pages * SHAPE.page_bytes
    )
    found = wrong_pages(SHAPE, base, sums, slice(start, None, step))
    looked_at = range(start, rows * pages, step)
    expected = sorted((row, page) for row, page in wrong if row * pages + page in looked_at)
    assert list(zip(*(part.tolist() for part in found), strict=True)) == expected


def test_all_is_all() -> None:
    sampler = PageSampler()
    assert [range(50)[sampler.choose()] for _ in range(3)] == [range(50)] * 3
    assert IoConfig().verify == "all", (
        "wrong bytes reach the model only where somebody asked for it"
    )


@given(pages=st.integers(1, 100))
def test_a_sample_is_one_of_so_many(pages: int) -> None:
    chosen = list(range(pages)[PageSampler("sampled").choose()])
    assert len(chosen) in (pages // SAMPLE, -(-pages // SAMPLE))
    assert set(np.diff(chosen)) <= {SAMPLE}


def test_every_page_has_its_turn() -> None:
    sampler = PageSampler("sampled")
    assert {sampler.choose().start for _ in range(ENOUGH)} == set(range(SAMPLE))


def test_a_sampled_load_finds_a_bad_page_in_the_end(make_store: MakeStore) -> None:
    """The read that meets it reads again, checks all pages, and the slot is dropped."""
    rig = make_store(verify="sampled")
    rig.write(NAMES)
    rig.flip(2, PAGED.page_offset(5) + 9)
    for _ in range(ENOUGH):
        rig.store.frames.forget(array(list(NAMES)))
        outcome = rig.load(NAMES, [1, 2, 3, 4])
        if not outcome.complete:
            break
        assert outcome.tokens_from_ssd == 4 * BLOCK_TOKENS
    assert outcome.bad == [(2, 1)]
    assert rig.total("checksum_failures") == 1


def test_a_sampled_load_checks_every_header(make_store: MakeStore) -> None:
    """Whose bytes they are is never left to chance."""
    rig = make_store(verify="sampled")
    rig.write(NAMES)
    outcome = rig.load({**NAMES, 3: 999}, [1, 2, 3, 4])
    assert (outcome.complete, outcome.bad) == (False, [(3, 1)])
    rig.flip(1, 70)
    rig.store.frames.forget(array(list(NAMES)))
    assert rig.load(NAMES, [1, 2, 3, 4]).bad == [(1, 1)]


def test_a_sampled_stream_finds_a_bad_page_in_the_end(make_store: MakeStore) -> None:
    rig = make_store(verify="sampled")
    rig.store.extend_context("r", 0, array(list(NAMES)))
    rig.write(NAMES)
    rig.flip(2, PAGED.page_offset(5) + 9)
    for _ in range(ENOUGH):
        walk = rig.walk(list(NAMES))
        if walk.poisoned:
            break
    assert walk.poisoned == {0}
    assert walk.bad == [2]
