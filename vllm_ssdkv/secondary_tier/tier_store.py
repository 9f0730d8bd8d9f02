"""Start-up of a tier: identity, data files, index."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.base.sizes import GIB, MIB, approximate_size
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.secondary_tier import SecondaryTierConfig
from vllm_ssdkv.connector.compatibility import obstacles_to_hashes
from vllm_ssdkv.connector.identity.kv_settings import kv_settings
from vllm_ssdkv.connector.model_layout import directory_name
from vllm_ssdkv.connector.scheduler.identities import RankIdentities
from vllm_ssdkv.connector.scheduler.scheduler_parts import SchedulerStore
from vllm_ssdkv.connector.startup import may_reuse, open_store, replica_of, sees_media
from vllm_ssdkv.connector.worker.rank_store import EmbeddedRank, StoreWork
from vllm_ssdkv.secondary_tier.chunk_keys import ChunkKeys
from vllm_ssdkv.secondary_tier.chunk_writer import ChunkWriter, Pool
from vllm_ssdkv.secondary_tier.identity import (
    chunk_identity,
    model_settings,
    settings_in_sight,
    weights_digest,
)
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.index.slot_index import SlotState
from vllm_ssdkv.store.open import StorePlace, open_rank
from vllm_ssdkv.store.own_store import owned
from vllm_ssdkv.store.tiered_store import TieredStore

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = logging.getLogger(__name__)

_DRAM: Final = 256 * MIB
"""Memory for chunks on their way, by default: vLLM's pool is the cache in DRAM."""

_FRAMES: Final = 16
"""Chunks that this memory holds at least."""


@dataclass(frozen=True, slots=True)
class TierStore:
    """An open store with both of its halves in this process.

    Attributes:
        store: Index, journal, manifest.
        access: Data files.
        bytes: The store of the chunks' bytes.
        writer: Copies chunks to it.
        keys: Names chunks.
        chunk_bytes: Size of a chunk.
    """

    store: SchedulerStore
    access: EmbeddedRank[TieredStore]
    bytes: TieredStore
    writer: ChunkWriter
    keys: ChunkKeys
    chunk_bytes: int

    def forget_free(self, slots: NDArray[np.int64]) -> None:
        """Forget the bytes of those of these slots that hold nothing any more."""
        index = owned(self.store.own).index
        gone = [s for s in slots.tolist() if index.state(s) in (SlotState.FREE, SlotState.LOST)]
        if gone:
            self.bytes.abandon(np.array(gone, dtype=np.int64))

    def close(self) -> None:
        """Write what is committed, and make journal and manifest durable."""
        with ExitStack() as stack:  # the last one first, and each whatever others raise
            stack.callback(self.access.close)
            stack.callback(self.store.close)
            stack.callback(self.bytes.close)
            stack.callback(self.writer.close)


def open_tier_store(
    tier: SecondaryTierConfig,
    config: SSDKVConfig,
    spec: OffloadingSpec,
    rows: NDArray[np.uint8],
) -> TierStore:
    """Open the store for an engine whose pool has these ``rows``, [chunks, bytes].

    Raises:
        SSDKVError: see the modules that check; the text names the way out.
    """
    vllm_config = settings_in_sight()
    for obstacle in obstacles_to_hashes(vllm_config):
        raise obstacle.error()
    chunks, nbytes = rows.shape
    if not chunks:
        raise UnsupportedError(
            "SSDKVTier: vLLM's pool has no room for a chunk: raise cpu_bytes_to_use"
        )
    encrypted = config.encryption is not None
    geometry = SlotGeometry("opaque", 1, 1, 1, nbytes, encrypted=encrypted)
    config = _with_memory(config, geometry)
    fingerprint, named = chunk_identity(spec, nbytes, encrypted=encrypted)
    model = vllm_config.model_config
    place = StorePlace(
        config,
        [geometry],
        fingerprint,
        replica_of(spec.config.parallel),
        model=str(model.model),
        name=directory_name(str(model.model), model.revision),
    )
    digest = weights_digest(tier, vllm_config)
    layout = str(spec.config.kv_cache_layout)
    seen = kv_settings(vllm_config, layout, chooses=False)
    settings = Fingerprint({**seen.fields, **named, **model_settings(vllm_config)})
    with ExitStack() as stack:
        opened = open_rank(place, 0, place.counters)
        access = EmbeddedRank(opened, TieredStore)
        stack.callback(access.close)
        counters = place.counters
        counters.start_at_zero(access.device_paths)
        counters.set("info", 1, mode="reuse", io_engine=opened.files.engine.name, selector="exact")
        place.tell_weights(0, digest)
        weights = place.bind(settings)
        store = open_store(config, place, stack)
        namespace = RankIdentities(settings, weights).namespace
        reuses, media = may_reuse(vllm_config), sees_media(vllm_config)
        keys = ChunkKeys(namespace, place.name_key(), reuses=reuses, sees_media=media)
        pool = Pool(rows.ctypes.data, nbytes)
        stored = access.start(_work(config, spec, access, pool))
        stack.callback(stored.close)
        offset, deadline = geometry.layer_offset(0), opened.files.deadline_s
        writer = ChunkWriter(stored, pool, offset, deadline, counters)
        stack.pop_all()
    lines = "\n".join(f"  {line}" for line in opened.describe())
    logger.info("SSDKV tier, chunks of %s\n%s", approximate_size(nbytes), lines)
    return TierStore(store, access, stored, writer, keys, nbytes)


def _with_memory(config: SSDKVConfig, geometry: SlotGeometry) -> SSDKVConfig:
    """The options, with memory for a few chunks where none was given."""
    if config.dram_gib is not None:
        return config
    needed = max(_DRAM, config.least_dram + _FRAMES * geometry.frame_bytes)
    return config.model_copy(update={"dram_gib": needed / GIB})


def _work(
    config: SSDKVConfig, spec: OffloadingSpec, access: EmbeddedRank[TieredStore], pool: Pool
) -> StoreWork:
    """Work of the store: loads go to the rows of the pool. To loads, row i is block i + 1, since
    block 0 stands for none."""
    nbytes, offset = pool.row_bytes, access.opened.files.geometry.layer_offset(0)

    def copy_in(frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
        source = access.store.frames.address(frames) + np.uint64(offset)
        _io.copy(source, pool.addresses((blocks - 1).tolist()), nbytes)

    def one(value: int) -> NDArray[np.uint64]:
        return np.array([value], dtype=np.uint64)

    stretches = _io.Stretches(one(offset), one(nbytes), one(pool.address - nbytes), one(nbytes))
    tokens = max(spec.tokens_per_block) * spec.blocks_per_chunk
    return StoreWork(config, tokens, copy_in, stretches=stretches)
