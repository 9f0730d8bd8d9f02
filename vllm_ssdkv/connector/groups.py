"""The model's KV cache groups: layers with full attention, and those with sliding windows.

vLLM hands out blocks to each group of layers apart, and takes those behind a window back. Layers of
different groups lie over each other in HBM, so a block is as many bytes whatever its group, and a
slot holds a block of one group. All blocks of all groups are stored; of a hit, a group with a
window needs the blocks that the next token attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.index import SlotIndex

if TYPE_CHECKING:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

Slots = NDArray[np.int64]
_NO_SLOTS = np.zeros(0, dtype=np.int64)
_FAR = 1 << 40
"""More tokens than any window has."""


@dataclass(frozen=True, slots=True)
class GroupHit:
    """What the store holds of a request.

    Attributes:
        slots: Of the blocks of the *chain*, the group that keeps every block, [n].
        beside: Of the blocks in the other groups' windows.
    """

    slots: Slots
    beside: Slots


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Slots of a hit, [n], with their keys, and the HBM blocks that the last of them go to; those
    of the chain, the first ``chain``, before those of other groups."""

    slots: Slots
    keys: tuple[bytes, ...]
    block_ids: NDArray[np.int64]
    chain: int


class BlockGroups:
    """Keys, needs and hits of each group. Used by the scheduler's thread."""

    def __init__(
        self,
        managers: Sequence[SingleTypeKVCacheManager],
        index: SlotIndex,
        block_tokens: int,
    ):
        """``managers``: vLLM's, one per group."""
        self._skipped: list[Callable[[int], int]] = [m.get_num_skipped_tokens for m in managers]
        self._index, self._block = index, block_tokens
        whole = [g for g, skipped in enumerate(self._skipped) if not skipped(_FAR)]
        self.chain = whole[0] if whole else 0
        self._others = [g for g in range(len(managers)) if g != self.chain]

    def first_held(self, group: int, computed: int) -> int:
        """The first block that vLLM keeps for a request with so many tokens computed."""
        return self._skipped[group](computed) // self._block

    def keys(self, keys: Sequence[bytes], group: int) -> Sequence[bytes]:
        """Keys of a group's blocks, of the same tokens as ``keys``, which are the chain's."""
        if group == self.chain:
            return keys
        return [key[:-1] + bytes((key[-1] ^ (group + 1),)) for key in keys]

    def _beside(self, keys: Sequence[bytes], first: int, end: int) -> tuple[list[Slots], int]:
        """What the other groups need at block ``end`` of a request whose first blocks are in HBM;
        and the first block that one of them lacks, or ``end``. ``keys`` are of all blocks."""
        found, least = [], end
        for group in self._others:
            begin = max(first, self.first_held(group, end * self._block))
            slots = self._index.lookup(self.keys(keys[begin:end], group))
            found.append(slots)
            least = min(least, begin + len(slots))
        return found, least

    def hit(self, keys: Sequence[bytes], first: int, slots: Slots) -> GroupHit:
        """The longest beginning of ``slots``, which the chain has from block ``first`` on, that
        every group can follow."""
        end = first + len(slots)
        while end > first and self._others:
            found, least = self._beside(keys, first, end)
            if least == end:
                return GroupHit(slots[: end - first], np.concatenate(found))
            # No end between the two would do: windows that end later do not begin earlier.
            end = least
        return GroupHit(slots[: end - first], _NO_SLOTS)

    def follows(self, keys: Sequence[bytes], first: int, end: int) -> bool:
        """Whether every group has what it needs to go on after block ``end``."""
        return self._beside(keys, first, end)[1] == end

    def load(
        self,
        keys: Sequence[bytes],
        first: int,
        block_ids: Sequence[Sequence[int]],
        *,
        whole: bool,
    ) -> GroupLoad:
        """What to load into the HBM blocks that vLLM has allocated, each group's from the
        request's beginning, for blocks ``first`` to the end. ``whole``: also the slots of blocks
        that have no place in HBM.

        Raises:
            RuntimeError: something of it is not stored any more.
        """
        slots, targets = [], []
        named: list[bytes] = []
        for group in (self.chain, *self._others):
            ids = np.array(block_ids[group], dtype=np.int64)
            live = np.flatnonzero(ids[first:])
            in_hbm = first + int(live[0]) if len(live) else len(ids)
            begin = first if whole else in_hbm
            wanted = self.keys(keys[begin:], group)
            found = self._index.lookup(wanted)
            if len(found) != len(ids) - begin:
                raise RuntimeError("the index changed between lookup and allocation")
            slots.append(found)
            named += wanted
            targets.append(ids[in_hbm:])
        return GroupLoad(
            np.concatenate(slots), tuple(named), np.concatenate(targets), len(slots[0])
        )

    def touch(self, keys: Sequence[bytes]) -> None:
        """A request with these blocks has ended. As a chain, tails are evicted before heads; the
        windows that a longer one would need go last: without them the chain is of no use."""
        self._index.touch(self._index.lookup(keys))
        for group in self._others:
            begin = self.first_held(group, len(keys) * self._block)
            self._index.touch(self._index.lookup(self.keys(keys[begin:], group)))
