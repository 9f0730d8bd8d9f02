"""The order of a batch: a permutation, contiguous groups at every depth, the most shared."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.batch.order import (
    BLOCK_BYTES,
    arrange,
    block_hashes,
    shared_with_predecessor,
)

CHAINS = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=24)


def unchained(keys: list[list[int]]) -> list[list[int]]:
    """Keys as the hashes are: each says everything before it."""
    return [[hash(tuple(path[: i + 1])) for i in range(len(path))] for path in keys]


@given(CHAINS, st.randoms(use_true_random=False))
def test_it_is_a_permutation_that_shares_the_most(
    keys: list[list[int]], source: random.Random
) -> None:
    chains = unchained(keys)
    order = arrange(chains, [len(chain) for chain in chains])
    assert sorted(order.positions) == list(range(len(chains)))
    assert order.blocks == sum(len(chain) for chain in chains)
    assert order.shared_blocks == shared_with_predecessor(chains, order.positions)
    # Everything but the first of each distinct block: no order can share more.
    assert order.shared_blocks == order.blocks - len({key for chain in chains for key in chain})
    other = list(range(len(chains)))
    source.shuffle(other)
    assert shared_with_predecessor(chains, other) <= order.shared_blocks


@given(CHAINS, st.data())
def test_every_group_is_contiguous(keys: list[list[int]], data: st.DataObject) -> None:
    lengths = data.draw(
        st.lists(st.integers(0, 9), min_size=len(keys), max_size=len(keys)), label="lengths"
    )
    order = arrange(keys, lengths)
    for depth in range(1, 6):
        for prefix in {tuple(path[:depth]) for path in keys if len(path) >= depth}:
            places = [
                place
                for place, position in enumerate(order.positions)
                if tuple(keys[position][:depth]) == prefix
            ]
            assert places == list(range(places[0], places[0] + len(places)))


@given(st.lists(st.integers(0, 5), max_size=20))
def test_without_common_prefixes_long_ones_come_first_and_equals_keep_their_order(
    lengths: list[int],
) -> None:
    chains = [[1000 + position] for position in range(len(lengths))]
    order = arrange(chains, lengths)
    assert list(order.positions) == sorted(range(len(lengths)), key=lambda i: -lengths[i])
    assert order.shared_blocks == 0


def test_groups_go_by_their_longest_prompt() -> None:
    chains = [[1], [2], [1], [2], [3]]
    assert arrange(chains, [1, 9, 2, 3, 5]).positions == (1, 3, 4, 2, 0)


def test_a_prompt_that_is_a_prefix_of_others_is_among_them() -> None:
    assert arrange([[1, 2], [7], [1], [1, 2]], [2, 1, 1, 2]).positions == (0, 3, 2, 1)


def test_deep_chains_need_no_deep_stack() -> None:
    deep = list(range(20_000))
    order = arrange([deep, [-1], deep], [3, 2, 1])
    assert order.positions == (0, 2, 1)
    assert order.shared_blocks == len(deep)


def test_lengths_must_fit() -> None:
    with pytest.raises(ValueError, match="1 chains for 2 lengths"):
        arrange([[1]], [1, 2])


@given(st.binary(max_size=4 * BLOCK_BYTES), st.binary(max_size=BLOCK_BYTES), st.integers(0, 1024))
def test_hashes_agree_exactly_as_far_as_whole_blocks_do(
    prompt: bytes, tail: bytes, cut: int
) -> None:
    other = prompt[:cut] + tail
    ours, theirs = block_hashes(prompt), block_hashes(other)
    assert len(ours) == len(prompt) // BLOCK_BYTES
    for i in range(min(len(ours), len(theirs))):
        end = (i + 1) * BLOCK_BYTES
        assert (ours[i] == theirs[i]) == (prompt[:end] == other[:end])
