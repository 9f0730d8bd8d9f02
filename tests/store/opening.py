"""A small store's place, and what tests of opening it do with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.store.conftest import PAGED, PAGED_ENCRYPTED, PATIENCE_S, key_of
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store import open as opening
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.open import StorePlace
from vllm_ssdkv.store.open_store import OpenStore

MODEL = Fingerprint({"model": "tiny"})
CAPACITY = 16 << 20

Opened = Callable[..., OpenStore]


def place(paths: list[Path], fingerprint: Fingerprint = MODEL, **options: Any) -> StorePlace:  # noqa: ANN401 - any option
    chosen: dict[str, Any] = {
        "mode": "page",
        "devices": [{"path": d, "capacity": CAPACITY, "weight": 1} for d in paths],
        "dram_gib": "20MiB",
        "io": {"staging": "4MiB"},
    }
    tp_size, replica = options.pop("tp_size", 1), options.pop("replica", None)
    run = options.pop("run", "")
    config = SSDKVConfig.from_extra_config(chosen | options)
    geometry = PAGED if config.encryption is None else PAGED_ENCRYPTED
    return StorePlace(config, [geometry] * tp_size, fingerprint, replica, run=run)


@contextmanager
def impatient() -> Iterator[None]:
    """Nobody waits long for a store that somebody else has open: for where nobody lets go of it.
    Nowhere else, since opening one waits for disks, too, and these may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "LOCK_TIMEOUT_S", 0.1)
        yield


def close(store: OpenStore) -> None:
    store.files.engine.close(PATIENCE_S)
    store.close()


def used(devices: list[Path]) -> list[int]:
    """Bytes on disk below each device."""
    return [
        sum(f.stat().st_blocks * 512 for f in [d, *d.rglob("*")]) for d in devices if d.exists()
    ]


def fill(index: SlotIndex, count: int) -> dict[int, bytes]:
    """Journalled slots and their keys."""
    slots = index.allocate(count)
    keys = {slot: key_of(slot + 500) for slot in slots.tolist()}
    for slot, key in keys.items():
        assert index.publish(slot, key)
    index.durable(slots)
    index.unpin(slots)
    return keys


def found(index: SlotIndex, keys: dict[int, bytes]) -> set[int]:
    return {slot for slot, key in keys.items() if len(index.lookup([key]))}
