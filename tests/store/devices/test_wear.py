"""Bytes written to devices, over their life and per day, through restarts and crashes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.clock import Clock
from tests.kit.waiting import until
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices import wear as ledger_file
from vllm_ssdkv.store.devices.wear import MAX_DEVICES, NAME, WearLedger

DAY = 86400
NOON = 20_000 * DAY + DAY // 2


Open = Callable[..., WearLedger]


@pytest.fixture
def clock() -> Clock:
    return Clock(float(NOON))


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock, counters: Counters) -> Iterator[Open]:
    opened: list[WearLedger] = []

    def open_ledger(*names: str, interval_s: float = 3600.0) -> WearLedger:
        opened.append(
            WearLedger(tmp_path, names or ("a", "b"), counters, clock=clock, interval_s=interval_s)
        )
        return opened[-1]

    yield open_ledger
    for one in opened:
        assert one.close()


def test_bytes_add_up_by_device(ledger: Open) -> None:
    wear = ledger()
    for device, nbytes in ((0, 100), (1, 7), (0, 50)):
        wear.add(device, nbytes)
    assert [wear.written(d) for d in (0, 1)] == [150, 7]
    assert [wear.today(d) for d in (0, 1)] == [150, 7]


def test_a_day_ends_at_midnight_utc(ledger: Open, clock: Clock) -> None:
    wear = ledger()
    wear.add(0, 100)
    clock.now = NOON + DAY / 2 - 1
    wear.add(0, 1)
    assert wear.today(0) == 101
    clock.now += 1
    assert wear.today(0) == 0
    wear.add(0, 5)
    assert (wear.today(0), wear.written(0)) == (5, 106)


def test_a_clock_set_back_does_not_give_a_new_day(ledger: Open, clock: Clock) -> None:
    wear = ledger()
    wear.add(0, 100)
    clock.now -= 3 * DAY
    wear.add(0, 1)
    assert wear.today(0) == 101


def test_a_restart_goes_on(ledger: Open, clock: Clock, tmp_path: Path) -> None:
    wear = ledger()
    wear.add(0, 100)
    wear.add(1, 7)
    assert wear.close()
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    # The same devices in another order, and a new one.
    again = ledger("b", "c", "a")
    assert [again.written(d) for d in range(3)] == [7, 0, 100]
    again.add(2, 1)
    assert again.today(2) == 101
    clock.now += DAY
    assert again.today(2) == 0


def test_a_device_that_comes_back_is_known(ledger: Open) -> None:
    first = ledger("a", "b")
    first.add(1, 9)
    first.close()
    second = ledger("a")
    second.add(0, 1)
    second.close()
    assert ledger("a", "b").written(1) == 9


def test_a_crash_loses_an_interval_at_most(ledger: Open, tmp_path: Path) -> None:
    wear = ledger(interval_s=0.01)
    wear.add(0, 100)
    until((tmp_path / NAME).exists, "the file")
    until(lambda: ledger().written(0) == 100, "the first count")
    wear.add(0, 11)
    until(lambda: ledger().written(0) == 111, "the second count")


class Turns(threading.Event):
    """What ends the thread, which counts how often that has waited for it."""

    taken = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.taken += 1
        return super().wait(timeout)


def test_nothing_new_is_not_written(ledger: Open, tmp_path: Path) -> None:
    wear = ledger(interval_s=0.01)
    wear._end = turns = Turns()
    until(lambda: turns.taken > 2, "some turns of the thread")
    assert wear.close()
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"version": 2}',
        b'{"version": 9}',
        b'{"devices": {"a": {"written": "x"}}}',
        b"\xff\x00",
        b'{"version": 1, "devices": {"\xff": {"written": 1}}}',
        b'{"version": 1, "devices": {"a": {"written": 1, "today": 2}}}',
        b'{"version": 1, "devices": {"a": {"written": 3, "today": 2, "day": 30000}}}',
        b'{"version": 1, "devices": {"a": {"written": -1}}}',
    ],
)
def test_a_damaged_file_is_said_and_counted(
    ledger: Open, counters: Counters, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / NAME).write_bytes(content)
    wear = ledger()
    assert counters.total("wear_file_errors") == 1
    wear.add(0, 5)
    wear.close()
    assert ledger().written(0) == 5


def test_whatever_byte_has_changed_no_other_number_is_believed(
    ledger: Open, counters: Counters, tmp_path: Path
) -> None:
    """One flipped bit in a name stopped every start; in a number it passed for another one."""
    first = ledger()
    first.add(0, 123_456)
    first.close()
    data = (tmp_path / NAME).read_bytes()
    for at in range(len(data)):
        for spoiled in (data[:at], data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]):
            (tmp_path / NAME).write_bytes(spoiled)
            before = counters.total("wear_file_errors")
            assert ledger().written(0) == 0
            assert counters.total("wear_file_errors") == before + 1
    (tmp_path / NAME).write_bytes(data)
    assert ledger().written(0) == 123_456


def test_a_file_of_the_release_before_is_read(ledger: Open, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"version": 1, "devices": {"a": {"written": 9, "today": 9}}}')
    wear = ledger()
    assert wear.written(0) == 9
    wear.add(0, 1)
    wear.close()
    assert b'"checksum": "' in (tmp_path / NAME).read_bytes()
    assert ledger().written(0) == 10


def test_a_file_that_cannot_be_written(ledger: Open, counters: Counters, tmp_path: Path) -> None:
    (tmp_path / (NAME + ".tmp")).mkdir()
    wear = ledger(interval_s=0.01)
    wear.add(0, 5)
    until(lambda: counters.total("wear_file_errors") >= 2, "two attempts")
    (tmp_path / (NAME + ".tmp")).rmdir()
    until((tmp_path / NAME).exists, "the file")
    assert wear.written(0) == 5


def test_the_file_is_bounded(ledger: Open) -> None:
    for number in range(3):
        names = [f"{number}-{i}" for i in range(200)]
        wear = ledger(*names)
        wear.add(0, 1)
        wear.close()
    last = ledger("x")
    assert len(last._others) == MAX_DEVICES


def test_an_error_that_is_not_the_disks_ends_no_thread(
    ledger: Open, counters: Counters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("nobody thought of this")

    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "replace_file", fail)
        wear = ledger(interval_s=0.01)
        wear.add(0, 5)
        until(lambda: counters.total("wear_file_errors") >= 2, "two attempts")
    until((tmp_path / NAME).exists, "the file")
