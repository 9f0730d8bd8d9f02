"""One rank's slots for who only looks at them: no cache, no writer, and no device is given up."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.io_engine import EngineOptions
from vllm_ssdkv.store.devices.health import DeviceHealth
from vllm_ssdkv.store.devices.throughput import ThroughputEstimator
from vllm_ssdkv.store.integrity.slot_codec import ChecksumCodec
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.maintenance.offline_store import DataFile, StoredStore
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.placement.placement import placement_of
from vllm_ssdkv.store.placement.replica_selector import Replicas

DEADLINE_S = 60.0
"""Time after which an unfinished read counts as a device that hangs."""

_QUEUE_DEPTH = 32


@contextlib.contextmanager
def open_slots(
    store: StoredStore, rank: int, files: Sequence[DataFile | None], nbytes: int
) -> Iterator[tuple[SlotIO, Arena]]:
    """Slots of a rank, read through an engine of their own.

    Checksums are over the bytes on the drives, so an encrypted store needs no key.

    Args:
        store: The store.
        rank: Whose slots.
        files: Open data file of each device, in the store's order; None for one that is missing.
        nbytes: Memory to read into.

    Yields:
        The slots, and that memory.
    """
    paths = [str(store.data_path(device, rank)) for device in range(len(files))]
    missing = [device for device, file in enumerate(files) if file is None]
    # Unreadable slots are the caller's business, not a reason to give a device up.
    health = DeviceHealth(paths, DEADLINE_S, Counters(), patience_s=math.inf, absent=missing)
    manifest, geometry = store.manifest, store.manifest.geometries[rank]
    with contextlib.ExitStack() as stack:
        arena = Arena(nbytes)
        stack.callback(arena.close)
        nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, nowhere)
        engine = open_engine(
            EngineOptions(queue_depth=_QUEUE_DEPTH),
            [nowhere if file is None else file.fd for file in files],
            paths,
            arena,
            joined=geometry.summary_pages > 0,
        )
        stack.callback(engine.close, DEADLINE_S)
        digest = store.fingerprint.digest
        speed = ThroughputEstimator(paths, [1.0] * len(paths))
        slots = SlotIO(
            geometry,
            placement_of(manifest, rank),
            engine,
            health,
            speed,
            Counters(),
            digest,
            rank,
            DEADLINE_S,
            ChecksumCodec(geometry, digest, rank, arena),
            Replicas(health, speed, manifest.numbers, []),
        )
        yield slots, arena
