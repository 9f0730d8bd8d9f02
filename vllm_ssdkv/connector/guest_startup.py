"""Start-up of an engine whose blocks a tier keeps that a user brings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.tiers import TIERS
from vllm_ssdkv.connector.scheduler.scheduler_parts import SchedulerStore
from vllm_ssdkv.connector.worker.guest_rank import GuestRank
from vllm_ssdkv.store.guest_tier import GuestIndex, GuestStore, Tier, take_weights, tell_weights
from vllm_ssdkv.store.open import StorePlace


def _open(tier: str, place: StorePlace, rank: int) -> Tier:
    """The guest, for the blocks of a rank.

    Raises:
        ConfigError: the option ``tier`` names none.
        StoreError: it cannot be opened.
    """
    guest = TIERS.resolve(tier)
    try:
        opened: Tier = guest(
            f"{place.fingerprint.digest.hex()[:32]}r{rank}", place.geometries[rank].frame_bytes
        )
    except Exception as error:
        raise StoreError(f"tier: {tier} cannot be opened: {error}") from error
    return opened


def open_guest_store(
    config: SSDKVConfig, tier: str, place: StorePlace, rank: int
) -> tuple[GuestRank, Callable[[bytes], None]]:
    """A rank's half, and what tells the scheduler of its weights.

    Raises:
        StoreError: see :func:`_open`, or there is no memory.
    """
    guest, counters, nbytes = (
        _open(tier, place, rank),
        place.counters,
        place.geometries[rank].frame_bytes,
    )
    dram = config.dram_bytes(place.ranks)
    store = GuestStore(guest, nbytes, counters, dram, config.io.deadline)
    tell = functools.partial(tell_weights, guest, f"{place.run} rank {rank}", nbytes)
    return GuestRank(store, counters, rank), tell


def open_guest_index(
    config: SSDKVConfig, tier: str, place: StorePlace, stack: ExitStack
) -> tuple[SchedulerStore, list[bytes]]:
    """The scheduler's half, and the digest of each rank's weights. ``stack`` closes what was opened
    if the start fails.

    Raises:
        StoreError: see :func:`_open`, or a rank has not told of its weights.
    """
    ranks = range(place.ranks)
    guests = [_open(tier, place, rank) for rank in ranks]
    index = GuestIndex(guests, place.counters)
    stack.callback(index.close)
    nbytes = place.geometries[0].frame_bytes
    weights = [take_weights(guests[rank], f"{place.run} rank {rank}", nbytes) for rank in ranks]
    way_out = "find out why this engine computes otherwise than what the tier has, and start again"
    return SchedulerStore.elsewhere(config, index, place.counters, way_out), weights
