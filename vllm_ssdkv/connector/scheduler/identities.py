"""Digests of weights and adapters as the ranks tell them, and what in HBM is of older ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    make_block_hash_with_group_id,
)

from vllm_ssdkv.connector.messages import Adapter, RankReport
from vllm_ssdkv.connector.scheduler.block_keys import KEY_BYTES
from vllm_ssdkv.store.format.fingerprint import Fingerprint

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_LEAST_PRUNED = 4096
"""Blocks of which something is remembered before it is looked which of them HBM still has."""

TELLING_STEPS = 3
"""Steps after which the workers have told of an adapter that was loaded before, beside those that
vLLM plans ahead: it is reported with the next step, and a GPU's step is heard of a step later."""


class RankIdentities:
    """Weights and adapters of each rank. Used by the scheduler's thread."""

    def __init__(self, settings: Fingerprint, weights: Sequence[bytes]):
        """``settings``: that change KV. ``weights``: digest of each rank's, as it started."""
        self._settings = settings
        self.weights = tuple(weights)
        self.changes = (0,) * len(self.weights)
        """Of each rank's weights that it has told of."""
        self._adapters: tuple[dict[int, tuple[bytes, int]], ...] = tuple({} for _ in weights)

    @property
    def namespace(self) -> bytes:
        """32 bytes that bind keys to the settings and to all ranks' weights."""
        digest = hashlib.blake2b(self._settings.canonical, digest_size=KEY_BYTES)
        for weights in self.weights:
            digest.update(weights)
        return digest.digest()

    def told(self, reports: Iterable[tuple[int, RankReport]]) -> tuple[bool, set[int]]:
        """Take in what ranks say; whether weights have changed, and which adapters have."""
        before, changed = self.changes, set[int]()
        for rank, report in reports:
            if report.weights:
                weights, changes = list(self.weights), list(self.changes)
                weights[rank] = report.weights
                changes[rank] = report.changes
                self.weights, self.changes = tuple(weights), tuple(changes)
            for number, told in report.adapters.items():
                changed.add(number)
                self._adapters[rank][number] = told
        return before != self.changes, changed

    def adapter(self, number: int) -> Adapter | None:
        """Digests of an adapter; None unless every rank has it."""
        found = [adapters.get(number, (b"", 0)) for adapters in self._adapters]
        digests, changes = zip(*found, strict=True)
        return Adapter(number, digests, changes) if all(digests) else None

    def adapter_digest(self, number: int) -> bytes:
        """Digest of an adapter on all ranks; empty unless every rank has it."""
        found = self.adapter(number)
        return b"" if found is None else b"".join(found.digests)


class HbmIdentities:
    """Identities of the blocks that vLLM keeps in HBM, by block hash.

    vLLM's own prefix cache names an adapter but not its weights, and knows nothing of the model's:
    it serves what older ones computed until somebody resets it. What a request computes from that
    is of both, and must not be stored. Used by the scheduler's thread.
    """

    def __init__(self, initial: bytes):
        """``initial``: identity of all blocks of which nothing else was said."""
        self.pool: BlockPool | None = None
        self.groups = 1
        """KV cache groups, each of which has blocks of its own under a hash."""
        self._initial = initial
        self._identities: dict[bytes, bytes] = {}
        self._prune_at = _LEAST_PRUNED

    @property
    def remembered(self) -> int:
        """Blocks of which something is remembered."""
        return len(self._identities)

    def began_with(self, hashes: Sequence[bytes], identity: bytes) -> bool:
        """Check whether any of these blocks was computed with something else than ``identity``.

        Only hashes count under which HBM has a block: some name no block of any group, and what was
        said of blocks that are gone may be forgotten.
        """
        if identity == self._initial and not self._identities:
            return False
        others = (h for h in hashes if self._identities.get(h, self._initial) != identity)
        return any(self._has_older(h, ()) for h in others)

    def holds(
        self, hashes: Sequence[bytes], identity: bytes, blocks: Sequence[Sequence[int]] = ()
    ) -> None:
        """A request computes or loads these blocks; ``identity`` empty: with several.

        Where HBM has an older block under a hash that was computed with something else, vLLM may
        give others either. ``hashes``: vLLM's, the last of a group's block names it. ``blocks``:
        HBM blocks of the request, by group.
        """
        if identity == self._initial and not self._identities:
            return
        others = [h for h in hashes if self._identities.get(h, self._initial) != identity]
        self._identities.update(dict.fromkeys(hashes, identity))
        if identity and others:
            own = [set(ids) for ids in blocks]
            self._identities |= {h: b"" for h in others if self._has_older(h, own)}
        if self.pool is not None and len(self._identities) > self._prune_at:
            named = (block.block_hash for block in self.pool.blocks)
            there = {get_block_hash(name) for name in named if name is not None}
            self._identities = {h: i for h, i in self._identities.items() if h in there or not h}
            self._prune_at = max(_LEAST_PRUNED, 2 * len(self._identities))

    def _has_older(self, block_hash: bytes, own: Sequence[set[int]]) -> bool:
        """Check whether HBM has a block of this hash in a group that is not a request's own.
        ``own``: HBM blocks of the request, by group; empty: none."""
        if self.pool is None:
            return False
        known = self.pool.cached_block_hash_to_block
        for group in range(self.groups):
            # Of several the oldest, which is the one that vLLM gives to others.
            found = known.get_one_block(make_block_hash_with_group_id(BlockHash(block_hash), group))
            if found is not None and (not own or found.block_id not in own[group]):
                return True
        return False

    def weights_changed(self, identity: bytes) -> None:
        """Blocks of which nothing was said are of the weights before."""
        # That there is an entry means that blocks are to be told apart.
        self._identities.setdefault(b"", identity)
