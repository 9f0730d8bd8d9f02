"""Streaming: every row gets all of its context, right, or is poisoned; other rows go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kit.waiting import until
from tests.store.conftest import (
    PAGED,
    PAGED_ENCRYPTED,
    PATIENCE_S,
    MakeStore,
    Slots,
    StoreRig,
    array,
)
from vllm_ssdkv.store.cache.frames import FrameState
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.io.async_verifier import Verification
from vllm_ssdkv.store.read.context_stream import ContextStream, Part


def context(rig: StoreRig, names: dict[int, int], request: str = "r") -> None:
    """A running request whose context is stored, its checksums known."""
    rig.store.extend_context(request, 0, array(list(names)))
    assert rig.load(names, [], request=request).complete


def stored(rig: StoreRig, slots: Sequence[int]) -> dict[int, int]:
    names = {slot: 700 + slot for slot in slots}
    rig.write(names)
    return names


def away(rig: StoreRig, slots: Sequence[int]) -> None:
    """Take slots out of DRAM."""
    rig.store.frames.forget(array(slots))


geometries = st.builds(
    SlotGeometry,
    st.just("paged"),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 20_000),
    st.booleans(),
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    geometry=geometries,
    staging=st.integers(1, 9),
    weights=st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=3),
    lengths=st.lists(st.integers(0, 14), min_size=1, max_size=4),
    in_dram=st.sets(st.integers(0, 19)),
)
def test_every_row_gets_its_blocks_from_wherever_they_are(
    make_store: MakeStore,
    geometry: SlotGeometry,
    staging: int,
    weights: list[float],
    lengths: list[int],
    in_dram: set[int],
) -> None:
    """Rows share slots, contexts are longer than DRAM and staging."""
    rig = make_store(geometry, slots=20, frames=20, staging=staging, weights=weights)
    names = stored(rig, range(20))
    context(rig, names)
    away(rig, sorted(set(names) - in_dram))
    order = np.random.default_rng(len(lengths)).permutation(20).tolist()
    contexts = [order[row : row + length] for row, length in enumerate(lengths)]
    walk = rig.walk(*contexts)
    rig.assert_rows(walk, *[[names[slot] for slot in slots] for slots in contexts])
    assert walk.bad == []
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_tiny_staging_carries_a_long_context(make_store: MakeStore) -> None:
    rig = make_store(slots=120, frames=8, staging=4)
    names = stored(rig, range(110))
    context(rig, names)
    walk = rig.walk(list(names))
    rig.assert_rows(walk, list(names.values()))
    # One block of one layer per chunk, and one piece more for what was in DRAM.
    assert walk.pieces == PAGED.layers * (1 + 110 - 8)
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_frames_that_are_attended_to_cannot_be_taken(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the loader wants frames for another request."""
    rig = make_store(frames=8)
    names = stored(rig, range(16))
    context(rig, {slot: names[slot] for slot in range(8)})
    stream = rig.store.stream([array(range(8))])
    assert stream.pages_in_dram == 8 * PAGED.pages
    wait, taken = rig.store.frames.wait_for_frames, []

    def wait_told(slots: Slots, state: FrameState, deadline: float) -> NDArray[np.int32]:
        if not taken:
            taken.append(len(rig.store.frames.take(slots, state)))
        return wait(slots, state, deadline)

    monkeypatch.setattr(rig.store.frames, "wait_for_frames", wait_told)
    rig.start_load({slot: names[slot] for slot in range(8, 16)}, range(1, 9), request="other")
    until(lambda: bool(taken), "a look for frames")
    assert taken == [0]
    for layer in range(PAGED.layers):
        (piece,) = stream.pieces(layer)
        for index, base in zip(piece.index.tolist(), piece.base.tolist(), strict=True):
            first = base - rig.store.arena.address
            frame = rig.store.frames.frame_of(index)
            at = int(rig.store.frames.buffer_offset(array([frame]).astype(np.int32))[0])
            assert first == at + PAGED.layer_offset(layer)
    stream.close()
    assert rig.finish_load("other").complete


