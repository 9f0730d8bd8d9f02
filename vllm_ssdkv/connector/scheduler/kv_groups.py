"""The model's KV cache groups: layers with full attention, with sliding windows, with a state.

vLLM hands out blocks to each group of layers apart, and takes those behind a window back. Layers of
different groups lie over each other in HBM, so a block is as many bytes whatever its group, and a
slot holds a block of one group. All blocks of all groups are stored; of a hit, a group with a
window needs the blocks that the next token attends to.

Blocks of some groups may have more tokens than those of others. A block of ours has the tokens of
the scheduler's block, which is a whole number of blocks of every group. A group with n of them to
one of ours counts as n groups, its *parts*: part p has the group's blocks p, n + p, 2n + p and so
on. Below, a group is a part, which of most models is the whole of it.

Layers that have a state (Mamba, linear attention, short convolutions) have a block for it at the
ends of some blocks of tokens; vLLM says which these are ("align"). A hit ends at one of them, and
needs nothing else of such a group. A group with states has one part, the last: a hit ends with a
block of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from vllm_ssdkv.connector.scheduler.load_or_recompute import ALL_ATTEND_TO_ALL, HitConstraints
from vllm_ssdkv.connector.scheduler.request_state import RequestState
from vllm_ssdkv.connector.scheduler.speculation import Speculation
from vllm_ssdkv.store.tier import TierIndex

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

Slots = NDArray[np.int64]
_NO_SLOTS = np.zeros(0, dtype=np.int64)
_FAR = 1 << 40
"""More tokens than any window has."""

_PLACES = 16
"""Ends of a hit that are tried: each is a lookup of all windows."""

_STATES_HELD = 4
"""HBM blocks that a request holds at a time of a group with a state, at most: those that the step
under way starts from and ends in, the one that the next step ends in, and one for the end of the
prompt's last whole block."""


def held_at_most(manager: SingleTypeKVCacheManager, blocks: int) -> int:
    """Most blocks that a request of so many in a group holds in HBM at a time."""
    most: int | None = manager.max_admission_blocks_per_request
    if isinstance(manager.kv_cache_spec, MambaSpec):
        most = _STATES_HELD
    return blocks if most is None else min(blocks, most)


