"""Hits of models whose layers are in several KV cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vllm.v1.request import Request

from tests.conftest import SOAK_ROUNDS
from tests.connector.simulation import STATE, specs
from vllm_ssdkv.connector.scheduler.kv_groups import BlockGroups
from vllm_ssdkv.connector.scheduler.request_state import RequestState
from vllm_ssdkv.connector.scheduler.speculation import NO_SPECULATION, Speculation
from vllm_ssdkv.store.index.slot_index import SlotIndex

BLOCK = 16
BLOCKS = 12
KEYS = [bytes([block]) * 32 for block in range(BLOCKS)]


def manager(window: int | None, tokens: int) -> Any:  # noqa: ANN401 - of vLLM
    """What vLLM says of the tokens that a group's layers do not attend to any more."""
    (spec,) = specs([window], None, [tokens])

    def skipped(computed: int) -> int:
        if window == STATE:
            return computed - 1
        return 0 if window is None else max(0, computed - window + 1)

    return cast(Any, SimpleNamespace(get_num_skipped_tokens=skipped, kv_cache_spec=spec))


def groups_of(
    windows: list[int | None],
    index: SlotIndex | None = None,
    speculation: Speculation = NO_SPECULATION,
    sizes: Sequence[int] | None = None,
) -> BlockGroups:
    """``sizes``: tokens of a block of each group."""
    sizes = sizes or [BLOCK] * len(windows)
    managers = [manager(w, size) for w, size in zip(windows, sizes, strict=True)]
    per_block = BLOCK // min(sizes)
    return BlockGroups(managers, index or SlotIndex(100, None), BLOCK, speculation, per_block)


def store(index: SlotIndex, key: bytes) -> int:
    slot = int(index.allocate(1)[0])
    assert index.publish(slot, key)
    index.durable(slot)
    index.unpin(np.array([slot], dtype=np.int64))
    return slot


def needed(window: int | None, first: int, end: int, last: int = BLOCK - 1) -> range:
    """Blocks that a group with this window must have, the first of which are in HBM, to go on after
    block ``end``: those with a token that the next one attends to, or the last state. ``last``: of
    each block of ours, the last token that is the group's."""
    if window is None:
        return range(first, end)
    if window == STATE:
        return range(max(first, end - 1), end)
    oldest = max(0, end * BLOCK - window + 1)
    found = [block for block in range(first, end) if block * BLOCK + last >= oldest]
    return range(min(found, default=end), end)


@pytest.mark.parametrize(
    ("windows", "chain"), [([None], 0), ([40, None], 1), ([40, None, None], 1), ([40, 8], 0)]
)
def test_the_chain_is_the_first_group_that_keeps_everything(
    windows: list[int | None], chain: int
) -> None:
    assert groups_of(windows).chain == chain


def test_the_newest_block_of_the_chain_is_in_hbm() -> None:
    """A window of 4 tokens, in blocks of 8, does not hold the earlier part of the last block."""
    groups = groups_of([4, 40], sizes=[8, BLOCK])
    assert groups.chain_block([[0, 0, 0, 7], [5, 6]], 1) == 7


def test_groups_have_keys_of_their_own() -> None:
    groups = groups_of([40, None, 40])
    assert groups.keys(KEYS, 1) == KEYS, "as in a store of a model with one group"
    every = [key for group in range(3) for key in groups.keys(KEYS, group)]
    assert len(set(every)) == 3 * BLOCKS
    assert all(len(key) == 32 for key in every)