def test_a_second_close_changes_nothing(make_store: MakeStore) -> None:
    rig = make_store()
    names = stored(rig, range(6))
    context(rig, names)
    stream = rig.store.stream([array(range(6))])
    stream.close()
    stream.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_a_step_that_ends_early_leaks_nothing(make_store: MakeStore) -> None:
    rig = make_store(frames=8)
    names = stored(rig, range(30))
    context(rig, names)
    rig.faults({"kind": "latency", "op": "read", "seconds": 0.05})
    stream = rig.store.stream([array(range(30))])
    for _ in stream.pieces(0):
        pass
    stream.close()  # reads of the next layer are in flight
    rig.faults()
    rig.assert_rows(rig.walk(range(30)), list(names.values()))
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_layers_in_another_order_are_refused(make_store: MakeStore) -> None:
    rig = make_store(frames=8)
    names = stored(rig, range(20))
    context(rig, names)
    stream = rig.store.stream([array(range(20))])
    with pytest.raises(RuntimeError, match="layer 1 was asked for, layer 0 comes next"):
        list(stream.pieces(1))
    stream.close()


# ---- wrong bytes ----


@pytest.fixture(params=[PAGED, PAGED_ENCRYPTED], ids=["plain", "encrypted"])
def shared_store(make_store: MakeStore, request: pytest.FixtureRequest) -> StoreRig:
    """Six slots that every example of a property may spoil and mend."""
    rig = make_store(request.param, slots=8, frames=8)
    context(rig, stored(rig, range(6)))
    return rig


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    page=st.integers(0, PAGED.pages - 1),
    byte=st.integers(0, PAGED.payload_bytes - 1),
    bit=st.integers(0, 7),
)
@example(page=0, byte=0, bit=0)
@example(page=PAGED.pages - 1, byte=PAGED.payload_bytes - 1, bit=7)
def test_every_flipped_bit_poisons_the_rows_that_need_it(
    shared_store: StoreRig, page: int, byte: int, bit: int
) -> None:
    rig = shared_store
    rig.forgive()
    before = rig.total("checksum_failures")
    offset = rig.geometry.page_offset(page) + byte
    away(rig, range(6))
    rig.flip(2, offset, 1 << bit)
    try:
        walk = rig.walk([0, 1], [3, 2, 4], [5], [2])
        rig.assert_rows(walk, [700, 701], None, [705], None)
        assert set(walk.bad) == {2}
        assert rig.total("checksum_failures") > before
    finally:
        rig.flip(2, offset, 1 << bit)
    rig.assert_rows(rig.walk([0, 1], [3, 2, 4]), [700, 701], [703, 702, 704])