@dataclass(frozen=True, slots=True)
class _Part:
    """The blocks of a KV cache group that lie at one place in each block of ours.

    Attributes:
        manager: vLLM's, of the group.
        group: vLLM's number of the group.
        place: Number of the part.
        of: Blocks of the group to one of ours.
    """

    manager: SingleTypeKVCacheManager
    group: int
    place: int = 0
    of: int = 1

    @property
    def spec(self) -> KVCacheSpec:
        """Spec of the group."""
        return self.manager.kv_cache_spec

    def ids(self, block_ids: Sequence[Sequence[int]]) -> Sequence[int]:
        """HBM blocks of the part, of those of all groups."""
        ids = block_ids[self.group]
        return ids if self.of == 1 else ids[self.place :: self.of]

    def first_held(self, computed: int) -> int:
        """The first block that vLLM keeps for a request with so many tokens computed."""
        skipped = int(self.manager.get_num_skipped_tokens(computed))
        tokens: int = self.spec.block_size
        block = max(0, skipped) // tokens  # of a state before any token it says -1
        return max(0, -(-(block - self.place) // self.of))

    def held_at_most(self, blocks: int) -> int:
        """Most blocks that a request of so many holds in HBM at a time."""
        if isinstance(self.spec, MambaSpec):
            # The group has no other part.
            return held_at_most(self.manager, blocks * self.of)
        return min(blocks, -(-held_at_most(self.manager, blocks * self.of) // self.of))


def _parts_of(manager: SingleTypeKVCacheManager, group: int, block_tokens: int) -> list[_Part]:
    spec = manager.kv_cache_spec
    of = block_tokens // spec.block_size
    places = [of - 1] if isinstance(spec, MambaSpec) else range(of)
    return [_Part(manager, group, place, of) for place in places]


@dataclass(frozen=True, slots=True)
class GroupHit:
    """Stored blocks of a request, by group.

    Attributes:
        slots: Of the blocks of the *chain*, the group that keeps every block, [n].
        besides: What the other groups need, and where the chain has a window itself.
        shared: Blocks of the chain that are stored, also those that others cannot follow.
    """

    slots: Slots
    besides: HitConstraints
    shared: int


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Slots of a hit, [n], with their keys, and the HBM blocks that the last of them go to; those
    of the chain, the first ``chain``, before those of other groups. ``behind``: see
    :class:`HitConstraints`. ``compared``: the last slot is."""

    slots: Slots
    keys: tuple[bytes, ...]
    block_ids: NDArray[np.int64]
    chain: int
    behind: int = 0
    compared: bool = False


@dataclass(frozen=True, slots=True)
class GroupBlock:
    """A block of one of vLLM's KV cache groups, as vLLM counts them.

    Attributes:
        group: vLLM's number of the group.
        spec: Its spec.
        number: Place of the block in a request, in blocks of the group.
        hashes: vLLM's hashes to a block; its own is the last of them.
    """

    group: int
    spec: KVCacheSpec
    number: int
    hashes: int

    @property
    def first_token(self) -> int:
        """Its first token."""
        return int(self.number * self.spec.block_size)

    @property
    def last_hash(self) -> int:
        """Place of its hash among those of its request."""
        return (self.number + 1) * self.hashes - 1


class BlockGroups:
    """Keys, needs and hits of each group. Used by the scheduler's thread.

    Attributes:
        hbm: vLLM's block manager; None before it exists.
        chain: The group that keeps every block.
    """

    def __init__(
        self,
        managers: Sequence[SingleTypeKVCacheManager],
        index: TierIndex,
        block_tokens: int,
        speculation: Speculation,
        hashes_per_block: int = 1,
    ):
        """``managers``: vLLM's, one per group; :meth:`bind` has others take their place.
        ``hashes_per_block``: see :class:`EngineFacts`."""
        self._index, self._block, self._speculation = index, block_tokens, speculation
        self._hash_tokens = block_tokens // hashes_per_block
        self.hbm: KVCacheManager | None = None
        self._set_managers(managers)

    def bind(self, hbm: KVCacheManager) -> None:
        """vLLM's block manager exists now."""
        self.hbm = hbm
        self._set_managers(hbm.coordinator.single_type_managers)

    def _set_managers(self, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        self._parts = [
            part
            for group, manager in enumerate(managers)
            for part in _parts_of(manager, group, self._block)
        ]
        every = range(len(self._parts))
        whole = [g for g in every if not self._parts[g].manager.get_num_skipped_tokens(_FAR)]
        # Of a window shorter than a block of ours, HBM may have the last part only.
        chains = whole or [g for g in every if not self._parts[g].group][-1:]
        self.chain = chains[0] if chains else 0  # there are no managers yet
        self._others = [g for g in every if g != self.chain]
        self._whole = whole[1:]
        self._recurrent = [g for g in every if isinstance(self._parts[g].spec, MambaSpec)]
        self._windows = len(whole) < len(every)

    def __len__(self) -> int:
        """Number of groups."""
        return len(self._parts)

    @property
    def has_states(self) -> bool:
        """Check whether some layers have a state in place of KV."""
        return bool(self._recurrent)

    @property
    def lasting(self) -> bool:
        """Check whether a request keeps all of its HBM blocks for as long as it runs."""
        return not (self._windows or self._recurrent)

    def first_held(self, group: int, computed: int) -> int:
        """The first block that vLLM keeps for a request with so many tokens computed."""
        return self._parts[group].first_held(computed)

    def chain_block(self, block_ids: Sequence[Sequence[int]], block: int) -> int:
        """HBM block of a block of the chain, of those of all of vLLM's groups."""
        return self._parts[self.chain].ids(block_ids)[block]

    def keys(self, keys: Sequence[bytes], group: int) -> Sequence[bytes]:
        """Keys of a group's blocks, of the same tokens as ``keys``, which are the chain's."""
        if group == self.chain:
            return keys
        tag = self._tag(group)
        return [key[:-1] + bytes((key[-1] ^ tag,)) for key in keys]

    def by_part(self, keys: Sequence[bytes]) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Every group, with its :meth:`keys`."""
        for group in range(len(self._parts)):
            yield group, self.keys(keys, group)

    def block(self, group: int, block: int) -> GroupBlock:
        """A block of a group as vLLM knows it."""
        part = self._parts[group]
        number, hashes = block * part.of + part.place, part.spec.block_size // self._hash_tokens
        return GroupBlock(part.group, part.spec, number, hashes)

    @staticmethod
    def _tag(group: int) -> int:
        """Mark in the last byte that tells keys of a group from those of the chain."""
        return group + 1

    def _beside(self, keys: Sequence[bytes], first: int, end: int) -> tuple[list[Slots], int]:
        """Slots that the other groups need at block ``end`` of a request whose first blocks are in
        HBM; and the first block that one of them lacks, or ``end``. ``keys`` are of all blocks."""
        found, least = [], end
        for group in self._others:
            begin = max(first, self.first_held(group, end * self._block))
            slots = self._index.lookup(self.keys(keys[begin:end], group))
            found.append(slots)
            least = min(least, begin + len(slots))
        return found, least

    def hit(self, keys: Sequence[bytes], first: int) -> GroupHit:
        """The longest beginning of blocks ``first`` on that every group has what it needs of.

        Where the windows of a long chain are gone, not all places are looked at where one might be
        left: nothing is found then.
        """
        slots = self._speculation.usable(self._index.lookup(keys[first:]))
        end = shared = first + len(slots)
        for _ in range(_PLACES):
            end = self._last_state(keys, first, end)
            found, least = self._beside(keys, first, end)
            if least == end:
                behind = max(0, self.first_held(self.chain, end * self._block) - first)
                besides = HitConstraints(
                    np.concatenate([_NO_SLOTS, *found]),
                    behind,
                    lambda count: self._follow(keys, first, first + count),
                )
                return GroupHit(slots[: end - first], besides, shared)
            # No end between the two would do: windows that end later do not begin earlier.
            end = least
        return GroupHit(_NO_SLOTS, ALL_ATTEND_TO_ALL, shared)

    def _last_state(self, keys: Sequence[bytes], first: int, end: int) -> int:
        """The last place up to block ``end`` for which all states are stored; or ``first``, where
        the request is."""
        if not self._recurrent:
            return end
        tags = [self._tag(group) for group in self._recurrent]
        return self._index.last(keys, first, min(end, len(keys)), tags)

    def _follow(self, keys: Sequence[bytes], first: int, end: int) -> bool:
        return self._beside(keys, first, end)[1] == end

    def mark_shared(self, request: Request, hit: GroupHit) -> None:
        """Have vLLM end a step where others have begun alike, as HBM's own cache does, so that a
        state is stored for the next one: where more of a request's chain is stored than its states
        can follow."""
        if self._recurrent:
            boundary = max(request.shared_prefix_boundary, hit.shared * self._block)
            request.shared_prefix_boundary = boundary

    def completed(
        self,
        state: RequestState,
        output: SchedulerOutput,
        keys: Sequence[bytes],
        first: int,
        computed: int,
    ) -> Iterator[tuple[int, bytes, int]]:
        """Blocks of a request in HBM after a step, from ``first`` on, of which ``keys`` are: the
        block, its key in its group, and its HBM block. ``computed``: tokens before the step.

        vLLM tells of a state in the step that ends with it, or, where its tokens are not known by
        then, in the next one, which does not write where it lies; later it may be gone."""
        held_ids = [part.ids(state.block_ids) for part in self._parts]
        for group, ids in enumerate(held_ids):
            if group not in self._recurrent:
                # vLLM has taken back what was behind the group's window before this step.
                held = max(first, self.first_held(group, computed))
                for block, key in enumerate(self.keys(keys[held - first :], group), held):
                    if ids[block]:
                        yield block, key, ids[block]
        told = output.kv_connector_block_state
        offers = [] if told is None else told.boundary_state_offloads.get(state.request_id, [])
        if first == 0 and computed and not computed % self._block:
            # It goes on from states that were in HBM, which another request may have left there
            # without that they were stored. The step leaves them as they are.
            last = (computed - 1) // self._block
            of_state = [(self._parts[g].group, held_ids[g][last]) for g in self._recurrent]
            offers = [*((group, block_id, computed) for group, block_id in of_state), *offers]
        parts = {self._parts[g].group: g for g in self._recurrent}
        for group, block_id, tokens in offers:
            block, beside = divmod(tokens, self._block)
            if block_id and not beside and first < block <= first + len(keys):
                (key,) = self.keys(keys[block - 1 - first : block - first], parts[group])
                yield block - 1, key, block_id

    def load(
        self,
        keys: Sequence[bytes],
        first: int,
        block_ids: Sequence[Sequence[int]],
        *,
        whole: bool,
    ) -> GroupLoad:
        """Plan a load into the HBM blocks that vLLM has allocated, each group's from the request's
        beginning, for blocks ``first`` to the end. ``whole``: also the slots of blocks that have no
        place in HBM.

        Raises:
            RuntimeError: something of it is not stored any more.
        """
        slots, targets = [], []
        named: list[bytes] = []
        for group in (self.chain, *self._others):
            ids = np.array(self._parts[group].ids(block_ids), dtype=np.int64)
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
        end = len(self._parts[self.chain].ids(block_ids))
        behind = end - first - len(slots[0])
        return GroupLoad(
            np.concatenate(slots), tuple(named), np.concatenate(targets), len(slots[0]), behind
        )

    def touch(
        self,
        keys: Sequence[bytes],
        hit: int,
        retain: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        """A request with these blocks has ended, of which ``hit`` were found. ``retain`` is called
        with the keys of each chain, if they are to be more than the most recently used.

        As a chain, tails are evicted before heads, of all groups that keep everything together. The
        windows that others need to go on from one of the two places go last: without them the
        chain is of no use. Two blocks more, because the newest one may not be stored, and a drafter
        may have another one computed again. So do the last states up to the two places.
        """
        mark = self._index.touch_chain if retain is None else retain
        chains = [self.keys(keys, group) for group in (self.chain, *self._whole)]
        mark([key for block in zip(*chains, strict=True) for key in block])
        for end in (hit, len(keys)):
            last = self._last_state(keys, 0, end)
            for group in self._others:
                if group in self._whole:
                    continue
                if group in self._recurrent:
                    of_group = keys[max(0, last - 1) : last]
                else:
                    of_group = keys[self.first_held(group, max(0, end - 2) * self._block) : end]
                mark(self.keys(of_group, group))

    # ---- HBM ----

    def _needed(self, hit: int, tokens: int) -> int:
        """HBM blocks that a request of so many tokens holds at a time, at most, from the end of
        its hit on, in blocks."""
        needed = len(self._parts) * self._speculation.step_blocks
        for part in self._parts:
            blocks = -(-tokens // self._block) - part.first_held(hit * self._block)
            needed += part.held_at_most(blocks)
        return needed

    def has_room(
        self, request: Request, first: int, hit: int, states: Iterable[RequestState]
    ) -> bool:
        """Reuse mode: whether a request, of which ``first`` blocks are in HBM, may be loaded up to
        block ``hit`` beside those that have been, ``states``, and do not run yet. (In page mode
        :class:`TieredManager` has vLLM do this right.)

        vLLM admits a load only if all of the prompt will fit. But of a group with a window it takes
        a request's whole block table off what the request holds at a time, null blocks behind the
        window included: after a hit that is longer than a window, nothing seems to be missing. With
        loads admitted on that ground nobody may be left who can go on.
        """
        if not self._windows:
            return True
        needed = self._needed(hit, request.num_tokens) - self._in_use(request, first, hit)
        others = False
        for state in states:
            others = True
            if state.hit and not state.running:
                held = sum(
                    state.hit - part.first_held(state.hit * self._block) for part in self._parts
                )
                needed += max(0, self._needed(state.hit, state.request.num_tokens) - held)
        return not others or needed <= self._parts[0].manager.block_pool.get_num_free_blocks()

    def _in_use(self, request: Request, first: int, hit: int) -> int:
        """Number of blocks in HBM that the request will hold, and that others hold."""
        pool, count = self._parts[0].manager.block_pool, 0
        for group, part in enumerate(self._parts):
            for block in range(part.first_held(hit * self._block), first):
                number = self.block(group, block).last_hash
                found = pool.get_cached_block(request.block_hashes[number], [part.group])
                count += found is not None and found[0].ref_cnt > 0
        return count
