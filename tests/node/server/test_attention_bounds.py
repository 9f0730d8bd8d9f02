"""Bounds of the memory that attention takes in a node; within them answers are right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ssdkv.base.checksum import checksum_pages
from vllm_ssdkv.base.errors import ProtocolError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.protocol.messages import (
    Attend,
    Attended,
    AttendShape,
    Forget,
    TellBlocks,
    TellRow,
    pack,
    unpack,
)
from vllm_ssdkv.node.server.attention import NodeAttention
from vllm_ssdkv.node.server.attention_bounds import AttendBounds, BoundedCache, ToldRows, cut
from vllm_ssdkv.node.server.attention_pages import ToldBlocks
from vllm_ssdkv.node.server.drive_room import DriveRoom
from vllm_ssdkv.node.server.volumes import VolumeSet, VolumeShelf
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

I64 = NDArray[np.int64]

MIB = 1 << 20
SLOTS, PAGES, TOKENS, SIZE = 200, 4, 64, 8
"""Pages of 64 tokens of one KV head, two layers of two heads each."""

SHAPE = AttendShape(2, 2, 1, TOKENS, 2, SIZE, "float32", SLOTS)
PAYLOAD = 2 * TOKENS * SIZE * 4
BOUNDS = AttendBounds(blocks=40, listed=100, entries=1 << 20, plan_bytes=1 << 20)


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[VolumeSet]:
    """One volume, with a page for each page of each slot, slot after slot."""
    options = {
        "listen": [f"unix://{tmp_path}/s"],
        "devices": [{"path": str(tmp_path / "ssd"), "capacity": "64MiB"}],
        "io": {"engine": "threads", "direct": "off"},
    }
    config = NodeConfig.from_options(options)
    shelf = VolumeShelf(config, DriveRoom(config, list, Counters()))
    found = shelf.open([uuid4().bytes], [SLOTS * PAGES * 4096], "a model", 10.0)
    data = np.random.default_rng(1).standard_normal(SLOTS * PAGES * 1024).astype(np.float32)
    (found_path,) = (tmp_path / "ssd").rglob("*data*")
    with found_path.open("r+b") as file:
        file.write(data.tobytes())
    yield found
    found.close()


@dataclass
class Engine:
    """Speaks to the part of a node that attends, as an engine does."""

    attention: NodeAttention

    def tell(self, slots: list[int]) -> None:
        """Places and digests of blocks."""
        pages = np.array(slots)[:, None] * PAGES + np.arange(PAGES)
        data = np.random.default_rng(1).standard_normal(SLOTS * PAGES * 1024).astype(np.float32)
        address = np.uint64(data.ctypes.data) + pages.ravel().astype(np.uint64) * np.uint64(4096)
        digests = checksum_pages(address, PAYLOAD)
        places = (pages * 4096).astype("<i8").tobytes()
        self.attention.tell_blocks(TellBlocks(pack(slots), places, digests.tobytes()))

    def row(self, row: int, slots: list[int], keep: int = 0) -> None:
        self.attention.tell_row(TellRow(row, keep, pack(slots)))

    def attend(self, rows: list[int], layer: int = 0, /, **fields: bytes) -> Attended:
        counts = unpack(fields["counts"]) if "counts" in fields else np.ones(len(rows), np.int64)
        query = np.concatenate(
            [
                np.random.default_rng(row).standard_normal((count, 2, SIZE)).astype(np.float32)
                for row, count in zip(rows, counts, strict=True)
            ]
        )
        message = Attend(layer, 0.3, pack(rows), query.tobytes(), following=1 - layer, **fields)
        return self.attention.attend(message)


@pytest.fixture
def engine(volumes: VolumeSet) -> Iterator[Engine]:
    attention = NodeAttention(SHAPE, volumes, nbytes=MIB, threads=1, deadline_s=10.0)
    yield Engine(attention)
    assert attention.close()


# ---- the arithmetic ----


@pytest.mark.parametrize(("heads", "contexts"), [(8, 2), (1, 20)])
def test_long_contexts_of_large_models_have_room_by_default(heads: int, contexts: int) -> None:
    """80 layers, 128 channels, 16-bit numbers, with one GiB: what a node of 40 GiB gives."""
    geometry = SlotGeometry("paged", 80, heads, 1, 2 * 16 * 128 * 2)
    bounds = AttendBounds.of(geometry, 10_000_000, 16, 1 << 30)
    blocks = 128 * 1024 // 16
    assert bounds.blocks >= contexts * blocks
    assert bounds.listed >= 256 * blocks
    told = bounds.blocks * geometry.kv_pages * 20
    lists = bounds.listed * 8 + bounds.plan_bytes + bounds.entries * 216
    assert max(told, lists) <= (1 << 30) // 4
    assert bounds.entries >= bounds.blocks * geometry.pages_per_layer


@pytest.mark.parametrize(
    ("geometry", "slots"),
    [
        pytest.param(SlotGeometry("paged", 1, 1, 1, 4096), 1 << 40, id="slots"),
        pytest.param(SlotGeometry("paged", 2048, 64, 2, 4096), 1000, id="pages of a slot"),
        pytest.param(SlotGeometry("paged", 1, 4096, 1, 65536), 1000, id="pages of a layer"),
    ],
)
def test_slots_that_are_too_many_or_too_large_are_refused(
    geometry: SlotGeometry, slots: int
) -> None:
    with pytest.raises(ProtocolError, match="attend_gib") as raised:
        AttendBounds.of(geometry, slots, 16, MIB)
    assert raised.value.cause == "limit"


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_parts_are_all_items_and_within_the_bound(lengths: list[int], most: int) -> None:
    ranges = list(cut(lengths, most))
    assert [i for first, last in ranges for i in range(first, last)] == list(range(len(lengths)))
    assert all(last - first == 1 or sum(lengths[first:last]) <= most for first, last in ranges)


def test_lists_that_were_used_last_stay() -> None:
    cache: BoundedCache[str, I64] = BoundedCache(24)
    for name in "abc":
        cache.put(name, np.zeros(1, dtype=np.int64))
    assert cache.get("a") is not None
    cache.put("d", np.zeros(1, dtype=np.int64))
    cache.put("large", np.zeros(4, dtype=np.int64))
    assert [name for name in [*"abcd", "large"] if cache.get(name) is not None] == ["a", "c", "d"]
    assert cache.nbytes == 24
    cache.clear()
    assert (cache.nbytes, cache.get("a")) == (0, None)


# ---- what an engine tells ----


@pytest.mark.parametrize(
    ("slots", "keep", "cause"),
    [
        pytest.param([7, 7], 0, "body", id="twice in a message"),
        pytest.param([1], 2, "body", id="twice in a row"),
        pytest.param([9], 4, "body", id="more than it has"),
        pytest.param(list(range(10, 48)), 3, "limit", id="a row of too many blocks"),
    ],
)
def test_rows_are_bounded(slots: list[int], keep: int, cause: str) -> None:
    rows = ToldRows(BOUNDS)
    rows.tell(TellRow(5, 0, pack([1, 2, 3])))
    with pytest.raises(ProtocolError) as raised:
        rows.tell(TellRow(5, keep, pack(slots)))
    assert raised.value.cause == cause
    assert [one.tolist() for one in rows.called(np.array([5]))] == [[1, 2, 3]]


def test_blocks_of_all_rows_are_counted() -> None:
    rows = ToldRows(BOUNDS)
    for _ in range(3):  # what goes makes room
        rows.tell(TellRow(0, 0, pack(range(40))))
        rows.tell(TellRow(1, 0, pack(range(40))))
        rows.tell(TellRow(1, 30, pack(range(50, 60))))
        rows.tell(TellRow(2, 0, pack(range(20))))
        with pytest.raises(ProtocolError, match="more than 100"):
            rows.tell(TellRow(3, 0, pack([1])))
        rows.forget(np.array([0, 2, 9]))
    assert rows.called(np.array([1]))[0].tolist() == [*range(30), *range(50, 60)]


def test_told_blocks_are_bounded(volumes: VolumeSet) -> None:
    geometry = SlotGeometry("paged", 2, 2, 1, PAYLOAD)
    told = ToldBlocks(geometry, SLOTS, 100, volumes)

    def put(slots: I64) -> None:
        places = slots[:, None] * PAGES * 4096 + np.arange(PAGES) * 4096
        told.put(slots, places, places.astype(np.uint64))

    put(np.arange(100))
    put(np.arange(50))  # known already
    with pytest.raises(ProtocolError, match="more than 100 blocks were told"):
        put(np.array([150]))
    told.forget(np.array([7, 60, 199]))
    put(np.array([150, 199]))
    assert len(told.places) == 101
    numbers = told.numbers(np.array([150, 199, 99, 7]))
    assert (told.places[numbers, 1] // 4096 // PAGES).tolist() == [150, 199, 99, -1]


@pytest.mark.parametrize("again", [[3, 3], [3, 4, 3]])
def test_a_call_has_a_row_once(engine: Engine, again: list[int]) -> None:
    engine.tell([1, 2])
    engine.row(3, [1, 2])
    engine.row(4, [2])
    with pytest.raises(ProtocolError, match="a row twice"):
        engine.attend(again)
    assert not engine.attend([3, 4]).slots


# ---- what comes out ----


def expected(contexts: list[list[int]], layer: int, rows: list[int]) -> NDArray[np.float64]:
    """Attention of one query a row to its blocks, [rows, Hq, D]."""
    data = np.random.default_rng(1).standard_normal(SLOTS * PAGES * 1024).astype(np.float32)
    pages = data.reshape(SLOTS, PAGES, 1024)[:, :, : 2 * TOKENS * SIZE]
    kv = pages.reshape(SLOTS, 2, 2, 2, TOKENS, SIZE).astype(np.float64)
    found = []
    for row, slots in zip(rows, contexts, strict=True):
        query = np.random.default_rng(row).standard_normal((1, 2, SIZE)).astype(np.float32)[0]
        k, v = (kv[slots, layer, :, i].transpose(1, 0, 2, 3).reshape(2, -1, SIZE) for i in range(2))
        weights = np.exp(0.3 * np.einsum("hd,hnd->hn", query.astype(np.float64), k))
        found.append(np.einsum("hn,hnd->hd", weights / weights.sum(1, keepdims=True), v))
    return np.array(found)


def outputs(answer: Attended, queries: int) -> NDArray[np.float64]:
    states = np.frombuffer(answer.states, dtype="<f4").astype(np.float64)
    size = queries * 2
    acc = states[: size * SIZE].reshape(queries, 2, SIZE)
    total = states[size * (SIZE + 1) :].reshape(queries, 2, 1)
    result: NDArray[np.float64] = acc / total
    return result


@pytest.mark.parametrize("entries", [1 << 20, 12, 1])
def test_rows_that_are_worked_on_in_parts_come_out_the_same(engine: Engine, entries: int) -> None:
    engine.attention.bounds = replace(engine.attention.bounds, entries=entries)
    contexts = [[1, 2, 3], [4], [5, 1], [9, 8, 7, 6]]
    engine.tell(list(range(1, 10)))
    for row, slots in enumerate(contexts):
        engine.row(row, slots)
    rows = [2, 0, 3, 1]
    for layer in (0, 1, 0):
        answer = engine.attend(rows, layer)
        assert not answer.slots
        right = expected([contexts[row] for row in rows], layer, rows)
        np.testing.assert_allclose(outputs(answer, 4), right, rtol=1e-4, atol=1e-5)
    counts = engine.attend(rows, counts=pack([2, 0, 1, 3]))
    assert math.prod(outputs(counts, 6).shape) == 6 * 2 * SIZE


@pytest.mark.parametrize("entries", [1 << 20, 1])
def test_selected_pages_are_found_across_parts(engine: Engine, entries: int) -> None:
    engine.attention.bounds = replace(engine.attention.bounds, entries=entries)
    contexts = [[1, 2, 3], [4], [5, 1]]
    engine.tell(list(range(1, 6)))
    for row, slots in enumerate(contexts):
        engine.row(row, slots)
    # Of each row its first block, both heads; of its tokens all.
    bits = np.array([1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0], dtype=np.uint8)
    selection = np.packbits(bits).tobytes()
    masks = np.packbits(np.ones(6 * TOKENS, dtype=np.uint8)).tobytes()
    right = expected([[1], [4], [5]], 0, [0, 1, 2])
    for bits_of in ({"selection": selection}, {"selection": selection, "masks": masks}):
        found = outputs(engine.attend([0, 1, 2], **bits_of), 3)
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
    for wrong in ({"selection": selection[:1]}, {"selection": selection, "masks": masks[:-1]}):
        with pytest.raises(ProtocolError) as raised:
            engine.attend([0, 1, 2], **wrong)
        assert raised.value.cause == "body"


def test_blocks_that_were_forgotten_leave_their_numbers_to_others(engine: Engine) -> None:
    """More blocks come and go than the node knows at a time, and none is taken for another."""
    for first in range(1, SLOTS - 2, 2):
        slots = [first, first + 1]
        engine.tell(slots)
        engine.row(0, slots)
        answer = engine.attend([0])
        assert not answer.slots
        np.testing.assert_allclose(
            outputs(answer, 1), expected([slots], 0, [0]), rtol=1e-4, atol=1e-5
        )
        engine.attention.forget(Forget(pack(slots), b""))
