"""A store of some slots that is checked and repaired."""

from __future__ import annotations

from pathlib import Path

from tests.store.conftest import array
from tests.store.filled_store import FilledStore
from vllm_ssdkv.store.fsck import examined
from vllm_ssdkv.store.fsck_report import Report
from vllm_ssdkv.store.repair import repair

SLOTS = (0, 1, 2, 5, 8, 13, 21, 34, 55)


def check(store: FilledStore, *, mend: bool = False) -> Report:
    with examined(store.devices, store.state, write=mend) as found:
        if mend:
            repair(found)
        return found.report


def make(root: Path, devices: int = 2, *, encrypted: bool = False) -> FilledStore:
    paths = tuple(root / f"ssd{i}" for i in range(devices))
    state = root / "state"
    for path in (*paths, state):
        path.mkdir(mode=0o700)
    store = FilledStore(paths, state, SLOTS, encrypted=encrypted)
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
