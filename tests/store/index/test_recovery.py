"""Recovery of the journal: what each mode does with each kind of damage, and progress."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.index.test_journal import DIGEST, SLOTS, Owner, key, open_journal
from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, RECORD_BYTES, VERSION
from vllm_ssdkv.store.index import journal_file, recovery
from vllm_ssdkv.store.index.journal import Journal

RECORDS = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal with a few records, let go without a rewrite."""
    path = tmp_path / "journal"
    owner = Owner(open_journal(path, slack_records=100))
    for slot in range(RECORDS):
        owner.put(slot, slot + 1, key(slot))
    owner.journal._file.close()
    return path


def recovered(path: Path, recover: str) -> list[int]:
    journal = open_journal(path, recover=recover, slack_records=100)
    slots: list[int] = journal.recovered.slots.tolist()
    journal._file.close()
    return slots


def damage(path: Path, offset: int) -> bytes:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    return bytes(data)


def of_version(data: bytes, version: int) -> bytes:
    """A journal as another release would write it, whole."""
    head = data[:8] + version.to_bytes(4, "little") + data[12 : HEADER_BYTES - 8]
    return head + checksum_bytes(head).to_bytes(8, "little") + data[HEADER_BYTES:]


def test_a_whole_journal_is_read_in_every_mode_but_none(path: Path) -> None:
    data = path.read_bytes()
    assert recovered(path, "strict") == recovered(path, "quiet") == list(range(RECORDS))
    assert path.read_bytes() == data


def test_none_starts_empty_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = path.read_bytes()
    assert recovered(path, "none") == []
    assert path.stat().st_size == HEADER_BYTES
    assert path.with_name("journal.rejected").read_bytes() == data
    assert [r.message for r in caplog.records if 'recover is "none"' in r.message]
    assert recovered(path, "strict") == []


@pytest.mark.parametrize("number", range(RECORDS))
def test_a_damaged_record(path: Path, number: int) -> None:
    """The last one may be an append that was cut: no damage."""
    data = damage(path, HEADER_BYTES + number * RECORD_BYTES + 40)
    left = [n for n in range(RECORDS) if n != number]
    if number == RECORDS - 1:
        assert recovered(path, "strict") == left
    else:
        with pytest.raises(FormatError, match=r"journal: 1 of its 6 records are damaged: .*fsck"):
            recovered(path, "strict")
    assert path.read_bytes() == data
    assert recovered(path, "quiet") == left


def test_cut_at_every_byte_of_the_last_record(path: Path) -> None:
    data = path.read_bytes()
    for length in range(len(data) - RECORD_BYTES, len(data)):
        path.write_bytes(data[:length])
        for mode in ("strict", "quiet"):
            assert recovered(path, mode) == list(range(RECORDS - 1))
        owner = Owner(open_journal(path, slack_records=100))
        assert owner.journal.counters["corrupt_records"] == int(length % RECORD_BYTES != 56)
        owner.put(7, 100, key(7))
        owner.journal._file.close()
        assert recovered(path, "strict") == [*range(RECORDS - 1), 7]


def test_a_last_append_of_several_records_cut_at_every_byte(path: Path) -> None:
    owner = Owner(open_journal(path, slack_records=100))
    before = path.stat().st_size
    owner.live = {slot: (slot + 50, key(slot + 50)) for slot in range(3)}
    owner.put_all()
    owner.journal._file.close()
    data = path.read_bytes()
    for length in range(before, len(data)):
        path.write_bytes(data[:length])
        whole = (length - before) // RECORD_BYTES
        assert recovered(path, "strict") == [*range(whole, RECORDS), *range(whole)]


def test_a_header_cut_or_changed_at_every_byte(path: Path) -> None:
    data = path.read_bytes()
    spoiled = [data[:length] for length in range(1, HEADER_BYTES)]
    spoiled += [data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in range(HEADER_BYTES)]
    for bad in spoiled:
        path.write_bytes(bad)
        with pytest.raises(FormatError, match=r"journal: .*: check the store with `ssdkv fsck`"):
            recovered(path, "strict")
        assert path.read_bytes() == bad
        assert recovered(path, "quiet") == []
        assert path.with_name("journal.rejected").read_bytes() == bad
        assert recovered(path, "strict") == []


