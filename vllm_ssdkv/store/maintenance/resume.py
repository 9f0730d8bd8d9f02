"""Taking a suspended store back, while no engine runs on it."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.file_lock import require_unlocked
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.manifest_copies import CopySpreader
from vllm_ssdkv.store.format.manifest import Manifest, locked
from vllm_ssdkv.store.maintenance.offline_store import StoredStore, open_journal


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
        StoreError: its manifest cannot be read or saved; it is not the newest; or the devices may
            be those of another copy of the store.
    """
    store.refuse_foreign(write=True)
    if store.restored:
        named = shlex.join([*map(str, store.paths), "--state-dir", str(store.state)])
        raise StoreError(f"{store.restored}. First `ssdkv fsck --repair {named}`, then resume it")
    devices, ranks = range(len(store.paths)), range(store.manifest.tp_size)
    # Of a copy of the state directory the journal is nobody's.
    data = {store.data_path(device, rank) for device in devices for rank in ranks}
    require_unlocked(data)
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