@settings(max_examples=100 if SOAK_ROUNDS is None else 1000)
@given(
    made=st.lists(
        st.tuples(st.none() | st.just(STATE) | st.integers(1, 90), st.sampled_from([4, 8, BLOCK])),
        min_size=1,
        max_size=3,
    ),
    missing=st.sets(st.tuples(st.integers(0, 11), st.integers(0, BLOCKS - 1)), max_size=20),
    first=st.integers(0, BLOCKS),
)
def test_the_longest_hit_that_every_group_can_follow(
    made: list[tuple[int | None, int]], missing: set[tuple[int, int]], first: int
) -> None:
    """Also where a block of ours is several of a group: each of them is stored or not."""
    assume(any(window is None for window, _ in made) or all(window != STATE for window, _ in made))
    index = SlotIndex(200, None)
    groups = groups_of([window for window, _ in made], index, sizes=[size for _, size in made])
    # Of each part its window, and its last token in a block.
    parts = [
        (window, end - 1)
        for window, size in made
        for end in ([BLOCK] if window == STATE else range(size, BLOCK + 1, size))
    ]
    assert len(groups) == len(parts)
    stored = {}
    for group in range(len(parts)):
        for block, key in enumerate(groups.keys(KEYS, group)):
            if (group, block) not in missing:
                stored[group, block] = store(index, key)
    others = [group for group in range(len(parts)) if group != groups.chain]

    def wanted(group: int, end: int) -> range:
        window, last = parts[group]
        return needed(window, first, end, last)

    def fits(end: int) -> bool:
        return all((groups.chain, block) in stored for block in range(first, end)) and all(
            (group, block) in stored for group in others for block in wanted(group, end)
        )

    end = max(end for end in range(first, BLOCKS + 1) if end == first or fits(end))
    hit = groups.hit(KEYS, first)
    assert hit.slots.tolist() == [stored[groups.chain, b] for b in range(first, end)]
    gone = [b for b in range(first, BLOCKS) if (groups.chain, b) not in stored]
    assert hit.shared == min([*gone, BLOCKS])
    beside = [stored[g, b] for g in others for b in wanted(g, end)]
    assert hit.besides.slots.tolist() == (beside if end > first else [])
    held = wanted(groups.chain, end)
    assert hit.besides.behind == (held.start - first if end > first else 0)
    for count in range(1, len(hit.slots) + 1):
        assert hit.besides.follows(count) == fits(first + count)


def test_what_is_loaded_goes_where_vllm_has_blocks() -> None:
    index = SlotIndex(100, None)
    groups = groups_of([40, None], index)
    full = [store(index, key) for key in KEYS]
    window = [store(index, key) for key in groups.keys(KEYS, 0)]
    ids = [[0] * 9 + [7, 8, 9], list(range(20, 32))]
    load = groups.load(KEYS, 4, ids, whole=False)
    assert load.slots.tolist() == full[4:] + window[9:]
    assert load.block_ids.tolist() == [*range(24, 32), 7, 8, 9]
    assert load.keys == (*KEYS[4:], *groups.keys(KEYS, 0)[9:])
    assert load.chain == 8
    index.drop(window[10])
    with pytest.raises(RuntimeError, match="the index changed"):
        groups.load(KEYS, 4, ids, whole=False)


def test_parts_are_loaded_where_vllm_has_their_blocks() -> None:
    """A window of 20 tokens in blocks of 8, two to one of 16."""
    index = SlotIndex(100, None)
    groups = groups_of([20, None], index, sizes=[8, BLOCK])
    first, second, whole = ([store(index, key) for key in groups.keys(KEYS, g)] for g in range(3))
    ids = [[0] * 21 + [7, 8, 9], list(range(20, 32))]
    load = groups.load(KEYS, 4, ids, whole=False)
    assert load.slots.tolist() == whole[4:] + first[11:] + second[10:]
    assert load.block_ids.tolist() == [*range(24, 32), 8, 7, 9]
    assert [groups.first_held(group, 12 * BLOCK) for group in range(3)] == [11, 10, 0]
    state = RequestState(cast(Request, SimpleNamespace(request_id="a")), block_ids=ids)
    none = cast(Any, SimpleNamespace(kv_connector_block_state=None))
    found = list(groups.completed(state, none, KEYS[10:], 10, 12 * BLOCK))
    assert found == [
        (11, groups.keys(KEYS, 0)[11], 8),
        (10, groups.keys(KEYS, 1)[10], 7),
        (11, groups.keys(KEYS, 1)[11], 9),
        (10, KEYS[10], 30),
        (11, KEYS[11], 31),
    ]


def test_parts_that_keep_everything_go_together() -> None:
    """Full attention in blocks of 8: the store has room for half of both parts."""
    index = SlotIndex(2 * BLOCKS, None)
    groups = groups_of([None], index, sizes=[8])
    for group in range(2):
        for key in groups.keys(KEYS, group):
            store(index, key)
    groups.touch(KEYS, 0)
    for new in range(BLOCKS):
        store(index, bytes([100 + new]) * 32)
    assert len(groups.hit(KEYS, 0).slots) == BLOCKS // 2