def test_another_version_is_refused_and_stays(path: Path) -> None:
    """It is no damage: the release that made it can read it."""
    data = of_version(path.read_bytes(), VERSION + 1)
    path.write_bytes(data)
    text = f"journal has format version {VERSION + 1}, this release reads {VERSION}: use another"
    for mode in ("strict", "quiet"):
        with pytest.raises(FormatError, match=text):
            recovered(path, mode)
        assert path.read_bytes() == data
        assert not path.with_name("journal.rejected").exists()
    assert recovered(path, "none") == []  # as was asked for
    assert path.with_name("journal.rejected").read_bytes() == data


def test_an_empty_file_is_a_new_journal(path: Path) -> None:
    """A crash between its creation and its first bytes leaves it."""
    path.write_bytes(b"")
    assert recovered(path, "strict") == []
    assert path.stat().st_size == HEADER_BYTES


def test_a_rewrite_cut_at_every_byte_is_nothing(path: Path) -> None:
    data = path.read_bytes()
    left_over = path.with_name("journal.tmp")
    for length in range(0, len(data) + 1, 3):
        left_over.write_bytes(data[:length])
        assert recovered(path, "strict") == list(range(RECORDS))
    owner = Owner(open_journal(path, slack_records=100))
    owner.journal.close()  # which rewrites
    assert not left_over.exists()
    assert recovered(path, "strict") == list(range(RECORDS))


def test_progress_is_told_and_logged(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_file, "_READ_BYTES", 100)
    told: list[tuple[int, int]] = []
    size = path.stat().st_size
    journal = open_journal(path, progress=lambda done, total: told.append((done, total)))
    assert [total for _, total in told] == [size] * len(told)
    assert [done for done, _ in told] == [*range(HEADER_BYTES + 100, size, 100), size]
    assert journal.recovered.keys == [key(slot) for slot in range(RECORDS)]
    journal._file.close()
    monkeypatch.setattr(recovery, "LOG_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO):
        log = recovery.ProgressLog("the index")
        log(1 << 20, 4 << 20)
    assert caplog.messages == ["the index: 25 % of 4 MiB read"]


def test_progress_is_quiet_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        recovery.ProgressLog("the index")(1, 2)
    assert caplog.messages == []


def test_the_same_digest_belongs_to_the_same_store(path: Path) -> None:
    with pytest.raises(FormatError, match="fingerprint"):
        open_journal(path, recover="strict", fingerprint=DIGEST[::-1])


class Killed(BaseException):
    """The process ends here."""


def test_a_kill_at_every_call_of_a_rewrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call did before, the kernel keeps; what comes after does not happen."""
    path = tmp_path / "journal"
    calls_of_a_rewrite = 0
    for last in range(1000):
        path.unlink(missing_ok=True)
        owner = Owner(open_journal(path))
        owner.churn(1, 13)  # one more record starts a rewrite
        before, left = dict(owner.live), last

        def call(*args: object, real: Callable[..., object], **named: object) -> object:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*args, **named)

        with monkeypatch.context() as patch:
            for name in ("open", "pwrite", "fsync", "fdatasync", "rename", "unlink", "close"):
                patch.setattr(os, name, functools.partial(call, real=getattr(os, name)))
            try:
                owner.churn(14, 1)
            except Killed:
                pass
            else:
                calls_of_a_rewrite = last
        os.close(owner.journal._file._fd)
        journal = open_journal(path, recover="strict")
        found = content(journal)
        journal._file.close()
        deleted = {slot: kept for slot, kept in before.items() if slot != 14 % SLOTS}
        assert found in (before, deleted, owner.live)
        if calls_of_a_rewrite:
            assert owner.journal.counters["rewrites"] == 1
            assert found == owner.live
            break
    assert calls_of_a_rewrite > 8


def content(journal: Journal) -> dict[int, tuple[int, bytes]]:
    found = journal.recovered
    pairs = zip(found.epochs.tolist(), found.keys, strict=True)
    return dict(zip(found.slots.tolist(), pairs, strict=True))