@pytest.fixture(params=["beside", "forward pass"])
def who_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which thread checks what has arrived; otherwise it is whichever is first."""
    take = Verification.take

    def take_when_done(asked: Verification[object], timeout_s: float) -> object:
        until(lambda: not asked.wanted(), "the work beside the forward pass")
        return take(asked, timeout_s)

    def take_back(asked: Verification[object], timeout_s: float) -> object:
        found = take(asked, timeout_s)
        assert found is None
        return found

    beside = request.param == "beside"
    monkeypatch.setattr(Verification, "take", take_when_done if beside else take_back)
    return str(request.param)


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_whoever_checks_the_outcome_is_the_same(
    make_store: MakeStore, geometry: SlotGeometry, who_checks: str
) -> None:
    rig = make_store(geometry, slots=64, frames=8, staging=16)
    if who_checks == "forward pass":
        assert rig.store._verifier.close(PATIENCE_S)
    names = stored(rig, range(40))
    context(rig, names)
    away(rig, list(names))
    rig.flip(7, geometry.page_offset(geometry.pages - 1))
    rig.faults({"kind": "eio", "op": "read", "count": 2}, {"kind": "corrupt", "count": 2})
    for _ in range(2):
        walk = rig.walk(range(6), range(5, 30), range(30, 40), [7])
        rig.assert_rows(
            walk, [names[s] for s in range(6)], None, [names[s] for s in range(30, 40)], None
        )
        assert set(walk.bad) == {7}
    assert rig.total("checksum_failures") == 2  # once in each walk: rows share the slot
    assert sum(rig.total("io_errors", device=path, kind="eio") for path in rig.paths) == 2
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_a_slot_without_known_checksums_is_never_attended_to(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_store()
    stored(rig, range(6))
    walk = rig.walk([0, 1], [])
    rig.assert_rows(walk, None, [])
    assert set(walk.bad) == {0, 1}
    assert rig.total("checksum_failures") == 0
    assert "dropped: [0, 1]" in caplog.text


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_another_life_of_a_slot_on_the_device_is_found(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    """The seals are those of the block the context means."""
    rig = make_store(geometry)
    names = stored(rig, range(6))
    context(rig, names)
    size = geometry.slot_bytes
    away(rig, range(6))
    (path_a, at_a), (path_b, at_b) = (
        (rig.devices[rig.place(slot, 0)[0]].path, rig.place(slot, 0)[1]) for slot in (1, 2)
    )
    data = path_b.read_bytes()[at_b : at_b + size]
    with open(path_a, "r+b") as file:
        file.seek(at_a)
        file.write(data)
    rig.assert_rows(rig.walk([0, 1], [2]), None, [702])


# ---- devices that fail ----


@pytest.mark.parametrize("kind", ["eio", "short", "corrupt"])
def test_a_read_that_fails_once_is_tried_again(make_store: MakeStore, kind: str) -> None:
    rig = make_store()
    names = stored(rig, range(10))
    context(rig, names)
    away(rig, range(10))
    rig.faults({"kind": kind, "op": "read", "count": 3})
    walk = rig.walk(range(10))
    rig.assert_rows(walk, list(names.values()))
    assert walk.bad == []
    assert rig.total("checksum_failures") == 0


@pytest.mark.parametrize("kind", ["eio", "short", "corrupt", "dead"])
def test_a_device_that_fails_poisons_the_rows_that_need_it(
    make_store: MakeStore, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_store()
    names = stored(rig, range(16))
    context(rig, names)
    away(rig, range(16))
    device = rig.device_of(3)
    mine = [slot for slot in names if rig.device_of(slot) == device]
    rest = [slot for slot in names if slot not in mine]
    rig.faults({"kind": kind, "device": device})
    with caplog.at_level(logging.ERROR):
        walk = rig.walk(mine, rest, [*rest[:2], mine[0]], rest[:3])
    rig.assert_rows(walk, None, [names[s] for s in rest], None, [names[s] for s in rest[:3]])
    told, others = (walk.bad, walk.unread) if kind == "corrupt" else (walk.unread, walk.bad)
    assert others == [], "what could not be read may be read again"
    assert told
    assert set(told) <= set(mine)
    assert "dropped" in caplog.text or rig.paths[device] in caplog.text
    rig.faults()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_a_hung_device_costs_one_deadline_and_the_rows_that_need_it(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_store(slots=64, frames=8, staging=8)
    names = stored(rig, range(48))
    context(rig, names)
    device = rig.device_of(3)
    mine = [slot for slot in names if rig.device_of(slot) == device]
    rest = [slot for slot in names if slot not in mine]
    away(rig, list(names))
    rig.one_deadline(monkeypatch)
    rig.faults({"kind": "stall", "device": device})
    begin = time.monotonic()
    # Each slot of the device in a row of its own, in different chunks.
    walk = rig.walk(*[[slot, rest[i]] for i, slot in enumerate(mine)], rest)
    assert time.monotonic() - begin < PATIENCE_S
    rig.assert_rows(walk, *[None] * len(mine), [names[s] for s in rest])
    assert walk.bad == []
    assert rig.total("device_lost", device=rig.paths[device]) == 1
    # The pieces that the device may still touch are out of use, the others are not.
    staging = rig.store._staging
    assert 0 < staging.usable() < 8
    rig.assert_rows(rig.walk(rest, mine), [names[s] for s in rest], None)
    rig.faults()
    until(lambda: staging.usable() == 8, "the return of the staging buffer")
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_a_device_that_garbles_what_it_returns_is_found(make_store: MakeStore) -> None:
    rig = make_store(slots=64, frames=8, staging=64)
    names = stored(rig, range(48))
    context(rig, names)
    away(rig, list(names))
    device = rig.device_of(3)
    mine = [slot for slot in names if rig.device_of(slot) == device]
    rest = [slot for slot in names if slot not in mine]
    rig.faults({"kind": "corrupt", "device": device})
    walk = rig.walk(mine, rest)
    rig.assert_rows(walk, None, [names[s] for s in rest])
    assert rig.files.health.quarantined == {device}
    assert rig.total("checksum_failures") >= 8


def test_a_page_on_two_devices_accuses_neither(make_store: MakeStore) -> None:
    """Pages larger than a stripe unit: nobody knows which of the devices garbled it."""
    large = SlotGeometry("paged", 1, 1, 1, 700_000)
    rig = make_store(large, slots=16, frames=16, staging=16, devices=2)
    names = stored(rig, range(16))
    context(rig, names)
    away(rig, list(names))
    rig.faults({"kind": "corrupt", "device": 0})
    assert len(set(rig.walk(*[[slot] for slot in names]).bad)) == 16
    assert rig.files.health.quarantined == frozenset()


def test_without_staging_rows_in_dram_go_on(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The only device hangs and holds all of the staging buffer."""
    rig = make_store(frames=8, devices=1, staging=4)
    names = stored(rig, range(20))
    context(rig, names)
    resident = [slot for slot in names if rig.store.frames.frame_of(slot) >= 0]
    others = [slot for slot in names if slot not in resident]
    rig.one_deadline(monkeypatch)
    rig.faults({"kind": "stall"})
    begin = time.monotonic()
    for _ in range(3):
        walk = rig.walk(resident, others, [resident[0], *others[:1]])
        rig.assert_rows(walk, [names[s] for s in resident], None, None)
        assert walk.bad == []
    assert time.monotonic() - begin < PATIENCE_S
    assert rig.store._staging.usable() == 0
    assert "hold the staging buffer" in caplog.text
    rig.faults()
    until(lambda: rig.store._staging.usable() == 4, "the return of the staging buffer")
    rig.store.drop_context("r")
    rig.assert_no_leak()


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 999),
    kinds=st.sets(st.sampled_from(["eio", "short", "corrupt", "latency"]), min_size=1),
    rows=st.lists(st.lists(st.integers(0, 29), max_size=20), min_size=1, max_size=5),
    geometry=st.sampled_from([PAGED, PAGED_ENCRYPTED]),
)
def test_random_faults_never_bring_a_wrong_byte(
    make_store: MakeStore,
    seed: int,
    kinds: set[str],
    rows: list[list[int]],
    geometry: SlotGeometry,
) -> None:
    rig = make_store(geometry, frames=8, staging=6)
    names = stored(rig, range(30))
    context(rig, names)
    rig.faults(
        *(
            {"kind": kind, "op": "read", "probability": 0.15, "seed": seed, "seconds": 0.001}
            if kind == "latency"
            else {"kind": kind, "op": "read", "probability": 0.15, "seed": seed}
            for kind in sorted(kinds)
        )
    )
    for _ in range(3):
        walk = rig.walk(*rows)
        expected = [
            None if row in walk.poisoned else [names[slot] for slot in slots]
            for row, slots in enumerate(rows)
        ]
        rig.assert_rows(walk, *expected)
        assert all(walk.poisoned & {r for r, s in enumerate(rows) if b in s} for b in walk.bad)
    rig.faults()
    rig.store.drop_context("r")
    rig.assert_no_leak()