def test_all_that_a_retained_request_goes_on_from_is_retained() -> None:
    """Of both parts of full attention, and the windows at the ends of what was found and asked."""
    index = SlotIndex(3 * BLOCKS, None)
    groups = groups_of([None, 40], index)
    for group in range(2):
        for key in groups.keys(KEYS, group):
            store(index, key)
    groups.touch(KEYS, 6, lambda chain: index.retain_chain(chain, 60, 1.0))
    for new in range(8 * BLOCKS):
        store(index, bytes([100 + new]) * 32)
    assert len(groups.hit(KEYS, 0).slots) == BLOCKS
    assert len(groups.hit(KEYS[:6], 0).slots) == 6
    assert BLOCKS < index.gauges()["retained"] < 2 * BLOCKS


def test_a_context_of_which_hbm_has_a_window() -> None:
    """Page mode: the slots of all of it, the HBM blocks of its end."""
    index = SlotIndex(100, None)
    slots = [store(index, key) for key in KEYS]
    load = groups_of([40], index).load(KEYS, 0, [[0] * 9 + [7, 8, 9]], whole=True)
    assert load.slots.tolist() == slots
    assert load.block_ids.tolist() == [7, 8, 9]


def test_a_window_alone_is_loaded_where_it_is() -> None:
    index = SlotIndex(100, None)
    slots = [store(index, key) for key in KEYS]
    load = groups_of([40], index).load(KEYS, 0, [[0] * 9 + [7, 8, 9]], whole=False)
    assert load.slots.tolist() == slots[9:]
    assert (load.chain, load.behind) == (3, 9)


def evict(index: SlotIndex, count: int) -> None:
    """As new blocks do."""
    for number in range(count):
        index.unpin(index.allocate(1))
        assert number < count


@pytest.mark.parametrize("speculation", [NO_SPECULATION, Speculation(drops_last=True)])
@pytest.mark.parametrize("last_is_stored", [True, False])
def test_the_ends_of_a_request_go_last(speculation: Speculation, last_is_stored: bool) -> None:
    """First what no request could go on from: the windows but for those at the end of what was
    found, and of what was asked for."""
    index = SlotIndex(2 * BLOCKS, None)
    groups = groups_of([40, None], index, speculation)
    for key in KEYS if last_is_stored else KEYS[:-1]:
        store(index, key)
    for key in groups.keys(KEYS if last_is_stored else KEYS[:-1], 0):
        store(index, key)
    groups.touch(KEYS, 6)
    whole = len(groups.hit(KEYS, 0).slots)
    assert whole == BLOCKS - (not last_is_stored) - speculation.drops_last
    # Windows of 3 blocks, and two more, at either end.
    evict(index, index.free_now() + 2 * BLOCKS - BLOCKS - 10 - 2 * (not last_is_stored))
    assert len(groups.hit(KEYS, 0).slots) == whole
    assert len(groups.hit(KEYS[:6], 0).slots) == 6 - speculation.drops_last


def test_windows_that_are_gone_are_not_looked_for_everywhere() -> None:
    """A long chain of which some window has a block here and there."""
    index = SlotIndex(1000, None)
    groups = groups_of([40, None], index)
    keys = [block.to_bytes(2, "big") * 16 for block in range(400)]
    for key in keys:
        store(index, key)
    window = groups.keys(keys, 0)
    for block in range(0, 400, 2):
        store(index, window[block])
    assert len(groups.hit(keys, 0).slots) == 0
    for block in range(381, 399, 2):
        store(index, window[block])
    assert len(groups.hit(keys, 0).slots) == 399


def test_the_last_state_is_found_however_far_back() -> None:
    """vLLM keeps one where a step of the prompt ended: between them are thousands of tokens."""
    index = SlotIndex(2000, None)
    groups = groups_of([STATE, None, STATE], index)
    keys = [block.to_bytes(2, "big") * 16 for block in range(400)]
    for key in keys:
        store(index, key)
    for group, blocks in ((0, (19, 99, 300)), (2, (19, 99, 350))):
        for block in blocks:
            store(index, groups.keys(keys, group)[block])
    hit = groups.hit(keys, 0)
    assert (len(hit.slots), len(hit.besides.slots), hit.shared) == (100, 2, 400)
    assert [end for end in range(1, 101) if hit.besides.follows(end)] == [20, 100]
    assert len(groups.hit(keys, 100).slots) == 0, "it goes on where it is"


def test_states_at_the_ends_of_a_request_go_last() -> None:
    index = SlotIndex(2 * BLOCKS, None)
    groups = groups_of([None, STATE], index)
    states = groups.keys(KEYS, 1)
    for key in (*KEYS, *states):
        store(index, key)
    groups.touch(KEYS, 6)
    for new in range(BLOCKS - 2):
        store(index, bytes([100 + new]) * 32)
    assert [block for block, key in enumerate(states) if index.find(key) is not None] == [5, 11]
    assert (len(groups.hit(KEYS[:6], 0).slots), len(groups.hit(KEYS, 0).slots)) == (6, BLOCKS)


