"""``ssdkv fsck --from-headers``: blocks that a whole journal says were given up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.store.checked_store import SLOTS, check, make
from tests.store.conftest import key_of
from tests.store.filled_store import GEOMETRY, FilledStore, flip
from tests.store.opening import close
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.format.journal_record import JOURNAL
from vllm_ssdkv.store.maintenance.fsck import examined
from vllm_ssdkv.store.maintenance.fsck_report import Report
from vllm_ssdkv.store.maintenance.repair import repair
from vllm_ssdkv.store.open import open_index, open_rank


def give_up(store: FilledStore, slots: Sequence[int], *, erase: bool = False) -> None:
    """Take blocks out of the journal, as earlier releases did when a drive was out of use."""
    ranks = [open_rank(store.place, rank, Counters()) for rank in range(store.ranks)]
    index, rebalancer = open_index(store.place)
    for slot in slots:
        index.drop(index.lookup([key_of(slot)]))
    if erase:
        rebalancer.forget_stored()
    assert rebalancer.close()
    assert index.close()
    for rank in ranks:
        close(rank)


def look(store: FilledStore, *, mend: bool = False) -> Report:
    with examined(store.devices, store.state, write=mend, from_headers=True) as found:
        if mend:
            repair(found)
        return found.report


def test_they_are_found_again(tmp_path: Path) -> None:
    store = make(tmp_path)
    give_up(store, SLOTS)
    assert check(store).clean
    assert store.served() == set()
    before = (store.state / JOURNAL).read_bytes()
    report = look(store)
    assert report.counts == {"journal": 1}
    assert f"{len(SLOTS)} block(s) that slots hold" in report.problems[0].text
    assert "--repair --from-headers" in report.problems[0].cure
    assert (store.state / JOURNAL).read_bytes() == before, "it says first what it would do"
    assert look(store, mend=True).unrepaired == 0
    assert (store.state / "journal.rejected").read_bytes() == before
    assert look(store).clean
    assert store.served() == set(SLOTS)


def test_what_was_to_be_erased_stays_erased(tmp_path: Path) -> None:
    store = make(tmp_path)
    give_up(store, [], erase=True)
    report = look(store, mend=True)
    assert (report.clean, report.found) == (True, 0)
    assert store.served() == set()
    store.fill()
    give_up(store, SLOTS[:1])
    assert look(store, mend=True).found == 1
    assert store.served() == set(SLOTS)


def test_what_is_not_whole_stays_given_up(tmp_path: Path) -> None:
    store = make(tmp_path)
    give_up(store, SLOTS[:2])
    device, at = store.at(SLOTS[0], GEOMETRY.header_bytes)
    flip(store.data(device, 0), at)
    report = look(store, mend=True)
    assert (report.found, report.lost, report.bad) == (1, 1, 0)
    assert store.served() == set(SLOTS) - {SLOTS[0]}


def test_the_newest_block_of_a_slot_and_of_a_key_counts(tmp_path: Path) -> None:
    """Written to the end, and not journalled any more: the headers know better."""
    store = make(tmp_path)
    old = (store.state / JOURNAL).read_bytes()
    give_up(store, SLOTS)
    store.fill()  # the same keys, in the same slots, with later epochs
    assert store.served() == set(SLOTS)
    (store.state / JOURNAL).write_bytes(old)
    report = look(store, mend=True)
    assert (report.stored, report.found, report.bad) == (len(SLOTS), len(SLOTS), 0)
    assert store.served() == set(SLOTS)
