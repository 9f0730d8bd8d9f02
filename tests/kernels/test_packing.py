"""Blocks packed with what selectors must know of them: every byte of a slot, by the oracles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.test_dense import ISAS, using
from tests.oracles.codes import Record
from tests.oracles.sparse_attention import page_bounds, page_spread
from tests.oracles.token_order import spread_within, token_order
from tests.store.tails import addresses, rows_of, tails_of
from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.operands.block_layout import DTYPES, BlockLayout
from vllm_ssdkv.kernels.operands.token_order import TokenOrder
from vllm_ssdkv.kernels.paged import CpuPageKernels, Packing, PageKernels
from vllm_ssdkv.profiling.dense_oracle import write_block
from vllm_ssdkv.store.format.slot_geometry import PAGE_RECORDS, SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import SummaryRows, summary_bytes, with_summaries

FILL = 0xA5
KINDS = (*PAGE_RECORDS, "channels")

Bytes: TypeAlias = NDArray[np.uint8]
Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """Blocks of some layers in caches, and slots that they are to be packed into."""

    layout: BlockLayout
    geometry: SlotGeometry
    blocks: int
    seed: int

    @staticmethod
    def of(
        layout: BlockLayout, kind: str, layers: int = 1, blocks: int = 1, seed: int = 0
    ) -> Problem:
        """``kind`` is what summaries are: a record of pages, or channels."""
        pages = SlotGeometry(
            "paged", layers, layout.kv_heads, layout.groups, layout.page_payload_bytes
        )
        geometry = with_summaries(
            pages,
            layout.page_tokens,
            channels=kind == "channels",
            scaled_from=layout.dtype.itemsize if "codes" in kind else 0,
            record="bounds" if kind == "channels" else kind,  # type: ignore[arg-type]
        )
        return Problem(layout, geometry, blocks, seed)

    def draw(self) -> tuple[torch.Tensor, list[torch.Tensor], Int64s]:
        """K and V, [layers, blocks, 2, tokens, heads, size], caches with them, and block ids."""
        layout, layers = self.layout, self.geometry.layers
        random = torch.Generator().manual_seed(self.seed)
        shape = (layers, self.blocks, 2, layout.block_tokens, layout.kv_heads, layout.head_size)
        kv = torch.randn(shape, generator=random).to(layout.dtype)
        ids = torch.randperm(self.blocks + 2, generator=random)[: self.blocks]
        caches = []
        for layer in range(layers):
            cache = torch.full((self.blocks + 2, layout.block_bytes), 0xFF, dtype=torch.uint8)
            for block, place in enumerate(ids.tolist()):
                write_block(layout, cache[place], *kv[layer, block])
            caches.append(cache.view(layout.dtype))
        return kv, caches, ids.numpy()

    def packed(self, kernels: PageKernels) -> Bytes:
        """Slots, [blocks, slot_bytes], that held only ``FILL`` before."""
        _, caches, ids = self.draw()
        geometry, layout = self.geometry, self.layout
        frames = self._memory(geometry.frame_bytes)
        memory, rows = rows_of(geometry, layout.page_tokens, self.blocks, FILL)
        # The second one lies first: slots need not be in order.
        order = np.arange(self.blocks)[::-1]
        rows = replace(rows, address=rows.address[order])
        packing = Packing(caches, ids, addresses(frames)[order], rows, layout, geometry)
        # Some layers, then the others.
        half = geometry.layers // 2
        kernels.pack_summarized(packing, range(half, geometry.layers))
        if half:
            kernels.pack_summarized(packing, range(half))
        behind = summary_bytes(geometry, layout.page_tokens)
        end = rows.channels if rows.channels >= 0 else memory.shape[1]
        assert (memory[:, behind:end] == FILL).all()
        tails = tails_of(memory, geometry, layout.page_tokens, FILL)
        return np.concatenate([frames, tails], axis=1)[order]

    def made(self, kernels: CpuPageKernels) -> Bytes:
        """Tails, [blocks, tail_bytes], from frames."""
        frames = np.ascontiguousarray(self.wanted()[:, : self.geometry.frame_bytes])
        tails = self._memory(self.geometry.tail_bytes)
        padded = self.layout.with_page_stride(self.geometry.page_bytes)
        kernels.make_tails(addresses(frames), addresses(tails), padded, self.geometry)
        return tails

    def check(self, got: Bytes, wanted: Bytes, *, native: bool = True) -> None:
        """Compare slots or tails byte by byte; mean and variance may be rounded the other way, and
        codes on an edge go it, where kernels are not ``native``."""
        bits = self.geometry.code_bits
        if self.geometry.record == "bounds" or (bits and native):
            np.testing.assert_array_equal(got, wanted)
            return
        if bits:
            for mine, theirs in zip(self._records(got), self._records(wanted), strict=True):
                mine.assert_near(theirs)
            return
        dtype, tail = self.layout.dtype, self.geometry.tail_bytes
        np.testing.assert_array_equal(got[:, :-tail], wanted[:, :-tail])
        mine, theirs = (
            np.ascontiguousarray(part[:, -tail:]).reshape(-1, self.geometry.page_bytes)
            for part in (got, wanted)
        )
        payload = self.geometry.payload_bytes
        np.testing.assert_array_equal(mine[:, payload:], theirs[:, payload:])
        numbers = (
            torch.from_numpy(np.ascontiguousarray(part[:, :payload])).view(dtype)
            for part in (mine, theirs)
        )
        step = max(torch.finfo(dtype).eps, 1e-5)
        # Sums of V are float32, whose bits are compared as if they were numbers of K.
        torch.testing.assert_close(*numbers, rtol=step, atol=1e-6, equal_nan=True)

    def _records(self, slots: Bytes) -> list[Record]:
        """Codes of each slot, layer and head."""
        layout, geometry = self.layout, self.geometry
        tails = np.ascontiguousarray(slots[:, -geometry.tail_bytes :])
        pages = tails.reshape(len(slots), -1, geometry.page_bytes)[..., : geometry.payload_bytes]
        size = _kernels.code_bytes(layout.shape, geometry.code_bits)
        heads = geometry.layers * geometry.heads
        data = pages.reshape(len(slots), -1)[:, : heads * size].reshape(-1, size)
        sizes = layout.block_tokens, layout.head_size, geometry.code_bits
        return [Record.of(one, *sizes) for one in data]

    def _memory(self, nbytes: int) -> Bytes:
        return np.full((self.blocks, nbytes), FILL, np.uint8)

    def wanted(self) -> Bytes:
        """The same by the oracles."""
        kv, _, _ = self.draw()
        layout, geometry = self.layout, self.geometry
        slots = np.full((self.blocks, geometry.slot_bytes), FILL, np.uint8)
        for slot, block in zip(slots, kv.unbind(1), strict=True):
            records = []
            for layer, (key, value) in enumerate(block):
                pages = torch.empty(layout.block_bytes, dtype=torch.uint8)
                write_block(layout, pages, key, value)
                first = geometry.first_page(layer)
                self._write(slot, first, pages, geometry.pages_per_layer, padding=0)
                if geometry.code_bits:
                    records.append(_codes(pages, layout, geometry.code_bits))
                    continue
                if not geometry.channel_pages:
                    of = page_bounds if geometry.record == "bounds" else page_spread
                    made = torch.stack(of(key, layout.page_tokens), 1)
                    records.append(made.permute(2, 0, 1, 3))
                    if geometry.record == "spread_with_values":
                        records.append(self._record(_sum_in_order(value)))
                    continue
                channels = key.permute(1, 2, 0)
                records.append(self._record(_sum_in_order(value)))
                first = geometry.first_channel_page(layer)
                self._write(slot, first, _bytes(channels), geometry.channel_pages)
            summaries = torch.cat([_bytes(record) for record in records])
            self._write(slot, geometry.kv_pages, summaries, geometry.summary_pages)
        return slots

    def _record(self, floats: torch.Tensor) -> torch.Tensor:
        """One record per head, zeros behind ``floats``, [heads, size]."""
        more = self.geometry.payload_bytes // self.layout.page_tokens // 4 - floats.shape[1]
        return torch.nn.functional.pad(floats, (0, more))

    def _write(
        self, slot: Bytes, first: int, data: torch.Tensor, pages: int, padding: int = FILL
    ) -> None:
        """``data``, and zeros behind it, to the payloads of ``pages`` pages from ``first`` on."""
        payload, size = self.geometry.payload_bytes, self.geometry.page_bytes
        begin = self.geometry.page_offset(first)
        rows = np.full((pages, size), padding, np.uint8)
        rows[:, :payload] = np.pad(data.numpy(), (0, pages * payload - len(data))).reshape(
            pages, payload
        )
        slot[begin : begin + pages * size] = rows.ravel()


def _codes(block: torch.Tensor, layout: BlockLayout, bits: int) -> torch.Tensor:
    """Codes of a block's heads, as the kernel makes them that ``sparse/test_codes.py`` tests."""
    made = np.zeros(layout.kv_heads * _kernels.code_bytes(layout.shape, bits), np.uint8)
    source, target = (np.array([at], np.uint64) for at in (block.data_ptr(), made.ctypes.data))
    CpuPageKernels(1).encode(source, layout, target, bits)
    return torch.from_numpy(made)


