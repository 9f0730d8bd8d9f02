"""Chosen pages in the memory of the device: those that are chosen again need not cross the link.

Kernels alone keep them there. The places of a layer's KV head are sets of :data:`WAYS`, and a page
belongs to one set. Where it is not held, it takes the place of the set that was used longest ago,
unless this step uses all of them: then it is read from where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch
import triton.language as tl

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.memory.device_memory import DeviceMemory
from vllm_ssdkv.triton_kernels.launch import inline, jit, on_device_of
from vllm_ssdkv.triton_kernels.resolve import Choice, Listed

WAYS: Final = 8
"""Places of a set."""

_TILE: Final = 64
_CHUNK: Final = 4
"""Pages that a program brings, one after the other."""

_WORDS = tl.constexpr(1024)
_FACTOR = tl.constexpr(0x9E3779B97F4A7C15)


@inline
def _chosen_of(
    line: int,
    begin_ptr: torch.Tensor,
    end_ptr: torch.Tensor,
    row_ptr: torch.Tensor,
    columns_ptr: torch.Tensor,
    identity_ptr: torch.Tensor,
    blocks: int,
    KV_HEADS: tl.constexpr,
) -> tuple[int, int, torch.Tensor]:
    """Begin and end of a list, empty if it has all pages of its context, and where the identities
    of its row begin."""
    entry = line // KV_HEADS
    begin = tl.load(begin_ptr + line)
    end = tl.load(end_ptr + line)
    end = tl.where(end - begin < tl.load(columns_ptr + entry), end, begin)
    return begin, end, identity_ptr + tl.load(row_ptr + entry).to(tl.int64) * blocks


@inline
def _key_and_set(
    position: torch.Tensor,
    identity_ptr: torch.Tensor,
    head: int,
    sets: int,
    GROUPS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WAYS: tl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key of a KV head's pages at these positions, never 0, and the first place of their set."""
    column = position // PAGE_TOKENS
    identity = tl.load(identity_ptr + column // GROUPS)
    key = identity * GROUPS + column % GROUPS + 1
    mixed = key.to(tl.uint64, bitcast=True) * _FACTOR
    number = (mixed >> 32).to(tl.int64) % sets
    return key, (head * sets + number) * WAYS


@jit
def _find_kernel(
    begin_ptr: torch.Tensor,
    end_ptr: torch.Tensor,
    address_ptr: torch.Tensor,
    position_ptr: torch.Tensor,
    row_ptr: torch.Tensor,
    columns_ptr: torch.Tensor,
    identity_ptr: torch.Tensor,
    key_ptr: torch.Tensor,
    used_ptr: torch.Tensor,
    clock_ptr: torch.Tensor,
    memory: int,
    blocks: int,
    sets: int,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    begin, end, identity_ptr = _chosen_of(
        line, begin_ptr, end_ptr, row_ptr, columns_ptr, identity_ptr, blocks, KV_HEADS
    )
    now = tl.load(clock_ptr)
    way = tl.arange(0, WAYS)
    for start in range(begin, end, TILE):
        i = start + tl.arange(0, TILE)
        position = tl.load(position_ptr + i, mask=i < end, other=0)
        key, first = _key_and_set(
            position, identity_ptr, line % KV_HEADS, sets, GROUPS, PAGE_TOKENS, WAYS
        )
        at = first[:, None] + way[None, :]
        held = tl.load(key_ptr + at, mask=(i < end)[:, None], other=0)
        found = tl.max(tl.where(held == key[:, None], way[None, :], -1), 1)
        there = (found >= 0) & (i < end)
        tl.store(used_ptr + first + found, now, mask=there)
        tl.store(address_ptr + i, memory + (first + found) * PAGE_BYTES, mask=there)


@jit
def _fill_kernel(
    begin_ptr: torch.Tensor,
    end_ptr: torch.Tensor,
    address_ptr: torch.Tensor,
    position_ptr: torch.Tensor,
    row_ptr: torch.Tensor,
    columns_ptr: torch.Tensor,
    identity_ptr: torch.Tensor,
    key_ptr: torch.Tensor,
    used_ptr: torch.Tensor,
    clock_ptr: torch.Tensor,
    memory: int,
    blocks: int,
    sets: int,
    nowhere: int,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    WAYS: tl.constexpr,
    PAYLOAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    begin, end, identity_ptr = _chosen_of(
        line, begin_ptr, end_ptr, row_ptr, columns_ptr, identity_ptr, blocks, KV_HEADS
    )
    now = tl.load(clock_ptr)
    memory_end = memory + KV_HEADS * tl.cast(sets, tl.int64) * WAYS * PAGE_BYTES
    way = tl.arange(0, WAYS)
    begin += tl.program_id(1) * CHUNK
    for i in range(begin, tl.minimum(end, begin + CHUNK)):
        address = tl.load(address_ptr + i)
        here = (address >= memory) & (address < memory_end)
        if (address != nowhere) & (here == 0):
            position = tl.load(position_ptr + i)
            key, first = _key_and_set(
                position, identity_ptr, line % KV_HEADS, sets, GROUPS, PAGE_TOKENS, WAYS
            )
            # One thread reads for all: other programs write these words, and all must agree.
            used = tl.atomic_add(used_ptr + first + way, 0, sem="relaxed")
            oldest = tl.min(used, 0)
            place = first + tl.min(tl.where(used == oldest, way, WAYS), 0)
            if oldest < now:  # noqa: SIM102 - a kernel has no short circuit
                # Another list may want the same place.
                if tl.atomic_cas(used_ptr + place, oldest, now) == oldest:
                    tl.store(key_ptr + place, key)
                    target = memory + place * PAGE_BYTES
                    from_ptr = address.to(tl.pointer_type(tl.int64))
                    to_ptr = target.to(tl.pointer_type(tl.int64))
                    for start in range(0, PAYLOAD // 8, _WORDS):
                        word = start + tl.arange(0, _WORDS)
                        mask = word < PAYLOAD // 8
                        tl.store(to_ptr + word, tl.load(from_ptr + word, mask=mask), mask=mask)
                    tl.store(address_ptr + i, target)


@dataclass(frozen=True, slots=True)
class ResidentPages:
    """Places for pages of every layer and KV head.

    Attributes:
        memory: Memory of the places, of all layers in order.
        page_bytes: Bytes from a place to the next.
        key: Page in each place, int64 [layers, kv_heads, sets * WAYS]; 0: none.
        used: Step that used it last, int32, of the same shape.
        clock: The step, int32 [1].
        identity: What each block of each row holds, int64 [rows, blocks]: no number ever stands
            for other bytes.
    """

    memory: DeviceMemory
    page_bytes: int
    key: torch.Tensor
    used: torch.Tensor
    clock: torch.Tensor
    identity: torch.Tensor

    @classmethod
    def empty(
        cls, memory: DeviceMemory, shape: tuple[int, int, int], identity: torch.Tensor
    ) -> Self:
        """Nothing is held. ``memory`` has at least :data:`WAYS` places for each KV head of each
        layer. ``shape``: layers, KV heads, and bytes of a place."""
        layers, heads, page_bytes = shape
        sets = memory.places // (layers * heads * WAYS)
        key = torch.zeros((layers, heads, sets * WAYS), dtype=torch.int64, device=identity.device)
        used = torch.zeros_like(key, dtype=torch.int32)
        clock = torch.zeros(1, dtype=torch.int32, device=identity.device)
        return cls(memory, page_bytes, key, used, clock, identity)

    def begin(self) -> None:
        """A step begins."""
        self.clock.add_(1)

    def find(self, layer: int, listed: Listed, choice: Choice, layout: BlockLayout) -> None:
        """Have the lists of a layer name the places of their pages that are held.

        Lists with all pages of their context stay as they are. Queued on the current stream.

        Args:
            layer: Its number.
            listed: Pages that were chosen.
            choice: Rows that chose them.
            layout: Layout of a block in a slot; pages are multiples of 8 bytes.
        """
        operands, sizes = self._operands(layer, listed, choice, layout)
        with on_device_of(self.key):
            _find_kernel[(len(listed.begin),)](*operands, **sizes, TILE=_TILE, num_warps=4)

    def fill(self, layer: int, listed: Listed, choice: Choice, layout: BlockLayout) -> None:
        """Bring the other pages to places, and have these lists name them: as :meth:`find`, after
        it. Pages that are nowhere stay out."""
        operands, sizes = self._operands(layer, listed, choice, layout)
        lists = len(listed.begin)
        with on_device_of(self.key):
            _fill_kernel[(lists, -(-(len(listed.address) // lists) // _CHUNK))](
                *operands,
                choice.nowhere.data_ptr(),
                **sizes,
                PAYLOAD=layout.page_payload_bytes,
                CHUNK=_CHUNK,
                num_warps=4,
            )

    def _operands(
        self, layer: int, listed: Listed, choice: Choice, layout: BlockLayout
    ) -> tuple[tuple[torch.Tensor | int, ...], dict[str, int]]:
        """Operands of both kernels: values, and sizes."""
        _, heads, places = self.key.shape
        operands = (
            listed.begin,
            listed.end,
            listed.address,
            listed.position,
            choice.row,
            choice.columns,
            self.identity,
            self.key[layer],
            self.used[layer],
            self.clock,
            self.memory.address + layer * heads * places * self.page_bytes,
            self.identity.shape[1],
            places // WAYS,
        )
        return operands, {
            "KV_HEADS": heads,
            "GROUPS": layout.groups,
            "PAGE_TOKENS": layout.page_tokens,
            "PAGE_BYTES": self.page_bytes,
            "WAYS": WAYS,
        }
