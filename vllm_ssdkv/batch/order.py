"""The order in which the requests of a batch run: those that begin alike run together.

KV of a prefix is then computed or read once and used while it is hot, instead of once per request
that comes back to it after other prefixes have pushed it out. The order is a walk, depth first,
over the radix tree of the prompts, cut into blocks; no tree is built, the walk splits lists.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BLOCK_BYTES: Final = 256
"""Bytes of prompt text per block: some 64 tokens. Prefixes are compared in whole blocks."""


def block_hashes(prompt: bytes) -> array[int]:
    """Chained 64-bit hashes of the whole blocks of a prompt: equal hashes, equal text up to there.

    Two of n blocks are equal by chance with probability n^2 / 2^65; such an accident costs time,
    never an answer.
    """
    chain = array("Q")
    state = b""
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block = prompt[start : start + BLOCK_BYTES]
        state = hashlib.blake2b(state + block, digest_size=8).digest()
        chain.append(int.from_bytes(state, "little"))
    return chain


@dataclass(frozen=True, slots=True)
class Order:
    """An order of running, and what it is expected to save.

    Attributes:
        positions: Positions of the requests in the batch, in the order of running.
        blocks: Whole blocks of all prompts together.
        shared_blocks: Those of them that the request before in this order has, too. No other
            order has more.
    """

    positions: tuple[int, ...]
    blocks: int
    shared_blocks: int


def arrange(chains: Sequence[Sequence[int]], lengths: Sequence[int]) -> Order:
    """Order requests so that those with a common prefix are next to each other, at every depth.

    Among the groups of one depth the one with the longest prompt comes first: similar lengths run
    together, and the last requests, which leave seats empty, are short ones. What is alike in
    length keeps the order of the batch.

    Takes O(total blocks + n log n). Pure: any thread.

    Args:
        chains: Per request, its :func:`block_hashes` (or token ids, or any keys of a path in a
            tree).
        lengths: Per request, the length of its prompt, in any unit.
    """
    if len(chains) != len(lengths):
        raise ValueError(f"{len(chains)} chains for {len(lengths)} lengths")
    positions: list[int] = []
    shared = 0
    # Groups of requests that have their first `depth` blocks in common; the next to visit is last.
    stack = [(list(range(len(chains))), 0)]
    while stack:
        group, depth = stack.pop()
        if len(group) < 2:
            positions += group
            continue
        ending: list[list[int]] = []
        going_on: dict[int, list[int]] = {}
        for position in group:
            chain = chains[position]
            if depth < len(chain):
                going_on.setdefault(chain[depth], []).append(position)
            else:
                ending.append([position])
        shared += sum(len(members) - 1 for members in going_on.values())
        parts = [*ending, *going_on.values()]
        if len(parts) > 1:
            # Members are in the order of the batch, so the first one is the smallest.
            parts.sort(key=lambda part: (-max(lengths[i] for i in part), part[0]), reverse=True)
        stack += [(part, depth + 1) for part in parts]
    return Order(tuple(positions), sum(len(chain) for chain in chains), shared)


def shared_with_predecessor(chains: Sequence[Sequence[int]], positions: Sequence[int]) -> int:
    """Blocks that requests have in common with the one before, in this order of running."""
    total = 0
    for before, here in itertools.pairwise(positions):
        for left, right in zip(chains[before], chains[here], strict=False):
            if left != right:
                break
            total += 1
    return total