def _sum_in_order(value: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(value.shape[1:])
    for token in value.float():
        total = total + token
    return total


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


@st.composite
def problems(draw: st.DrawFn, most_blocks: int = 3) -> Problem:
    """Any shapes, most of them with padding and with channels that lie across pages."""
    page_tokens = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 20]))
    layout = BlockLayout.unpadded(
        page_tokens * draw(st.integers(1, 5)),
        page_tokens,
        draw(st.integers(1, 3)),
        draw(st.sampled_from([8, 16, 40, 64, 80, 128, 136])),
        draw(st.sampled_from(DTYPES)),
    )
    kind = draw(st.sampled_from(KINDS))
    layers, blocks = draw(st.integers(1, 3)), draw(st.integers(1, most_blocks))
    return Problem.of(layout, kind, layers, blocks, draw(st.integers(0, 999)))


@given(problem=problems())
def test_every_byte_is_the_oracles(problem: Problem) -> None:
    wanted = problem.wanted()
    for isa in ISAS:
        with using(isa):
            problem.check(problem.packed(CpuPageKernels(2)), wanted)
            tails = wanted[:, problem.geometry.frame_bytes :]
            problem.check(problem.made(CpuPageKernels(2)), tails)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_without_padding_on_many_threads(kind: str) -> None:
    """Of the size that models have, where channels go to their pages at once."""
    layout = BlockLayout.unpadded(64, 16, 4, 128, torch.bfloat16)
    problem = Problem.of(layout, kind, layers=3, blocks=4)
    assert problem.geometry.page_bytes == problem.geometry.payload_bytes
    for threads in (1, 3):
        problem.check(problem.packed(CpuPageKernels(threads)), problem.wanted())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels_keep_every_bit(dtype: torch.dtype) -> None:
    """Whatever NaN it is: channels are K, not what arithmetic makes of it."""
    layout = BlockLayout.unpadded(24, 8, 1, 24, dtype)
    geometry = Problem.of(layout, "channels").geometry
    random = np.random.default_rng(1).integers(0, 256, (1, layout.block_bytes), np.uint8)
    cache = torch.from_numpy(random).view(dtype)
    key = random.reshape(3, 2, 8, 24, dtype.itemsize)[:, 0].reshape(24, 24, dtype.itemsize)
    for isa in ISAS:
        frame = np.zeros((1, geometry.frame_bytes), np.uint8)
        memory, rows = rows_of(geometry, layout.page_tokens, 1)
        with using(isa):
            packing = Packing([cache], np.array([0]), addresses(frame), rows, layout, geometry)
            CpuPageKernels(1).pack_summarized(packing, range(1))
        held = memory[0, rows.channels :][: key.size]
        np.testing.assert_array_equal(held.reshape(24, 24, -1), key.swapaxes(0, 1))