# ---- a layer's contexts are cut in two parts, of which one needs nothing of the stream ----


Got = list[tuple[int, int, int]]
"""Row, index and the first bytes of each block."""


def pieces_of(rig: StoreRig, stream: ContextStream, layer: int, part: Part | None) -> Got:
    found: Got = []
    for piece in stream.pieces(layer, part):
        assert len(piece.base) == len(piece.index)
        for row, (begin, end) in enumerate(
            zip(piece.row_begin.tolist(), piece.row_end.tolist(), strict=True)
        ):
            for base, index in zip(piece.base[begin:end], piece.index[begin:end], strict=True):
                at = int(base) - rig.store.arena.address
                seen = int.from_bytes(rig.store.arena.view(at, 8).tobytes(), "little")
                found.append((row, int(index), seen))
    return found


def walked(rig: StoreRig, rows: Sequence[Sequence[int]], share: float | None) -> list[list[Got]]:
    """Blocks of each layer in the device's part and in the other; all in one without a share."""
    stream = rig.store.stream([array(row) for row in rows])
    by_layer = []
    for layer in range(rig.geometry.layers):
        parts = (None,) if share is None else stream.parts(layer, share)
        got = [pieces_of(rig, stream, layer, part) for part in parts]
        for part, found in zip(parts, got, strict=True):
            if part is not None:
                assert part.pairs == len(found)
        by_layer.append(got)
    assert stream.poisoned == set()
    stream.close()
    return by_layer


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 14), min_size=1, max_size=4),
    in_dram=st.sets(st.integers(0, 19)),
    share=st.floats(0.0, 1.0),
)
@example(lengths=[14, 9], in_dram=set(range(12)), share=0.0)
@example(lengths=[14, 9], in_dram=set(range(12)), share=1.0)
@example(lengths=[14], in_dram=set(), share=0.5)
def test_every_block_is_in_one_part(
    make_store: MakeStore, lengths: list[int], in_dram: set[int], share: float
) -> None:
    rig = make_store(slots=20, frames=20, staging=8)
    names = stored(rig, range(20))
    context(rig, names)
    away(rig, sorted(set(names) - in_dram))
    order = np.random.default_rng(len(lengths)).permutation(20).tolist()
    rows = [order[row : row + length] for row, length in enumerate(lengths)]
    blocks = sum(lengths)
    for (whole,), (theirs, own) in zip(
        walked(rig, rows, None), walked(rig, rows, share), strict=True
    ):
        assert sorted(theirs + own) == sorted(whole)
        assert len(whole) == blocks
        arriving = sum(slot not in in_dram for row in rows for slot in row)
        wanted = round(share * blocks)
        if wanted >= arriving or wanted <= blocks - arriving:
            assert len(theirs) == wanted
        else:  # as many as have frames, and the step all that arrive
            assert len(theirs) == blocks - arriving
        if share in {0.0, 1.0}:
            assert len(own if share else theirs) == 0
    rig.store.drop_context("r")
    rig.assert_no_leak()


