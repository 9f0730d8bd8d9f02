"""A store of some slots that is checked and repaired."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import disk_directory
from tests.store.conftest import array
from tests.store.filled_store import FilledStore
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, RECORD_BYTES
from vllm_ssdkv.store.maintenance.fsck import examined
from vllm_ssdkv.store.maintenance.fsck_report import Report
from vllm_ssdkv.store.maintenance.repair import repair

SLOTS = (0, 1, 2, 5, 8, 13, 21, 34, 55)


def check(store: FilledStore, *, mend: bool = False) -> Report:
    with examined(store.devices, store.state, write=mend) as found:
        if mend:
            repair(found)
        return found.report


def make(
    root: Path,
    devices: int = 2,
    *,
    encrypted: bool = False,
    **others: Any,  # noqa: ANN401 - any field
) -> FilledStore:
    paths = tuple(root / f"ssd{i}" for i in range(devices))
    state = root / "state"
    for path in (*paths, state):
        path.mkdir(mode=0o700)
    store = FilledStore(paths, state, SLOTS, encrypted=encrypted, **others)
    store.fill()
    return store


def kinds(report: Report) -> dict[str, int]:
    return dict(report.counts)


def mended(store: FilledStore, **counts: int) -> set[int]:
    """Repair exactly these problems; what the store serves afterwards."""
    assert kinds(check(store)) == counts
    report = check(store, mend=True)
    assert kinds(report) == counts
    assert report.unrepaired == 0, report.problems
    again = check(store)
    assert again.clean, again.problems
    return store.served()


def on_device(store: FilledStore, device: int) -> set[int]:
    touched = store.placement.touches(device, array(store.slots))
    return {slot for slot, hit in zip(store.slots, touched.tolist(), strict=True) if hit}


@contextmanager
def copied(original: FilledStore) -> Iterator[FilledStore]:
    """A copy of it, to be damaged."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-fsck-", dir=disk_directory()) as root:
        places = [Path(root, old.name) for old in (*original.devices, original.state)]
        for old, new in zip((*original.devices, original.state), places, strict=True):
            shutil.copytree(old, new)
        yield original.moved(places[:-1], places[-1])


def order_of(store: FilledStore) -> list[int]:
    """Slots in the order of their records."""
    data = (store.state / "journal").read_bytes()[HEADER_BYTES:]
    slots: list[int] = np.frombuffer(data, "<u8").reshape(-1, RECORD_BYTES // 8)[:, 1].tolist()
    return slots