def test_vllm_is_told_where_others_went_on_otherwise() -> None:
    index = SlotIndex(100, None)
    for key in KEYS[:7]:
        store(index, key)
    for windows, shared in (([None, STATE], 7 * BLOCK), ([None, 40], 0)):
        groups = groups_of(cast(Any, windows), index)
        for known in (0, 3 * BLOCK, 9 * BLOCK):
            request = cast(Request, SimpleNamespace(shared_prefix_boundary=known))
            groups.mark_shared(request, groups.hit(KEYS, 0))
            assert request.shared_prefix_boundary == max(known, shared)


def told(*offers: tuple[int, int, int]) -> Any:  # noqa: ANN401 - of vLLM
    """A step after which there are these states: group, HBM block, tokens."""
    state = SimpleNamespace(boundary_state_offloads={"a": list(offers), "b": [(1, 77, 2 * BLOCK)]})
    return SimpleNamespace(kv_connector_block_state=state)


def test_states_are_stored_where_vllm_says_that_they_are() -> None:
    groups = groups_of([None, STATE])
    request = cast(Request, SimpleNamespace(request_id="a"))
    state = RequestState(request, block_ids=[[11, 12, 13, 14], [0, 0, 23, 24]])
    keys, of_state = KEYS[1:3], groups.keys(KEYS, 1)
    whole = [(1, KEYS[1], 12), (2, KEYS[2], 13)]
    for offers, found in (
        ([], []),
        ([(1, 90, 3 * BLOCK)], [(2, of_state[2], 90)]),
        ([(1, 90, 2 * BLOCK), (1, 91, 3 * BLOCK)], [(1, of_state[1], 90), (2, of_state[2], 91)]),
        ([(1, 90, 3 * BLOCK - 1)], []),  # between blocks
        ([(1, 90, BLOCK), (1, 91, 4 * BLOCK)], []),  # looked at before, and not known yet
    ):
        output = told(*cast(Any, offers))
        assert list(groups.completed(state, output, keys, 1, 20)) == [*whole, *cast(Any, found)]
    none = cast(Any, SimpleNamespace(kv_connector_block_state=None))
    assert list(groups.completed(state, none, keys, 1, 20)) == whole


def test_a_state_that_was_in_hbm_is_stored_with_the_blocks_that_were() -> None:
    """vLLM does not say again that it is there."""
    groups = groups_of([None, STATE, STATE])
    request = cast(Request, SimpleNamespace(request_id="c"))
    state = RequestState(request, block_ids=[[11, 12, 13, 14], [0, 22, 23, 24], [0, 32, 0, 34]])
    keys, output = KEYS[:3], told()
    chain = [(block, key, 11 + block) for block, key in enumerate(keys)]
    both = [(1, groups.keys(KEYS, 1)[1], 22), (1, groups.keys(KEYS, 2)[1], 32)]
    for computed, found in ((2 * BLOCK, both), (3 * BLOCK, [(2, groups.keys(KEYS, 1)[2], 23)])):
        assert list(groups.completed(state, output, keys, 0, computed)) == [*chain, *found]
    for first, computed in ((0, 0), (0, 2 * BLOCK + 1), (0, 4 * BLOCK), (1, 2 * BLOCK)):
        begun = list(groups.completed(state, output, keys[first:], first, computed))
        assert begun == chain[first:], (first, computed)


def test_a_state_within_a_block_of_ours_is_not_stored() -> None:
    """States in blocks of 8, two to one of 16: HBM's hit ended between them."""
    groups = groups_of([None, STATE], sizes=[BLOCK, 8])
    request = cast(Request, SimpleNamespace(request_id="c"))
    state = RequestState(request, block_ids=[[11, 12], [0, 0, 23]])
    found = list(groups.completed(state, told(), KEYS[:1], 0, BLOCK + 8))
    assert found == [(0, KEYS[0], 11)]
    state = RequestState(request, block_ids=[[11, 12], [0, 0, 0, 24]])
    found = list(groups.completed(state, told(), KEYS[:2], 0, 2 * BLOCK))
    assert found == [(0, KEYS[0], 11), (1, KEYS[1], 12), (1, groups.keys(KEYS, 1)[1], 24)]


# ---- room in HBM ----


