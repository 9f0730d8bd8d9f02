"""Verification of hits: now and then the last block of one is computed although it is stored.

No list of settings is complete, and not every change of what a model computes can be seen in its
memory. So the first hits after a start, and one in so many later ones, are cut short by a block,
which the request then computes like any other; the workers compare it with the stored one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.messages import Comparison
from vllm_ssdkv.connector.scheduler.kv_groups import GroupLoad
from vllm_ssdkv.connector.scheduler.request_state import RequestState
from vllm_ssdkv.store.block_index import BlockIndex

if TYPE_CHECKING:
    from vllm.v1.request import Request

FIRST_HITS: Final = 4
"""Hits after a start that are verified, whatever ``verify_hits`` says, unless it is 0."""


@dataclass(slots=True)
class _Check:
    """A block of a request: stored in a pinned slot, and to be computed."""

    slot: int
    epoch: int
    key: bytes
    block: int
    first: int
    """First block that was not in HBM before."""


class HitVerifier:
    """Chooses hits to verify, and remembers their last blocks. Used by the scheduler's thread."""

    def __init__(
        self,
        every: int,
        most_blocks: int,
        index: BlockIndex,
        unpin: Callable[[Sequence[int]], None],
        counters: Counters,
    ):
        """
        Args:
            every: One hit in so many is verified; 0: none is.
            most_blocks: To compute for it, at most.
            index: Of the store.
            unpin: Undoes one pin of slots.
            counters: Where results are counted.
        """
        self._every, self._most = every, most_blocks
        self._index, self._unpin, self._counters = index, unpin, counters
        self._hits = self._chosen = 0
        self._next = 0
        """Number of the hit that is to be verified, or the first one after it that can be."""
        self._offers: dict[str, _Check] = {}
        self._checks: dict[str, _Check] = {}
        self._compared: dict[str, _Check] = {}

    def __bool__(self) -> bool:
        """Check whether anything is remembered."""
        return bool(self._offers or self._checks or self._compared)

    def shorten(
        self,
        request: Request,
        keys: Sequence[bytes],
        first: int,
        blocks: int,
        usable: Callable[[int], int],
    ) -> int:
        """Number of a hit's ``blocks``, of which ``first`` is the first, to load: fewer where it is
        to be verified. ``usable``: how many of so many blocks all layers can go on after."""
        self._offers.pop(request.request_id, None)
        if not self._every or self._hits < self._next or blocks < 2:
            return blocks
        fewer = usable(blocks - 1)
        last = first + blocks - 1
        slot = self._index.find(keys[last])
        if slot is None or not fewer > 0 or blocks - fewer > self._most:
            return blocks
        epoch = self._index.epoch(slot)
        self._offers[request.request_id] = _Check(slot, epoch, keys[last], last, first)
        return fewer

    def extend(self, request_id: str, load: GroupLoad) -> GroupLoad:
        """The load of a hit, with the block that is to be compared, which goes to DRAM only."""
        self._hits += 1
        check = self._offers.pop(request_id, None)
        if check is None:
            return load
        self._chosen += 1
        more = self._chosen < FIRST_HITS
        self._next = self._hits if more else -(-self._hits // self._every) * self._every
        slots = np.array([check.slot], dtype=np.int64)
        self._index.pin(slots)
        self._checks[request_id] = check
        return replace(
            load,
            slots=np.concatenate([load.slots, slots]),
            keys=(*load.keys, check.key),
            block_ids=np.concatenate([load.block_ids, np.zeros(1, dtype=np.int64)]),
            compared=True,
        )

    def restart(self) -> None:
        """Verify the next hit: the cache was reset, and weights may have changed."""
        self._next = min(self._next, self._hits)

    def keeps(self, slot: int) -> bool:
        """Check whether a slot's block is stored and computed at this time, to be compared."""
        checks = (*self._checks.values(), *self._compared.values())
        return any(check.slot == slot for check in checks)

    def computed(
        self, state: RequestState, after: int, block_tokens: int, group: int, layers: int
    ) -> Comparison | None:
        """The comparison at the end of a step that has computed the block of a check, if any."""
        check = self._checks.get(state.request_id)
        if check is None or after < (check.block + 1) * block_tokens:
            return None
        del self._checks[state.request_id]
        self._compared[state.request_id] = check
        fence = 0
        if len(state.block_ids) == 1:
            # In page mode the first blocks of a hit are not in HBM: the newest of them is.
            ids = state.block_ids[0]
            fence = ids[check.first] or ids[check.block - 1]
        block_id = state.block_ids[group][check.block]
        return Comparison(state.request_id, check.slot, check.epoch, layers, block_id, fence)

    def result(self, request_id: str, deviation: float, *, differs: bool) -> None:
        """A worker has compared them."""
        self.forget(request_id)
        if deviation != deviation:  # noqa: PLR0124 - NaN: another one is to be verified in its place
            self._next = min(self._next, self._hits)
        kind = "differs" if differs else "skipped" if deviation != deviation else "same"  # noqa: PLR0124
        self._counters.add("verified_hits", 1, result=kind)

    def forget(self, request_id: str) -> None:
        """The request has ended, or starts again."""
        self._offers.pop(request_id, None)
        for checks in (self._checks, self._compared):
            check = checks.pop(request_id, None)
            if check is not None:
                self._unpin([check.slot])
