"""Loads that no request waits for: probes and promotions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.connector.messages import PROBE, PROMOTION, SlotArray
from vllm_ssdkv.connector.scheduler.block_keys import BlockKeys
from vllm_ssdkv.connector.scheduler.kv_groups import GroupLoad
from vllm_ssdkv.connector.scheduler.request_state import RequestState
from vllm_ssdkv.store.index.slot_index import SlotState
from vllm_ssdkv.store.tier import TierIndex

if TYPE_CHECKING:
    from vllm.v1.request import Request

StartLoad = Callable[[str, GroupLoad], None]
"""Plans a load under a name; its slots are pinned until it has ended."""

_NOWHERE = np.zeros(0, dtype=np.int64)


class BackgroundLoads:
    """Plans them, in the scheduler, one of a kind at a time.

    A *promotion* brings blocks into DRAM that running requests read from the devices in every step.
    DRAM had no room when they were loaded or computed, and streaming never takes any; when other
    requests end there is room, and nobody else would use it for them. Workers know what is missing
    and how much room there is, and say so after such a step.
    """

    def __init__(self, index: TierIndex, keys_of: BlockKeys, start: StartLoad):
        self._index = index
        self._keys_of = keys_of.of
        self._start = start

    def probe(self, request: Request, blocks: range) -> None:
        """Read these blocks of a request to learn how long it takes."""
        keys = self._keys_of(request, blocks.stop, blocks.start)
        slots = self._index.lookup(keys)
        self._begin(PROBE, slots, keys[: len(slots)], np.zeros(len(slots), dtype=np.int64))

    def promote(
        self, requests: Mapping[str, RequestState], streamed: Sequence[tuple[str, SlotArray]]
    ) -> None:
        """Bring these blocks of requests in, as far as they still run and are written."""
        keys: dict[int, bytes] = {}
        for request_id, blocks in streamed:
            state = requests.get(request_id)
            if state is None:
                continue
            for slot in (state.slots[b] for b in blocks.tolist() if b < len(state.slots)):
                if self._index.state(slot) is SlotState.READY:
                    keys[slot] = self._index.key(slot)
        slots = np.array(list(keys), dtype=np.int64)
        if len(slots):
            self._begin(PROMOTION, slots, list(keys.values()))

    def _begin(
        self,
        name: str,
        slots: SlotArray,
        keys: Sequence[bytes],
        block_ids: NDArray[np.int64] = _NOWHERE,
    ) -> None:
        self._index.pin(slots)
        self._start(name, GroupLoad(slots, tuple(keys), block_ids, len(slots)))
