"""Verification of hits: now and then the last block of one is computed although it is stored.

No list of settings is complete, and not every change of what a model computes can be seen in its
memory. So the first hits after a start, and one in so many later ones, are cut short by a block,
which the request then computes like any other; the workers compare it with the stored one. That is
loaded with the hit, or, where nothing is left of the hit, beside the request, one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.messages import COMPARED, Comparison
from vllm_ssdkv.connector.scheduler.kv_groups import BlockGroups, GroupLoad
from vllm_ssdkv.connector.scheduler.request_state import RequestState
from vllm_ssdkv.store.tier import TierIndex

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
    beside: bool
    """Nothing else of the hit is loaded."""
    loading: bool = False
    """It is loaded beside the request, which may have computed it before."""


class HitVerifier:
    """Chooses hits to verify, and remembers their last blocks. Used by the scheduler's thread."""

    def __init__(
        self,
        every: int,
        most_blocks: int,
        index: TierIndex,
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
        self._loading = False
        """A load of :meth:`load_beside` is under way, also of a request that has ended."""
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
        if not self._every or self._hits < self._next or not blocks:
            return blocks
        fewer = usable(blocks - 1)
        if not fewer and self._loading:
            return blocks
        last = first + blocks - 1
        slot = self._index.find(keys[last])
        if slot is None or blocks - fewer > self._most:
            return blocks
        epoch = self._index.epoch(slot)
        self._offers[request.request_id] = _Check(slot, epoch, keys[last], last, first, not fewer)
        return fewer

    def extend(self, request_id: str, load: GroupLoad) -> GroupLoad:
        """The load of a hit, with the block that is to be compared, which goes to DRAM only."""
        self._hits += 1
        check = self._offers.pop(request_id, None)
        if check is None:
            return load
        slots = self._choose(request_id, check)
        return replace(
            load,
            slots=np.concatenate([load.slots, slots]),
            keys=(*load.keys, check.key),
            block_ids=np.concatenate([load.block_ids, np.zeros(1, dtype=np.int64)]),
            compared=True,
        )

    def load_beside(self, request_id: str) -> GroupLoad | None:
        """The load of a block that is to be compared, of a hit of which all is computed; None: it
        is none of these."""
        check = self._offers.pop(request_id, None)
        if check is None or not check.beside:
            return None
        self._hits += 1
        check.loading = self._loading = True
        slots = self._choose(request_id, check)
        return GroupLoad(slots, (check.key,), np.zeros(1, dtype=np.int64), 1, compared=True)

    def _choose(self, request_id: str, check: _Check) -> NDArray[np.int64]:
        """A hit is verified from now on: its pinned slot, [1]."""
        self._chosen += 1
        more = self._chosen < FIRST_HITS
        self._next = self._hits if more else -(-self._hits // self._every) * self._every
        slots = np.array([check.slot], dtype=np.int64)
        self._index.pin(slots)
        self._checks[request_id] = check
        return slots

    def loaded(self) -> None:
        """The load of :meth:`load_beside` has ended."""
        self._loading = False
        for check in self._checks.values():
            check.loading = False

    def restart(self) -> None:
        """Verify the next hit: the cache was reset, and weights may have changed."""
        self._next = min(self._next, self._hits)

    def keeps(self, slot: int) -> bool:
        """Check whether a slot's block is stored and computed at this time, to be compared."""
        checks = (*self._checks.values(), *self._compared.values())
        return any(check.slot == slot for check in checks)

    def computed(
        self, state: RequestState, oldest: int, blocks: int, groups: BlockGroups
    ) -> Comparison | None:
        """The comparison at the end of a step that has computed the block of a check, if any; where
        the stored one comes later, of a step behind that.

        Args:
            state: The request.
            oldest: First block that HBM still has in this step.
            blocks: Number of blocks that are complete at the end of it.
            groups: KV cache groups, of which the chain's block is compared.
        """
        check = self._checks.get(state.request_id)
        if check is None or check.block >= blocks or check.loading:
            return None
        if check.block < oldest:
            self.result(state.request_id, math.nan, differs=False)  # it has left the window
            return None
        del self._checks[state.request_id]
        self._compared[state.request_id] = check
        fence = 0
        if len(state.block_ids) == 1 and not check.beside:
            # In page mode the first blocks of a hit are not in HBM: the newest of them is.
            ids = state.block_ids[0]
            fence = ids[check.first] or ids[check.block - 1]
        block_id = groups.chain_block(state.block_ids, check.block)
        load = COMPARED if check.beside else state.request_id
        return Comparison(state.request_id, check.slot, check.epoch, block_id, load, fence)

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