def test_nothing_is_packed() -> None:
    problem = Problem.of(BlockLayout.unpadded(8, 4, 2, 16, torch.float32), "channels", blocks=0)
    assert problem.packed(CpuPageKernels(1)).size == 0


def test_wrong_places_are_refused() -> None:
    """None of these addresses may be followed: they lead nowhere."""
    layout = BlockLayout.unpadded(8, 4, 2, 16, torch.float32)
    caches = [torch.zeros(2, layout.block_bytes // 4)]
    geometry = Problem.of(layout, "channels").geometry
    kernels, slots = CpuPageKernels(1), np.array([4096], np.uint64)
    one, two = SummaryRows(slots), SummaryRows(slots.repeat(2))
    with pytest.raises(ValueError, match="outside the cache's 2 blocks"):
        Packing(caches, np.array([2]), slots, one, layout, geometry)
    for ids, rows in (([0, 1], one), ([0], two), ([0, 1, 1], two)):
        with pytest.raises(ValueError, match="cannot go to 1 frames and"):
            Packing(caches, np.array(ids), slots, rows, layout, geometry)
    packing = Packing(caches, np.array([0]), slots, one, layout, geometry)
    with pytest.raises(ValueError, match=r"must be \[layers \* slots\], of layers of a slot"):
        kernels.pack_summarized(packing, range(1, 2))
    many = _kernels.SlotTails(layout.shape, 1, 512, 1, 2, False, False, 0)
    with pytest.raises(ValueError, match="pages and rows differ in slots"):
        _kernels.pack_summarized(slots, slots.repeat(2), slots, many, 0, -1, 1)
    with pytest.raises(ValueError, match=r"must be \[layers \* slots\]$"):
        _kernels.make_tails(slots.repeat(2), slots, many, 1)

    def call(
        page_bytes: int,
        summary_pages: int,
        channel_pages: int,
        spread: bool = False,
        bits: int = 0,
    ) -> None:
        shape = _kernels.BlockShape(8, 4, 512, 2, 16, _kernels.FLOAT32)
        _kernels.SlotTails(
            shape,
            1,
            page_bytes,
            summary_pages,
            channel_pages,
            spread,
            value_sums=False,
            code_bits=bits,
        )

    for places, message in (
        ((511, 1, 2), "page_bytes"),
        ((512, 0, 2), "summary_pages"),
        ((512, 1, 1), "channel_pages are too few"),
        ((512, 1, -1), "must not be negative"),
        ((512, 1, 2, True), "channels or spread, not both"),
        ((512, 1, 0, True, 2), "codes, channels or spread, only one"),
        ((512, 0, 0, False, 2), "too few for the codes"),
        ((512, 1, 0, False, 3), "1, 2 or 4 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*places)


def _ordered(
    problem: Problem, kernels: CpuPageKernels, order: TokenOrder
) -> tuple[torch.Tensor, Bytes, Bytes]:
    """Tokens of the slots, [layers, blocks, heads, tokens, 2 * size], their frames and tails."""
    _, caches, ids = problem.draw()
    geometry, layout = problem.geometry, problem.layout
    frames = np.full((problem.blocks, geometry.frame_bytes), FILL, np.uint8)
    memory, rows = rows_of(geometry, layout.page_tokens, problem.blocks)
    packing = Packing(caches, ids, addresses(frames), rows, layout, geometry)
    kernels.pack_summarized(packing, range(geometry.layers), order)
    tails = tails_of(memory, geometry, layout.page_tokens, FILL)
    pages = frames[:, geometry.header_bytes :].reshape(problem.blocks, -1, geometry.page_bytes)
    numbers = torch.from_numpy(pages[..., : geometry.payload_bytes].copy()).view(layout.dtype)
    shape = (problem.blocks, geometry.layers, layout.kv_heads, layout.groups, 2, layout.page_tokens)
    tokens = numbers.view(*shape, layout.head_size).permute(1, 0, 2, 3, 5, 4, 6)
    return tokens.reshape(*tokens.shape[:3], layout.block_tokens, -1), frames, tails


def _sources(problem: Problem) -> torch.Tensor:
    """The same in order of their positions."""
    kv, _, _ = problem.draw()
    return kv.permute(0, 1, 4, 3, 2, 5).flatten(4)


@given(problem=problems(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_alike_tokens_share_a_page(problem: Problem, seed: int) -> None:
    """K and V of a token stay together, no token is lost, kept pages and other layers stay; what is
    made of a block is made of its new order; and pages scatter no more than the oracle's."""
    random = np.random.default_rng(seed)
    layout = problem.layout
    layers = random.integers(0, 2, problem.geometry.layers).astype(np.uint8)
    kept = random.integers(0, layout.groups + 1, problem.blocks).astype(np.int32)
    order, source = TokenOrder(layers, kept), _sources(problem)
    for isa in ISAS:
        with using(isa):
            found, frames, tails = _ordered(problem, CpuPageKernels(1), order)
            again, *_ = _ordered(problem, CpuPageKernels(3), order)
            made = np.full_like(tails, FILL)
            slots = layout.with_page_stride(problem.geometry.page_bytes)
            CpuPageKernels(1).make_tails(
                addresses(frames), addresses(made), slots, problem.geometry
            )
        assert torch.equal(found, again)
        np.testing.assert_array_equal(made, tails)
        assert torch.equal(found[layers == 0], source[layers == 0])
        for block, pages in enumerate(kept.tolist()):
            first = pages * layout.page_tokens
            assert torch.equal(found[:, block, :, :first], source[:, block, :, :first])
        assert torch.equal(_sorted(found), _sorted(source))
        scatter = [_scatter(found, layout), 0.0]
        for layer in range(len(layers)):
            for block, pages in enumerate(kept.tolist()):
                for tokens in source[layer, block].float():
                    keys = tokens[:, : layout.head_size].double().numpy()
                    place = np.arange(len(keys))
                    if layers[layer]:
                        place = token_order(keys, layout.page_tokens, pages)
                    scatter[1] += spread_within(keys, place, layout.page_tokens)
        assert scatter[0] <= 1.25 * scatter[1] + 1e-3


def _sorted(tokens: torch.Tensor) -> torch.Tensor:
    """Whole tokens in an order of their own, whatever order they have."""
    flat = tokens.flatten(0, 2).double()
    rows = [torch.tensor(sorted(map(tuple, head.tolist()))) for head in flat]
    return torch.stack(rows)


def _scatter(tokens: torch.Tensor, layout: BlockLayout) -> float:
    key = tokens[..., : layout.head_size].flatten(0, 2).double()
    pages = key.reshape(-1, layout.page_tokens, layout.head_size)
    return float((pages - pages.mean(dim=1, keepdim=True)).square().sum())


def test_clusters_of_keys_become_pages() -> None:
    """Tokens of four kinds, in turns: each kind has its page, in the order of positions."""
    layout = BlockLayout.unpadded(64, 16, 1, 32, torch.bfloat16)
    geometry = Problem.of(layout, "bounds").geometry
    kinds = torch.randn(4, 32, generator=torch.Generator().manual_seed(3)) * 10
    key = kinds.repeat(16, 1)[:, None]
    key += torch.linspace(0, 1, 64)[:, None, None] / 8
    cache = torch.empty(1, layout.block_bytes, dtype=torch.uint8)
    write_block(layout, cache[0], key.bfloat16(), key.bfloat16())
    for isa in ISAS:
        frame = np.zeros((1, geometry.frame_bytes), np.uint8)
        rows = SummaryRows(np.zeros(1, np.uint64))
        order = TokenOrder(np.ones(1, np.uint8), np.zeros(1, np.int32))
        packing = Packing(
            [cache.view(torch.bfloat16)], np.array([0]), addresses(frame), rows, layout, geometry
        )
        with using(isa):
            CpuPageKernels(1).pack_summarized(packing, range(1), order)
        pages = torch.from_numpy(frame[0, geometry.header_bytes :]).view(torch.bfloat16)
        held = pages.view(4, -1)[:, : 2 * 16 * 32].reshape(4, 2, 16, 32)[:, 0].float()
        wanted = {kind: key[kind::4, 0].bfloat16().float() for kind in range(4)}
        owners = [
            next(kind for kind, rows in wanted.items() if torch.equal(rows, page)) for page in held
        ]
        assert sorted(owners) == [0, 1, 2, 3]


def test_features_decide_where_there_are_some() -> None:
    """Of two blocks with the same K one goes by rows of its own: two halves, in turns."""
    layout = BlockLayout.unpadded(32, 16, 2, 16, torch.float32)
    problem = Problem.of(layout, "bounds", layers=2, blocks=2)
    features = torch.zeros(2, 32, 16)
    features[:, 1::2, 3] = 1
    order = TokenOrder(np.ones(2, np.uint8), np.zeros(2, np.int32), {(1, 0): features})
    for isa in ISAS:
        with using(isa):
            found, *_ = _ordered(problem, CpuPageKernels(1), order)
            by_keys, *_ = _ordered(problem, CpuPageKernels(1), TokenOrder(order.layers, order.kept))
        source = _sources(problem)[1, 0]
        halves = torch.cat([source[:, ::2], source[:, 1::2]], 1)
        swapped = torch.cat([source[:, 1::2], source[:, ::2]], 1)
        assert torch.equal(found[1, 0], halves) or torch.equal(found[1, 0], swapped)
        assert torch.equal(found[0], by_keys[0])
        assert torch.equal(found[1, 1], by_keys[1, 1])


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 3e38])
def test_numbers_that_are_none_lose_no_token(broken: float) -> None:
    layout = BlockLayout.unpadded(64, 16, 1, 16, torch.float32)
    problem = Problem.of(layout, "bounds")
    _, caches, _ = problem.draw()
    for cache in caches:
        cache.view(-1)[5::97] = broken
    order = TokenOrder(np.ones(1, np.uint8), np.zeros(1, np.int32))
    for isa in ISAS:
        frame = np.zeros((1, problem.geometry.frame_bytes), np.uint8)
        rows = SummaryRows(np.zeros(1, np.uint64))
        ids = problem.draw()[2]
        packing = Packing(caches, ids, addresses(frame), rows, layout, problem.geometry)
        with using(isa):
            CpuPageKernels(1).pack_summarized(packing, range(1), order)
        block = caches[0][problem.draw()[2][0]]
        pages = torch.from_numpy(frame[0, problem.geometry.header_bytes :].copy())
        held = pages.view(torch.int32).view(4, -1)[:, : 2 * 16 * 16].reshape(4, 2, 256)
        before = block.view(torch.int32).view(4, 2, 256)
        for part in range(2):
            assert torch.equal(
                held[:, part].reshape(64, 16).unique(dim=0, return_counts=True)[1].sort().values,
                before[:, part].reshape(64, 16).unique(dim=0, return_counts=True)[1].sort().values,
            )
            assert torch.equal(
                held[:, part].reshape(64, 16).unique(dim=0),
                before[:, part].reshape(64, 16).unique(dim=0),
            )


def test_a_wrong_order_is_refused() -> None:
    layout = BlockLayout.unpadded(8, 4, 2, 16, torch.float32)
    caches = [torch.zeros(2, layout.block_bytes // 4)]
    geometry = Problem.of(layout, "bounds").geometry
    kernels, slots = CpuPageKernels(1), np.array([4096], np.uint64)
    one, none = np.ones(1, np.uint8), np.zeros(1, np.int32)

    def call(order: TokenOrder) -> None:
        rows = SummaryRows(np.zeros(1, np.uint64))
        packing = Packing(caches, np.array([0]), slots, rows, layout, geometry)
        kernels.pack_summarized(packing, range(1), order)

    for order, message in (
        (TokenOrder(np.ones(2, np.uint8), none), r"ordered must be \[layers\]"),
        (TokenOrder(one, np.zeros(2, np.int32)), r"kept must be \[slots\]"),
        (TokenOrder(one, none - 1), "kept must be pages of a block"),
        (TokenOrder(one, none + 3), "kept must be pages of a block"),
        (TokenOrder(one, none, {(0, 0): torch.zeros(2, 8, 8)}), "cannot be used"),
        (TokenOrder(one, none, {(0, 0): torch.zeros(2, 8, 16).double()}), "cannot be used"),
    ):
        with pytest.raises(ValueError, match=message):
            call(order)
