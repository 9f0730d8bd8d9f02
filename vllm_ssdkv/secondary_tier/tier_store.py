"""Start-up of a tier: identity, data files, index."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
class ChunkSpace:
    """Chunks of one engine, before their store is open: whose they are, and where vLLM has them.

    Attributes:
        config: Options of the store.
        place: Place of the store, with the chunks' shape.
        settings: vLLM's settings that change KV.
        weights: Digest of the weights.
        pool: vLLM's pool.
        tokens: Tokens of a chunk.
        reuses, sees_media: See :class:`ChunkKeys`.
    """

    config: SSDKVConfig
    place: StorePlace
    settings: Fingerprint
    weights: bytes
    pool: Pool
    tokens: int
    reuses: bool
    sees_media: bool

    def keys(self, weights: Sequence[bytes], name_key: bytes) -> ChunkKeys:
        """Keys of the chunks, once the store knows the weights."""
        namespace = RankIdentities(self.settings, weights).namespace
        return ChunkKeys(namespace, name_key, reuses=self.reuses, sees_media=self.sees_media)

    def started(self, io_engine: str, paths: Sequence[str], lines: Sequence[str]) -> None:
        """The store is open: begin its counters, and log what is in force."""
        counters = self.place.counters
        counters.start_at_zero(paths)
        counters.set("info", 1, mode="reuse", io_engine=io_engine, selector="exact")
        summary = "\n".join(f"  {line}" for line in lines)
        logger.info("SSDKV tier, chunks of %s\n%s", approximate_size(self.pool.row_bytes), summary)


def chunk_space(
    tier: SecondaryTierConfig,
    config: SSDKVConfig,
    spec: OffloadingSpec,
    rows: NDArray[np.uint8],
) -> ChunkSpace:
    """Find out whose chunks an engine has, whose pool has these ``rows``, [chunks, bytes].

    Raises:
        SSDKVError: see the modules that check; the text names the way out.
    """
    vllm_config = settings_in_sight()
    for obstacle in obstacles_to_hashes(vllm_config):
        raise obstacle.error()
    if vllm_config.lora_config is not None:
        logger.warning(
            "ssdkv: requests with an adapter (--enable-lora) are neither stored nor found: a tier "
            "knows an adapter's name only, not its weights; SSDKVConnector serves adapters"
        )
    chunks, nbytes = rows.shape
    if not chunks:
        raise UnsupportedError(
            "SSDKVTier: vLLM's pool has no room for a chunk: raise cpu_bytes_to_use"
        )
    encrypted = config.encryption is not None
    geometry = SlotGeometry("opaque", 1, 1, 1, nbytes, encrypted=encrypted)
    if not config.nodes:
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
    layout = str(spec.config.kv_cache_layout)
    seen = kv_settings(vllm_config, layout, chooses=False)
    return ChunkSpace(
        config,
        place,
        Fingerprint({**seen.fields, **named, **model_settings(vllm_config)}),
        weights_digest(tier, vllm_config),
        Pool(rows.ctypes.data, nbytes),
        max(spec.tokens_per_block) * spec.blocks_per_chunk,
        reuses=may_reuse(vllm_config),
        sees_media=sees_media(vllm_config),
    )


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


def open_tier_store(space: ChunkSpace) -> TierStore:
    """Open the store in this process.

    Raises:
        SSDKVError: see the modules that check; the text names the way out.
    """
    place, pool = space.place, space.pool
    with ExitStack() as stack:
        opened = open_rank(place, 0, place.counters)
        access = EmbeddedRank(opened, TieredStore)
        stack.callback(access.close)
        space.started(opened.files.engine.name, access.device_paths, opened.describe())
        place.tell_weights(0, space.weights)
        keys = space.keys(place.bind(space.settings), place.name_key())
        store = open_store(space.config, place, stack)
        stored = access.start(_work(space, access))
        stack.callback(stored.close)
        offset, deadline = place.geometries[0].layer_offset(0), opened.files.deadline_s
        writer = ChunkWriter(stored, pool, offset, deadline, place.counters)
        stack.pop_all()
    return TierStore(store, access, stored, writer, keys, pool.row_bytes)


def _with_memory(config: SSDKVConfig, geometry: SlotGeometry) -> SSDKVConfig:
    """The options, with memory for a few chunks where none was given."""
    if config.dram_gib is not None:
        return config
    needed = max(_DRAM, config.least_dram + _FRAMES * geometry.frame_bytes)
    return config.model_copy(update={"dram_gib": needed / GIB})


def _work(space: ChunkSpace, access: EmbeddedRank[TieredStore]) -> StoreWork:
    """Work of the store: loads go to the rows of the pool."""
    pool, offset = space.pool, access.opened.files.geometry.layer_offset(0)
    nbytes = pool.row_bytes

    def copy_in(frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
        pool.fill(access.store.frames.address(frames) + np.uint64(offset), blocks)

    def one(value: int) -> NDArray[np.uint64]:
        return np.array([value], dtype=np.uint64)

    stretches = _io.Stretches(one(offset), one(nbytes), one(pool.address - nbytes), one(nbytes))
    return StoreWork(space.config, space.tokens, copy_in, stretches=stretches)