def state(hit: int, tokens: int, *, running: bool = False) -> RequestState:
    return RequestState(asking(tokens), hit=hit, running=running)


def asking(tokens: int) -> Request:
    found = SimpleNamespace(num_tokens=tokens, block_hashes=KEYS)
    return cast(Request, found)


def pooled(
    windows: list[int | None],
    most: list[int | None],
    used: set[int],
    sizes: Sequence[int] | None = None,
) -> Any:  # noqa: ANN401 - groups
    """Groups over a pool in which others hold these blocks of the first group; and a way to ask
    for room when so many blocks are free."""
    groups = groups_of(windows, sizes=sizes)

    def cached(key: bytes, ids: list[int]) -> list[Any] | None:
        block = KEYS.index(key)
        held = ids == [groups.chain] and block in used
        return [SimpleNamespace(ref_cnt=int(held))] if block < BLOCKS - 1 else None

    for part, cap in zip(groups._parts, most, strict=True):
        one = cast(Any, part.manager)
        one.max_admission_blocks_per_request = cap
        one.block_pool = SimpleNamespace(get_cached_block=cached)

    def has_room(first: int, states: list[RequestState], free: int) -> bool:
        pool = cast(Any, groups._parts[0].manager.block_pool)
        pool.get_num_free_blocks = lambda: free
        return groups.has_room(asking(320), first, 10, states)

    return has_room


def test_a_load_needs_room_for_all_that_is_computed_after_it() -> None:
    """Of 20 blocks, a full group holds all, windows 5 and 7 at a time."""
    has_room = pooled([None, 40, 64], [None, 5, 7], set())
    needed = 20 + 5 + 7
    other = state(0, 100)
    assert has_room(0, [other], needed)
    assert not has_room(0, [other], needed - 1)
    assert has_room(0, [], 0), "alone it fits, or vLLM would not have started"
    # One that was loaded has 10 + 3 + 4 blocks already; one that runs can be preempted.
    assert not has_room(0, [state(10, 320)], 2 * needed - 18)
    assert has_room(0, [state(10, 320)], 2 * needed - 17)
    assert has_room(0, [state(10, 320, running=True)], needed)
    assert pooled([None], [None], set())(0, [other], 0), "vLLM counts that itself"


@pytest.mark.parametrize("size", [BLOCK, 8])
def test_a_request_holds_few_states_at_a_time(size: int) -> None:
    has_room = pooled([None, STATE], [None, None], set(), [BLOCK, size])
    needed = 20 + 4
    assert has_room(0, [state(0, 100)], needed)
    assert not has_room(0, [state(0, 100)], needed - 1)
    # One that was loaded has 10 blocks and its state.
    assert has_room(0, [state(10, 320)], 2 * needed - 11)
    assert not has_room(0, [state(10, 320)], 2 * needed - 12)


def test_parts_need_room_for_their_blocks() -> None:
    """A full group holds 20 blocks for 320 tokens, and a window of 20 tokens 4 blocks of 8."""
    index = SlotIndex(100, None)
    groups = groups_of([None, 20], index, sizes=[BLOCK, 8])
    hashes = [bytes([number]) * 32 for number in range(40)]
    held = {(hashes[1], 0), (hashes[3], 0), (hashes[2], 0), (hashes[3], 1)}

    def cached(key: bytes, ids: list[int]) -> list[Any] | None:
        return [SimpleNamespace(ref_cnt=1)] if (key, *ids) in held else None

    pool = SimpleNamespace(get_cached_block=cached)
    for part in groups._parts:
        one = cast(Any, part.manager)
        one.max_admission_blocks_per_request = 4 if part.group else None
        one.block_pool = pool
    request = cast(Request, SimpleNamespace(num_tokens=320, block_hashes=hashes))
    # In HBM are two blocks of the first group, and of the other the second half of a block.
    for first, hit, shared in ((0, 10, 0), (2, 2, 3), (2, 10, 2)):
        for free, fits in ((24 - shared, True), (23 - shared, False)):
            pool.get_num_free_blocks = lambda free=free: free
            assert groups.has_room(request, first, hit, [state(0, 100)]) is fits, (first, hit)


def test_blocks_that_another_request_holds_need_no_room() -> None:
    has_room = pooled([None, 40], [None, 5], {0, 1, 2, 5})
    needed = 20 + 5
    for first, shared in ((0, 0), (2, 2), (4, 3), (6, 4), (11, 4)):
        assert has_room(first, [state(0, 100)], needed - shared)
        assert not has_room(first, [state(0, 100)], needed - shared - 1)
