"""Pages that kernels keep in the memory of a device: what lists name, and who goes first."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.tails import memory_at
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.memory.device_memory import DeviceMemory
from vllm_ssdkv.triton_kernels.resident_pages import WAYS, ResidentPages
from vllm_ssdkv.triton_kernels.resolve import Choice, Listed

ROWS, BLOCKS, LAYERS, HEADS, GROUPS, TOKENS, SIZE = 3, 6, 2, 2, 2, 4, 8
COLUMNS = BLOCKS * GROUPS
PAYLOAD = 2 * TOKENS * SIZE * 2
STRIDE = PAYLOAD + 64
LAYOUT = BlockLayout(GROUPS * TOKENS, TOKENS, HEADS, SIZE, STRIDE, torch.float16)
OTHERS = torch.zeros(0)

Pages = list[list[int]]
"""Columns that each list chose."""


@dataclass
class Rig:
    """Blocks in DRAM, whose content is their identity, and places on the device."""

    sets: int
    identity: torch.Tensor = field(
        default_factory=lambda: torch.arange(ROWS * BLOCKS).view(ROWS, BLOCKS)
    )

    def __post_init__(self) -> None:
        places = LAYERS * HEADS * self.sets * WAYS
        self.memory = torch.zeros((places, STRIDE), dtype=torch.uint8)
        shape = LAYERS, HEADS, STRIDE
        held = DeviceMemory(self.memory.data_ptr(), places, lambda source, to: None)
        self.hot = ResidentPages.empty(held, shape, self.identity)
        self.nowhere = torch.zeros(STRIDE, dtype=torch.uint8)
        self.row = torch.arange(ROWS, dtype=torch.int32)

    def page(self, layer: int, line: int, column: int) -> torch.Tensor:
        """Bytes of a page by what it is."""
        identity = int(self.identity[int(self.row[line // HEADS]), column // GROUPS])
        name = ((identity * LAYERS + layer) * HEADS + line % HEADS) * GROUPS + column % GROUPS
        draw = torch.Generator().manual_seed(name)
        return torch.randint(1, 256, (STRIDE,), generator=draw, dtype=torch.uint8)

    def serve(self, layer: int, chosen: Pages, missing: int = -1) -> list[bool]:
        """Serve and check these lists; True for each page that lies on the device then. The one
        with the number ``missing`` has not come."""
        room, lists = COLUMNS, ROWS * HEADS
        begin = torch.arange(lists, dtype=torch.int32) * room
        end = begin + torch.tensor([len(pages) for pages in chosen], dtype=torch.int32)
        address = torch.zeros(lists * room, dtype=torch.int64)
        position = torch.zeros_like(address)
        flat = [(line, j, c) for line, pages in enumerate(chosen) for j, c in enumerate(pages)]
        held = torch.stack([self.page(layer, line, column) for line, _, column in flat])
        for i, (line, j, column) in enumerate(flat):
            at = line * room + j
            address[at] = self.nowhere.data_ptr() if i == missing else held[i].data_ptr()
            position[at] = column * TOKENS
        columns = torch.full((ROWS,), COLUMNS, dtype=torch.int32)
        choice = Choice(self.row, columns, columns, columns, OTHERS, self.nowhere, *[OTHERS] * 4)
        before = address.clone()
        listed = Listed(begin, end, address, position)
        self.hot.find(layer, listed, choice, LAYOUT)
        self.hot.fill(layer, listed, choice, LAYOUT)
        here = []
        first, size = self.memory.data_ptr(), self.memory.numel()
        for i, (line, j, _) in enumerate(flat):
            at = line * room + j
            here.append(first <= int(address[at]) < first + size)
            assert here[-1] or address[at] == before[at]
            if here[-1] or i != missing:
                found = memory_at(int(address[at]), PAYLOAD)
                np.testing.assert_array_equal(found, held[i, :PAYLOAD].numpy())
        return here


@settings(max_examples=10, deadline=None)
@given(data=st.data(), sets=st.integers(1, 3))
def test_lists_name_the_bytes_that_were_chosen(data: st.DataObject, sets: int) -> None:
    """Rows change places, and blocks what they hold."""
    rig = Rig(sets)
    columns = st.lists(st.integers(0, COLUMNS - 1), unique=True, max_size=COLUMNS).map(sorted)
    for step in range(data.draw(st.integers(1, 4))):
        rig.hot.begin()
        rig.row.copy_(torch.tensor(data.draw(st.permutations(range(ROWS))), dtype=torch.int32))
        row, block = data.draw(st.integers(0, ROWS - 1)), data.draw(st.integers(0, BLOCKS - 1))
        rig.identity[row, block] = 1000 + step
        for layer in range(LAYERS):
            chosen = [data.draw(columns) for _ in range(ROWS * HEADS)]
            if any(chosen):
                rig.serve(layer, chosen, data.draw(st.integers(-1, 3)))


def alone(*pages: int) -> Pages:
    """Lists of which the first one alone chooses pages."""
    return [list(pages)] + [[]] * (ROWS * HEADS - 1)


def test_the_page_used_longest_ago_goes_first() -> None:
    rig = Rig(sets=1)
    for column in range(WAYS):
        rig.hot.begin()
        assert rig.serve(0, alone(column)) == [True]
    rig.hot.begin()
    assert rig.serve(0, alone(0)) == [True]
    used = rig.hot.used[0, 0].clone()
    rig.hot.begin()
    assert rig.serve(0, alone(WAYS)) == [True]
    changed = (rig.hot.used[0, 0] != used).nonzero().flatten().tolist()
    assert changed == [1], "the place of column 1, as 0 was used again"
    assert not rig.hot.key[1].any()
    assert not rig.hot.key[0, 1].any()


def test_a_step_takes_no_place_that_it_uses() -> None:
    rig = Rig(sets=1)
    rig.hot.begin()
    assert rig.serve(0, alone(*range(COLUMNS - 1))) == [True] * WAYS + [False] * 3
    rig.hot.begin()
    assert rig.serve(0, alone(*range(COLUMNS - 1))) == [True] * WAYS + [False] * 3


def test_a_list_of_everything_takes_no_place() -> None:
    rig = Rig(sets=2)
    rig.hot.begin()
    assert rig.serve(0, alone(*range(COLUMNS))) == [False] * COLUMNS
    assert not rig.hot.key.any()


def test_two_rows_with_the_same_block_share_a_place() -> None:
    rig = Rig(sets=1)
    rig.identity[1, 2] = rig.identity[0, 3]
    rig.hot.begin()
    assert rig.serve(0, alone(3 * GROUPS)) == [True]
    key = rig.hot.key.clone()
    rig.hot.begin()
    second = [[], [], [2 * GROUPS], [], [], []]
    assert rig.serve(0, second) == [True]
    assert torch.equal(rig.hot.key, key)