@pytest.mark.parametrize(("share", "arriving"), [(0.9, "device"), (0.2, "step")])
def test_the_part_without_reads_may_be_asked_for_at_any_time(
    make_store: MakeStore, share: float, arriving: str
) -> None:
    """Before, amid and after the other; and again, when it was given up."""
    rig = make_store(slots=20, frames=20, staging=4)
    names = stored(rig, range(20))
    context(rig, names)
    away(rig, range(8))
    rows = [list(range(20)), list(range(4, 12))]
    (expected,) = walked(rig, rows, None)[0]
    stream = rig.store.stream([array(row) for row in rows])
    for layer in range(PAGED.layers):
        theirs, own = stream.parts(layer, share)
        assert (theirs.arriving, own.arriving) == (arriving == "device", arriving == "step")
        with_reads, without = (theirs, own) if theirs.arriving else (own, theirs)
        first = pieces_of(rig, stream, layer, without)
        walk = stream.pieces(layer, with_reads)
        next(walk)
        next(walk)
        assert pieces_of(rig, stream, layer, without) == first
        stream.restart(layer)
        rest = pieces_of(rig, stream, layer, with_reads)
        assert pieces_of(rig, stream, layer, without) == first
        assert len(first) + len(rest) == 28
        if layer == 0:
            assert sorted(first + rest) == sorted(expected)
        assert sorted(set(stream.slots_of(layer, with_reads)) | set(without.slots)) == sorted(names)
    assert stream.poisoned == set()
    stream.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_the_same_cut_has_the_same_rows_in_every_layer(make_store: MakeStore) -> None:
    """The rows are one object, so whoever attends builds them once."""
    rig = make_store()
    names = stored(rig, range(10))
    context(rig, names)
    stream = rig.store.stream([array(range(10))])
    cuts = [stream.parts(layer, 0.5) for layer in range(PAGED.layers)]
    assert all(cut is cuts[0] for cut in cuts)
    assert [part.blocks for part in cuts[0]] == [5, 5]
    # A share that changes from step to step leaves nothing behind: two are kept.
    other = stream.parts(0, 0.2)
    assert stream.parts(0, 0.5) is cuts[0]
    assert stream.parts(0, 0.2) is other
    stream.parts(0, 0.9)
    assert stream.parts(0, 0.2) is other
    assert stream.parts(0, 0.5) is not cuts[0]
    stream.close()


# ---- a walk over a layer that was given up begins anew, for somebody else ----


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED], ids=["plain", "encrypted"])
@pytest.mark.parametrize("seen", [0, 1, 2, 5])
def test_all_pieces_come_again(make_store: MakeStore, geometry: SlotGeometry, seen: int) -> None:
    """After so many pieces of each layer, of blocks in DRAM and of others that two rows share."""
    rig = make_store(geometry, frames=20, staging=8)
    names = stored(rig, range(20))
    context(rig, names)
    away(rig, list(range(3, 20)))
    rows = [list(range(20)), list(range(5, 15))]
    walk = rig.walk(*rows, given_up=seen)
    rig.assert_rows(walk, *[[names[slot] for slot in row] for row in rows])
    assert walk.bad == []
    assert walk.pieces == rig.walk(*rows).pieces  # each of them once
    rig.store.drop_context("r")
    rig.assert_no_leak()


