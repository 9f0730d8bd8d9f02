"""A layer of a decode step by tables: against the oracles, and recorded and replayed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.oracles import sparse_attention as oracle
from tests.triton_kernels.recorded import Recorded
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.operands.step_tables import NEWEST, StepTables
from vllm_ssdkv.store.memory.device_memory import DeviceMemory
from vllm_ssdkv.triton_kernels.decode_layer import Choosing, DecodeLayer
from vllm_ssdkv.triton_kernels.misses import Misses
from vllm_ssdkv.triton_kernels.resident_pages import WAYS, ResidentPages
from vllm_ssdkv.triton_kernels.step_rows import Batch, change

KV_HEADS, GROUP, SIZE, BLOCK, PAGE = 2, 3, 16, 8, 4
GROUPS = BLOCK // PAGE
LAYOUT = BlockLayout.unpadded(BLOCK, PAGE, KV_HEADS, SIZE, torch.float32)
SLOTS = LAYOUT.with_page_stride(1024)
HEADER, LAYERS = 4096, 2
SHAPE = StepTables(rows=4, blocks=20, hbm_blocks=16)
WINDOW_BLOCKS, SCALE, SINKS = 3, 0.3, 1
CPU = torch.device("cpu")
MOST = 60
"""Pages that a layer may ask for."""
SURE_NS, SOON_NS = 60 * 10**9, 10**7


@dataclass(frozen=True)
class Row:
    """`most` pages of a context of so many blocks; None: all. `window` tokens are in HBM."""

    blocks: int
    window: int
    most: int | None = None
    least: int = 0
    without_frame: int | None = None


class Steps:
    """Memory at fixed places, in which each step writes its rows' K and V, and its tables."""

    def __init__(self, choosing: Choosing | None, most: int = 0) -> None:
        self.choosing = choosing
        self.tables = torch.zeros(SHAPE.size, dtype=torch.int64)
        self.misses = Misses.empty(LAYERS, most, SHAPE, self.tables)
        self.service = 0, 0
        self.batch = Batch(
            torch.full((SHAPE.rows,), -1, dtype=torch.int64),
            torch.zeros(SHAPE.rows, dtype=torch.int32),
            torch.zeros((SHAPE.rows, SHAPE.blocks + WINDOW_BLOCKS), dtype=torch.int32),
        )
        self.layer = DecodeLayer(
            LAYOUT,
            SLOTS,
            SHAPE,
            self.tables,
            window_blocks=WINDOW_BLOCKS,
            query_heads=KV_HEADS * GROUP,
            choosing=choosing,
            misses=self.misses,
        )
        frame = HEADER + LAYERS * SLOTS.block_bytes
        self.frames = torch.zeros((SHAPE.rows, SHAPE.blocks, frame), dtype=torch.uint8)
        record = (LAYERS, KV_HEADS, GROUPS, 2, SIZE)
        self.records = torch.zeros((SHAPE.rows, SHAPE.blocks, *record))
        self.caches = torch.zeros((LAYERS, SHAPE.hbm_blocks, LAYOUT.block_bytes // 4))
        self.query = torch.zeros((LAYERS, SHAPE.rows, KV_HEADS * GROUP, SIZE))
        self.key, self.value = torch.zeros((2, LAYERS, SHAPE.rows, KV_HEADS, SIZE))
        self.out = torch.full_like(self.query, torch.nan)

    def prepare(self, rows: dict[int, Row], seed: int) -> None:
        """Write the rows of a step, by their entries in the batch; others are padding."""
        draw = torch.Generator().manual_seed(seed)
        tables = torch.zeros(SHAPE.size, dtype=torch.int64)
        tables[: SHAPE.hbm_blocks] = -1
        tables[SHAPE.service : SHAPE.fields] = torch.tensor(self.service)
        fields = tables[SHAPE.fields : SHAPE.frames].view(-1, SHAPE.rows)
        frames = tables[SHAPE.frames : SHAPE.records].view(SHAPE.rows, -1)
        records = tables[SHAPE.records :].view(SHAPE.rows, -1)
        free = torch.randperm(SHAPE.hbm_blocks - 1, generator=draw).tolist()
        order = torch.randperm(SHAPE.rows, generator=draw).tolist()
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.rows, self.places = (
            rows,
            dict(zip(rows, (order[entry] for entry in rows), strict=True)),
        )
        self.batch.slots.fill_(-1)
        self.query.copy_(torch.randn(self.query.shape, generator=draw))
        for entry, row in rows.items():
            place, context = order[entry], row.blocks * BLOCK
            tokens = context + row.window
            kv = torch.randn((2, LAYERS, tokens, KV_HEADS, SIZE), generator=draw)
            self.held[entry] = kv[0], kv[1]
            blocks = [free.pop() + 1 for _ in range(-(-row.window // BLOCK))]
            for layer in range(LAYERS):
                self._put(layer, entry, place, row, kv[:, layer], blocks)
            for i in range(row.blocks):
                frames[place, i] = self.frames[place, i].data_ptr()
                records[place, i] = self.records[place, i].data_ptr()
            if row.without_frame is not None:
                frames[place, row.without_frame] = 0
            most = row.blocks * GROUPS if row.most is None else row.most
            scored = row.blocks if 0 <= min(row.least, most) < row.blocks * GROUPS else 0
            scored = 0 if row.most is None else scored
            least = most if row.most is None else row.least
            fields[:, place] = torch.tensor([row.blocks, row.blocks, scored, least, most])
            tables[blocks[-1]] = place
            self.batch.slots[entry] = blocks[-1] * BLOCK + (row.window - 1) % BLOCK
            self.batch.seq_lens[entry] = tokens
            self.batch.block_table[entry, row.blocks : row.blocks + len(blocks)] = torch.tensor(
                blocks, dtype=torch.int32
            )
        changed = (tables != self.tables).nonzero().flatten()
        change(self.tables, torch.stack([changed, tables[changed]], 1))

    def _put(
        self,
        layer: int,
        entry: int,
        place: int,
        row: Row,
        kv: torch.Tensor,
        blocks: list[int],
    ) -> None:
        """Place K and V of a row's tokens in its frames and in HBM, all but the newest one's."""
        pages = kv[:, : row.blocks * BLOCK].view(2, row.blocks, GROUPS, PAGE, KV_HEADS, SIZE)
        pages = pages.permute(1, 4, 2, 0, 3, 5)  # block, head, group, K or V, token, channel
        at = HEADER + layer * SLOTS.block_bytes
        slots = self.frames[place, : row.blocks, at : at + SLOTS.block_bytes].view(
            row.blocks, KV_HEADS, GROUPS, 1024
        )
        used = pages.reshape(row.blocks, KV_HEADS, GROUPS, 2 * PAGE * SIZE)
        slots[..., : LAYOUT.page_payload_bytes] = used.contiguous().view(torch.uint8)
        ends = pages[:, :, :, 0]
        self.records[place, : row.blocks, layer] = torch.stack([ends.amin(3), ends.amax(3)], 3)
        recent = kv[:, row.blocks * BLOCK :]
        for token in range(row.window - 1):
            block = self.caches[layer, blocks[token // BLOCK]].view(KV_HEADS, GROUPS, 2, PAGE, SIZE)
            inside = token % BLOCK
            block[:, inside // PAGE, :, inside % PAGE] = recent[:, token].transpose(0, 1)
        self.key[layer, entry], self.value[layer, entry] = recent[:, -1]

    def run(self) -> None:
        """Do a step: the rows, then each layer."""
        self.layer.begin(self.batch, self.caches.stride(1))
        for layer in range(LAYERS):
            cache = self.caches[layer]
            self.layer.store(self.key[layer], self.value[layer], cache, self.batch)
            self.layer.attend(
                layer,
                self.query[layer],
                cache,
                self.out[layer],
                SCALE,
                (HEADER + layer * SLOTS.block_bytes, layer * KV_HEADS * GROUPS * 2 * SIZE * 4),
            )

    def compare(self) -> None:
        """Compare the output with the oracle's; padding is zeros."""
        want = torch.zeros(self.out.shape, dtype=torch.float64)
        for entry, row in self.rows.items():
            for layer in range(LAYERS):
                want[layer, entry] = self._expected(layer, entry, row)
        lost = [entry for entry, row in self.rows.items() if row.without_frame is not None]
        kept = [entry for entry in range(SHAPE.rows) if entry not in lost]
        torch.testing.assert_close(self.out[:, kept].double(), want[:, kept], atol=2e-5, rtol=2e-5)
        assert not self.out.isnan().any()

    def _expected(self, layer: int, entry: int, row: Row) -> torch.Tensor:
        key, value = (part[layer] for part in self.held[entry])
        query, context = self.query[layer, entry], row.blocks * BLOCK
        chosen = torch.ones((KV_HEADS, len(key)), dtype=torch.bool)
        if row.most is not None and min(row.least, row.most) < row.blocks * GROUPS:
            low, high = oracle.page_bounds(key[:context], PAGE)
            logits = oracle.bound_logits(query, low, high, SCALE)
            window = chosen.clone()
            window[:, :context] = False
            lse = oracle.attend_chosen(query, key, value, window, SCALE)[1]
            weights, share = oracle.page_weights(logits, KV_HEADS, PAGE, lse)
            chosen[:, :context] = False
            if row.least == NEWEST:
                chosen[:, : SINKS * PAGE] = True
                chosen[:, context - (row.most - SINKS) * PAGE : context] = True
                return oracle.attend_chosen(query, key, value, chosen, SCALE)[0]
            for head in range(KV_HEADS):
                pages, _ = oracle.choose(
                    weights[head].tolist(),
                    weights[head].tolist(),
                    float(share[head]),
                    sinks=SINKS,
                    least=row.least,
                    most=row.most,
                    p=1.0 if self.choosing is None else self.choosing.mass,
                )
                for page in pages:
                    chosen[head, page * PAGE : (page + 1) * PAGE] = True
        return oracle.attend_chosen(query, key, value, chosen, SCALE)[0]


KINDS = {
    "exact": (None, {0: Row(20, 17), 1: Row(3, 1), 3: Row(0, 9)}, {0: Row(1, 8), 2: Row(19, 5)}),
    "bounds": (
        Choosing("bounds", SINKS),
        {0: Row(20, 9, 7, 7), 2: Row(5, 24), 3: Row(6, 3, 0)},
        {0: Row(4, 1), 1: Row(13, 8, 3, NEWEST), 2: Row(20, 11, 11, 11), 3: Row(9, 2, 5, 5)},
    ),
    "adaptive": (
        Choosing("bounds", SINKS, mass=0.6),
        {0: Row(9, 1, 18, 1), 3: Row(6, 3, 0)},
        {0: Row(9, 1, 6, 2), 1: Row(7, 8, 14, 1), 2: Row(8, 2, 5, 5), 3: Row(5, 2)},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_step_does_what_its_tables_say(kind: str) -> None:
    """A number at the capture that should be memory fails at the replay."""
    choosing, captured, replayed = KINDS[kind]
    steps = Steps(choosing)
    steps.prepare(captured, seed=1)
    with Recorded() as record:
        steps.run()
    steps.compare()
    for seed, rows in ((2, replayed), (3, captured), (4, {})):
        steps.prepare(rows, seed)
        steps.out.fill_(torch.nan)
        record.replay()
        steps.compare()
        assert not steps.layer.outcome[0].any()


def test_a_layer_is_six_launches_and_moves_nothing() -> None:
    steps = Steps(KINDS["bounds"][0])
    steps.prepare(KINDS["bounds"][1], seed=1)
    with Recorded() as record:
        steps.run()
    layer = ["_store", "_attend", "_pages", "_resolve", "_attend", "_merge"]
    assert record.launches == [f"{name}_kernel" for name in ["_match", *layer * LAYERS]]
    assert record.operations == []


def test_a_row_that_needs_a_block_without_a_frame_is_lost_and_no_other() -> None:
    steps = Steps(None)
    steps.prepare({0: Row(4, 3), 1: Row(5, 2, without_frame=4), 2: Row(2, 2)}, seed=1)
    steps.run()
    steps.compare()
    assert steps.layer.outcome[0].nonzero().flatten().tolist() == [steps.places[1]]


def test_a_window_without_room_is_cut_off_where_its_entry_ends() -> None:
    """No step with such a row is served; whoever runs one all the same must not write outside."""
    steps = Steps(None)
    steps.prepare({0: Row(4, BLOCK * WINDOW_BLOCKS + 1)}, seed=1)
    steps.run()
    found = steps.layer.rows
    assert found.window.block_end[0] == WINDOW_BLOCKS
    assert not found.block_position[WINDOW_BLOCKS:].any()


class Host:
    """Host that answers a step's requests by pages elsewhere in memory.

    Attributes:
        asked: Keys of each layer that has asked.
        lost: Keys that have no answer.
        most: Pages that a layer has asked for, at most.
    """

    def __init__(self, steps: Steps, base: int, lost: tuple[int, ...] = ()) -> None:
        self.steps, self.base, self.lost = steps, base, lost
        self.asked: dict[int, list[int]] = {}
        self.most = 0
        self.spare = torch.zeros((LAYERS, MOST, 1024), dtype=torch.uint8)

    def answer(self, stop: threading.Event) -> None:
        misses, turn = self.steps.misses, self.base // LAYERS % 2
        request, reply = misses.requests[turn].numpy(), misses.replies[turn].numpy()
        latest = self.base
        while not stop.wait(1e-4):
            if not latest < (ticket := int(request[0])) <= self.base + LAYERS:
                continue
            latest, layer = ticket, ticket - self.base - 1
            self.most = max(self.most, int(request[1]))
            keys = self.asked[layer] = request[2 : 2 + request[1]].tolist()
            for i, key in enumerate(keys):
                if key < 0:
                    continue
                row, block = divmod(key // (KV_HEADS * GROUPS), SHAPE.blocks)
                page = layer * KV_HEADS * GROUPS + key % (KV_HEADS * GROUPS)
                held = self.steps.frames[row, block, HEADER + page * 1024 :][:1024]
                self.spare[layer, i] = held
                reply[2 + i] = 0 if key in self.lost else self.spare[layer, i].data_ptr()
            reply[1] = np.isin(keys, self.lost).sum()
            reply[0] = ticket


@contextlib.contextmanager
def host(steps: Steps, base: int, lost: tuple[int, ...] = ()) -> Iterator[Host]:
    """Host that answers for as long as this lasts."""
    one, stop = Host(steps, base, lost), threading.Event()
    thread = threading.Thread(target=one.answer, args=(stop,))
    thread.start()
    try:
        yield one
    finally:
        stop.set()
        thread.join()


def without_frames(rows: dict[int, Row]) -> dict[int, Row]:
    """Rows as these, each without a frame of its newest block."""
    return {
        entry: replace(row, without_frame=row.blocks - 1) if row.blocks else row
        for entry, row in rows.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_the_host_brings_change_no_bit(kind: str) -> None:
    """A step is recorded where no page is missing, and replayed where each row lacks some."""
    choosing, captured, replayed = KINDS[kind]
    steps = Steps(choosing, MOST)
    steps.prepare(captured, seed=1)
    with Recorded() as record:
        steps.run()
    steps.compare()
    for step, (seed, rows) in enumerate(((2, replayed), (3, captured)), start=1):
        steps.service = 0, 0
        steps.prepare(rows, seed)
        record.replay()
        want, base = steps.out.clone(), step * LAYERS
        steps.service = base, SURE_NS
        steps.prepare(without_frames(rows), seed)
        steps.out.fill_(torch.nan)
        with host(steps, base) as answers:
            record.replay()
        assert len(answers.asked) == LAYERS
        assert torch.equal(steps.out, want)
        assert not steps.layer.outcome[0].any()
        assert not steps.misses.state[0]


def test_a_layer_that_may_ask_is_seven_launches_and_moves_nothing() -> None:
    steps = Steps(KINDS["bounds"][0], MOST)
    steps.prepare(KINDS["bounds"][1], seed=1)
    with Recorded() as record:
        steps.run()
    layer = ["_store", "_attend", "_pages", "_resolve", "_wait", "_attend", "_merge"]
    assert record.launches == [f"{name}_kernel" for name in ["_match", *layer * LAYERS]]
    assert record.operations == []


def test_pages_that_the_device_holds_are_not_asked_for() -> None:
    steps = Steps(KINDS["bounds"][0], MOST)
    memory = torch.zeros((LAYERS * KV_HEADS * WAYS, 1024), dtype=torch.uint8)
    held = DeviceMemory(memory.data_ptr(), len(memory), lambda source, to: None)
    identity = torch.arange(SHAPE.rows * SHAPE.blocks).view(SHAPE.rows, SHAPE.blocks)
    hot = ResidentPages.empty(held, (LAYERS, KV_HEADS, 1024), identity)
    steps.layer.hot = hot
    row = Row(6, 9, 7, 7)
    steps.prepare({1: row}, seed=1)
    steps.run()
    want, first = steps.out.clone(), steps.places[1] * SHAPE.blocks
    sink = first * KV_HEADS * GROUPS + GROUPS  # that of the second KV head
    for step, asked in enumerate(([], [sink]), start=1):
        if asked:
            hot.key[1, 1][hot.key[1, 1] == first * GROUPS + 1] = 0
        steps.service = step * LAYERS, SURE_NS
        steps.prepare({1: replace(row, without_frame=0)}, seed=1)
        with host(steps, step * LAYERS) as answers:
            steps.run()
        assert [key for keys in answers.asked.values() for key in keys if key >= 0] == asked
        assert len(answers.asked) == len(asked)
        assert torch.equal(steps.out, want)
        assert not steps.layer.outcome[0].any()
        assert not steps.misses.state.any()


def test_a_row_whose_page_does_not_come_is_lost_and_asks_no_more() -> None:
    steps = Steps(None, MOST)
    steps.service = LAYERS, SURE_NS
    steps.prepare({0: Row(4, 3, without_frame=1), 1: Row(5, 2, without_frame=4)}, seed=1)
    pages = KV_HEADS * GROUPS
    first, other = (steps.places[entry] * SHAPE.blocks * pages for entry in (0, 1))
    with host(steps, LAYERS, lost=(first + pages + 2,)) as answers:
        steps.run()
    assert steps.layer.outcome[0].nonzero().flatten().tolist() == [steps.places[0]]
    mine, theirs = (
        range(first + pages, first + 2 * pages),
        range(other + 4 * pages, other + 5 * pages),
    )
    assert sorted(answers.asked[0]) == sorted([*mine, *theirs])
    assert answers.asked[1] == list(theirs)
    steps.rows[1] = replace(steps.rows[1], without_frame=None)
    steps.compare()


def test_where_nobody_answers_rows_are_lost_after_one_deadline() -> None:
    steps = Steps(None, MOST)
    steps.service = LAYERS, SOON_NS
    steps.prepare({0: Row(4, 3, without_frame=1), 1: Row(5, 2), 2: Row(2, 1)}, seed=1)
    steps.run()
    steps.compare()
    assert steps.layer.outcome[0].nonzero().flatten().tolist() == [steps.places[0]]
    assert steps.misses.requests[1, 0] == LAYERS + 1
    assert steps.misses.state.tolist() == [0, LAYERS]
    # Nor does a row ask that lacks pages in a layer behind that one alone.
    steps.service = 2 * LAYERS, SOON_NS
    steps.misses.state[1] = 2 * LAYERS
    steps.prepare({0: Row(4, 3, without_frame=1)}, seed=2)
    steps.run()
    assert steps.misses.requests[0, 0] == 0
    steps.misses.state[1] = LAYERS
    # The next step asks again.
    steps.service = 2 * LAYERS, SURE_NS
    rows = {0: Row(4, 3, without_frame=1)}
    steps.prepare(rows, seed=2)
    with host(steps, 2 * LAYERS) as answers:
        steps.run()
    assert len(answers.asked) == LAYERS
    assert not steps.layer.outcome[0].any()


def test_what_a_layer_has_no_room_to_ask_for_loses_rows() -> None:
    steps = Steps(None, most := KV_HEADS * GROUPS + 1)
    steps.service = LAYERS, SURE_NS
    steps.prepare({0: Row(4, 3, without_frame=1), 1: Row(5, 2, without_frame=4)}, seed=1)
    with host(steps, LAYERS) as answers:
        steps.run()
    assert len(answers.asked[0]) == most == answers.most
    assert steps.layer.outcome[0].nonzero().flatten().tolist() == [steps.places[1]]
    steps.compare()
