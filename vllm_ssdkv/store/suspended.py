"""Taking a suspended store back, while no engine runs on it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vllm_ssdkv.errors import StoreError
from vllm_ssdkv.metrics import Counters
from vllm_ssdkv.store.manifest import Manifest, locked
from vllm_ssdkv.store.manifest_copies import CopySpreader
from vllm_ssdkv.store.stored import StoredStore, open_journal


@dataclass(frozen=True, slots=True)
class Resumed:
    """A store that is in use again.

    Attributes:
        store: Its UUID.
        reason: Why it was suspended; empty: it was not.
    """

    store: str
    reason: str


def resume(store: StoredStore) -> Resumed:
    """Have the store found in again from the next start on. Blocks on I/O.

    Raises:
        StoreLockedError: an engine runs on it.
        StoreError: its manifest cannot be read or saved.
    """
    journal = open_journal(store, lock=True)
    try:
        with locked(store.state):
            manifest = Manifest.load(store.state)
            if manifest is None:
                raise StoreError(f"{store.state}: store.json was removed meanwhile")
            reason = manifest.suspended
            if reason:
                manifest.suspended = ""
                manifest.save(store.state)
                CopySpreader(Counters()).spread(manifest)
    finally:
        if journal is not None:
            os.close(journal)
    return Resumed(manifest.store, reason)