# ---- contexts that hold X beside those of K and V ----


SLOTS, PAGES = 30, 2
"""Slots of each walk, and pages of a layer that hold X: half of them."""


def rig_of(make_store: MakeStore, geometry: SlotGeometry, frames: int) -> StoreRig:
    rig = make_store(geometry, slots=2 * SLOTS, frames=frames, staging=8)
    names = {slot: 700 + slot for slot in range(2 * SLOTS)}
    rig.write(names)
    rig.store.extend_context("r", 0, array(list(names)))
    assert rig.load(names, [], request="r").complete
    rig.store.divide_staging(PAGES)
    return rig


def walk(rig: StoreRig, stream: ContextStream, pages: int) -> dict[int, list[np.ndarray]]:
    """Pages of each block of the stream's one row, layer after layer."""
    found: dict[int, list[np.ndarray]] = {}
    geometry, start = rig.geometry, rig.store.arena.address
    for layer in range(geometry.layers):
        for piece in stream.pieces(layer):
            for base, index in zip(piece.base.tolist(), piece.index.tolist(), strict=True):
                data = rig.store.arena.view(base - start, pages * geometry.page_bytes)
                kept = data.reshape(pages, -1)[:, : geometry.payload_bytes].copy()
                found.setdefault(index, []).extend(kept)
    return found


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED], ids=["plain", "encrypted"])
@pytest.mark.parametrize("in_dram", [0, 10])
@pytest.mark.parametrize("per_slot", [1, 2])
def test_two_threads_walk_at_once_and_read_what_they_need(
    make_store: MakeStore, geometry: SlotGeometry, in_dram: int, per_slot: int
) -> None:
    """A slot with X of several blocks is read once."""
    rig = rig_of(make_store, geometry, frames=64)
    away = [*range(in_dram, SLOTS), *range(SLOTS + in_dram, 2 * SLOTS)]
    rig.store.frames.forget(array(away))
    before = sum(rig.total("bytes_read", device=path) for path in rig.files.health.paths)
    layers, per_layer = range(geometry.layers), geometry.pages_per_layer
    blocks = np.repeat(np.arange(SLOTS, 2 * SLOTS), per_slot)[: per_slot * SLOTS - per_slot + 1]
    x = rig.store.stream_x([blocks], layers)
    kv = rig.store.stream([array(range(SLOTS))])
    found: dict[int, list[np.ndarray]] = {}
    thread = threading.Thread(target=lambda: found.update(walk(rig, kv, per_layer)))
    thread.start()
    theirs = walk(rig, x, PAGES)
    thread.join()
    assert not kv.poisoned | x.poisoned
    for block in range(SLOTS):
        np.testing.assert_array_equal(np.stack(found[block]), rig.kv(700 + block))
    assert sorted(theirs) == list(range(len(blocks)))
    for block, pages in theirs.items():
        slot = 700 + SLOTS + block // per_slot
        of_x = rig.kv(slot).reshape(geometry.layers, per_layer, -1)[:, :PAGES]
        np.testing.assert_array_equal(np.stack(pages).reshape(of_x.shape), of_x)
    assert x.pages_used == x.pages_on_ssd == (SLOTS - in_dram) * geometry.layers * PAGES
    assert x.pages_in_dram == in_dram * geometry.layers * PAGES
    read = sum(rig.total("bytes_read", device=path) for path in rig.files.health.paths) - before
    count = (SLOTS - in_dram) * geometry.layers * (per_layer + PAGES)
    assert read == count * geometry.page_bytes
    for stream in (x, kv):
        stream.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_the_store_is_not_idle_while_x_is_read(make_store: MakeStore) -> None:
    rig = rig_of(make_store, PAGED, frames=64)
    x = rig.store.stream_x([array(range(4))], range(PAGED.layers))
    assert not rig.store.idle()
    x.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_a_staging_buffer_that_was_not_divided_has_none_for_x(make_store: MakeStore) -> None:
    rig = make_store()
    with pytest.raises(ValueError, match="was not divided"):
        rig.store.stream_x([array([0])], range(PAGED.layers))
