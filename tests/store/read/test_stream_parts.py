"""A layer's contexts are cut in two parts, of which one needs nothing of the stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.store.conftest import PAGED, MakeStore, StoreRig, array
from tests.store.read.test_context_stream import away, context, stored
from vllm_ssdkv.store.read.context_stream import ContextStream, Part

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
    """By layer: what comes in the device's part, and in the other; whole without a share."""
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
    """By identity: who attends builds its rows once."""
    rig = make_store()
    names = stored(rig, range(10))
    context(rig, names)
    stream = rig.store.stream([array(range(10))])
    cuts = [stream.parts(layer, 0.5) for layer in range(PAGED.layers)]
    assert all(cut is cuts[0] for cut in cuts)
    assert [part.blocks for part in cuts[0]] == [5, 5]
    stream.close()
