"""The check of a store while a device is absent: it is no reason to drop what lies there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.checked_store import SLOTS, check, kinds, make, mended, on_device
from tests.store.filled_store import GEOMETRY, RANKS, FilledStore, flip
from vllm_ssdkv.base.errors import DeviceError


@contextmanager
def unmounted(store: FilledStore, device: int) -> Iterator[None]:
    """The directory of a device is not there."""
    away = store.devices[device].with_name("elsewhere")
    store.devices[device].rename(away)
    yield
    away.rename(store.devices[device])


def test_what_is_on_an_absent_device_is_counted_apart(tmp_path: Path) -> None:
    store = make(tmp_path)
    gone = on_device(store, 1)
    here = sorted(set(SLOTS) - gone)
    device, at = store.at(here[0], GEOMETRY.header_bytes)
    flip(store.data(device, 1), at)
    with unmounted(store, 1):
        report = check(store)
    assert kinds(report) == {"device": 1, "page": 1}
    assert report.problems[0].subject == str(store.devices[1])
    assert "mount it" in report.problems[0].text
    assert f"parts of {len(gone)} block(s) that are out of reach" in report.problems[0].text
    assert report.problems[1].subject == f"slot {here[0]}, rank 1"
    assert (report.stored, report.bad, report.out_of_reach) == (len(SLOTS), 1, len(gone))
    assert report.checked_slots == RANKS * len(here)
    assert report.checked_bytes == RANKS * len(here) * GEOMETRY.slot_bytes


def test_nothing_is_repaired_while_a_device_is_absent(tmp_path: Path) -> None:
    """It is no reason to drop what lies there."""
    store = make(tmp_path)
    journal = store.state / "journal"
    flip(journal, 40)
    before = journal.read_bytes()
    with unmounted(store, 1):
        with pytest.raises(DeviceError, match=f"{store.devices[1]}.* would drop.* mount it"):
            check(store, mend=True)
        assert journal.read_bytes() == before
        assert not store.devices[1].exists()
    assert mended(store, journal=1) == set(SLOTS)


def test_what_an_opened_store_goes_on_without_is_no_finding(tmp_path: Path) -> None:
    """It has been started without the device: what lies there is kept, by a repair as well."""
    store = make(tmp_path)
    gone = on_device(store, 1)
    with unmounted(store, 1):
        one = replace(store, devices=store.devices[:1])
        assert one.served() == set(SLOTS) - gone
        report = check(one)
        assert report.clean, report.problems
        assert report.devices == [str(path) for path in store.devices]
        assert (report.stored, report.out_of_reach) == (len(SLOTS), len(gone))
        lost = min(set(SLOTS) - gone)
        device, at = store.at(lost, GEOMETRY.header_bytes)
        flip(store.data(device, 0), at)
        assert mended(one, page=1) == set(SLOTS) - gone - {lost}
    assert store.served() == set(SLOTS) - {lost}
