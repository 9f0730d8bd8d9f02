"""vLLM's KV events of stored blocks, by which routers send requests to where their blocks are.

Drives are vLLM's medium ``STORAGE``: a block is told of when it is durable, and when it cannot be
found any more. DRAM is its medium ``CPU``, of which the scheduler has an estimate.

Blocks of an earlier run, and those that are found again after a reset, are told of when a request
is admitted that begins with them: only then are their hashes and tokens known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from vllm_ssdkv.connector.scheduler.block_keys import BlockKeys
from vllm_ssdkv.connector.scheduler.kv_groups import BlockGroups, GroupBlock
from vllm_ssdkv.connector.scheduler.load_or_recompute import LoadOrRecompute
from vllm_ssdkv.connector.scheduler.slot_ledger import PendingWrites
from vllm_ssdkv.connector.scheduler.suspension import Suspension
from vllm_ssdkv.store.index.slot_index import SlotIndex

if TYPE_CHECKING:
    from vllm.v1.request import Request


class _Name(NamedTuple):
    """A block as routers know it.

    Attributes:
        epoch: Use of its slot.
        hash: vLLM's.
        group: vLLM's number of its KV cache group.
        adapter: vLLM's number of its adapter; 0: it has none.
    """

    epoch: int
    hash: bytes
    group: int
    adapter: int


class KVEvents:
    """Events of one engine's own store. Used by the scheduler's thread.

    About 500 bytes a block that was told of, in this process.
    """

    def __init__(
        self,
        index: SlotIndex,
        groups: BlockGroups,
        keys: BlockKeys,
        writing: PendingWrites,
        choice: LoadOrRecompute,
        suspension: Suspension,
    ):
        """``index`` and ``choice`` tell of what changes from now on."""
        self._index, self._groups, self._keys = index, groups, keys
        self._writing, self._resident, self._suspension = writing, choice.resident, suspension
        self._told: dict[str, dict[int, _Name]] = {MEDIUM_STORAGE: {}, MEDIUM_CPU: {}}
        """Blocks that routers know of, by medium and slot."""
        self._copies: Counter[tuple[str, bytes, int]] = Counter()
        """Slots that a block of these lies in, by medium, hash and group: several where the blocks
        of a group are shorter than ours, and requests part within one of ours."""
        self._written_soon: dict[int, tuple[_Name, BlockStored]] = {}
        self._held_soon: dict[int, tuple[_Name, BlockStored]] = {}
        """Blocks that this step may have brought into DRAM, by slot."""
        self._events: list[BlockStored | BlockRemoved] = []
        index.listener = self
        choice.resident.left = self.left_dram

    # ---- what requests know ----

    def look(self, request: Request, first: int, end: int) -> None:
        """Take in which of a request's blocks ``first`` to ``end`` are stored, unless only requests
        that choose alike find them."""
        if self._suspension or self._keys.hidden:
            return
        decoded = self._keys.decoded_from(request)
        chain = self._keys.of(request, end if decoded is None else min(end, decoded), first)
        for part, keys in self._groups.by_part(chain):
            for block, key in enumerate(keys, first):
                slot = self._index.find(key)
                if slot is not None and not self._knows(slot):
                    self._learn(request, self._groups.block(part, block), slot)

    def _knows(self, slot: int) -> bool:
        epoch, told = self._index.epoch(slot), self._told.values()
        known = [slot in names and names[slot].epoch == epoch for names in told]
        return all(known) or (known[0] and slot not in self._resident)

    def _learn(self, request: Request, block: GroupBlock, slot: int) -> None:
        name, event = self._named(request, block, slot)
        if slot in self._writing:
            self._written_soon[slot] = name, event
        else:
            self._stored(slot, name, event, MEDIUM_STORAGE)
        self._held_soon[slot] = name, event

    def _named(self, request: Request, block: GroupBlock, slot: int) -> tuple[_Name, BlockStored]:
        adapter, tokens = request.lora_request, block.spec.block_size
        start, own = block.first_token, request.block_hashes[block.last_hash]
        before = request.block_hashes[block.last_hash - block.hashes] if start else None
        extra, _ = generate_block_hash_extra_keys(request, start, start + tokens, 0)
        event = BlockStored(
            block_hashes=[maybe_convert_block_hash(own)],
            parent_block_hash=None if before is None else maybe_convert_block_hash(before),
            token_ids=request.all_token_ids[start : start + tokens],
            block_size=tokens,
            lora_id=None if adapter is None else adapter.adapter_id,
            medium=None,
            lora_name=None if adapter is None else adapter.name,
            extra_keys=to_event_extra_keys([extra]),
            group_idx=block.group,
            kv_cache_spec_kind=get_kv_cache_spec_kind(block.spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(block.spec),
            session_id=request.session_id,
        )
        number = 0 if adapter is None else adapter.adapter_id
        return _Name(self._index.epoch(slot), own, block.group, number), event

    def _stored(self, slot: int, name: _Name, event: BlockStored, medium: str) -> None:
        told = self._told[medium]
        if told.get(slot) != name:
            self._forget([slot], medium)
            told[slot] = name
            self._copies[medium, name.hash, name.group] += 1
            if self._copies[medium, name.hash, name.group] == 1:
                self._events.append(_on(event, medium))

    # ---- what becomes of them ----

    def durable(self, slots: Iterable[int]) -> None:
        """Slots are journalled."""
        for slot in slots:
            name, event = self._written_soon.pop(slot, (None, None))
            if name is not None and event is not None and name.epoch == self._index.epoch(slot):
                self._stored(slot, name, event, MEDIUM_STORAGE)

    def moved(self, old: Iterable[int], new: Iterable[int]) -> None:
        """Blocks have other slots now."""
        for medium, names in self._told.items():
            for before, after in zip(old, new, strict=True):
                self._forget([after], medium)
                if before in names:
                    names[after] = names.pop(before)._replace(epoch=self._index.epoch(after))

    def gone(self, slots: Iterable[int]) -> None:
        """Slots hold nothing any more that can be found."""
        slots = list(slots)
        for medium in self._told:
            self._forget(slots, medium)

    def left_dram(self, slot: int) -> None:
        """A slot has no frame any more, as far as one knows."""
        self._forget([slot], MEDIUM_CPU)

    def hide(self, adapters: Collection[int] | None = None) -> None:
        """Nothing that was stored so far is found, for now or for ever; with ``adapters`` what was
        computed with these."""
        for soon in (self._written_soon, self._held_soon):
            for slot in _of(adapters, {slot: name for slot, (name, _) in soon.items()}):
                del soon[slot]
        for medium, names in self._told.items():
            self._forget(_of(adapters, names), medium)

    def _forget(self, slots: Iterable[int], medium: str) -> None:
        """Tell that these are not stored, of those that routers know of."""
        told, gone = self._told[medium], defaultdict(list)
        for slot in slots:
            name = told.pop(slot, None)
            if name is None:
                continue
            self._copies[medium, name.hash, name.group] -= 1
            if not self._copies[medium, name.hash, name.group]:
                del self._copies[medium, name.hash, name.group]
                gone[name.group].append(maybe_convert_block_hash(name.hash))
        for group, hashes in gone.items():
            self._events.append(BlockRemoved(hashes, medium, group_idx=group))

    def take(self) -> list[BlockStored | BlockRemoved]:
        """Events since the last call."""
        for slot, (name, event) in self._held_soon.items():
            if slot in self._resident and self._index.holds(slot, name.epoch):
                self._stored(slot, name, event, MEDIUM_CPU)
        self._held_soon.clear()
        events, self._events = self._events, []
        return events


def _of(adapters: Collection[int] | None, names: Mapping[int, _Name]) -> list[int]:
    """Slots of blocks that were computed with these adapters; None: of all."""
    return [slot for slot, name in names.items() if adapters is None or name.adapter in adapters]


def _on(event: BlockStored, medium: str) -> BlockStored:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return BlockStored(**{**fields, "medium": medium})
