"""The journal file: recovery, locking, bounds, rewrites, and every kind of I/O error."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from tests.kit.waiting import until
from vllm_ssdkv.base.errors import FormatError, StoreError, StoreLockedError
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, RECORD_BYTES, Kind, encode_records
from vllm_ssdkv.store.index import journal_file
from vllm_ssdkv.store.index.journal import Journal

STORE = UUID(int=5)
DIGEST = bytes(range(16))
SLOTS = 8
DEADLINE_S = 60.0


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") + bytes(28)


def open_journal(path: Path, **options: object) -> Journal:
    defaults: dict[str, object] = {
        "store": STORE,
        "fingerprint": DIGEST,
        "num_slots": SLOTS,
        "sync_interval_s": None,
        "retry_interval_s": 0.0,
        "slack_records": 4,
    }
    return Journal(path, **(defaults | options))  # type: ignore[arg-type]  # keyword table


class Owner:
    """The simplest owner of live records: a dictionary, in order of last use."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.live: dict[int, tuple[int, bytes]] = {}
        found = journal.recovered
        for slot, epoch, k in zip(
            found.slots.tolist(), found.epochs.tolist(), found.keys, strict=True
        ):
            self.live[slot] = (epoch, k)
        journal.attach(self, stale=False)

    @property
    def journalled(self) -> int:
        return len(self.live)

    def begin_walk(self) -> None:
        self.left = list(self.live)

    def walk(self, first_sequence: int) -> tuple[bytes, bool]:
        """Two at a time, so that a rewrite has several steps."""
        now, self.left = self.left[:2], self.left[2:]
        now = [slot for slot in now if slot in self.live]
        slots = np.array(now, dtype=np.int64)
        epochs = np.array([self.live[s][0] for s in now], dtype=np.int64)
        keys = [self.live[s][1] for s in now]
        return encode_records(Kind.PUT, slots, epochs, keys, first_sequence), bool(self.left)

    def put(self, slot: int, epoch: int, k: bytes) -> bool:
        self.live[slot] = (epoch, k)
        return self.journal.append(Kind.PUT, np.array([slot]), np.array([epoch]), [k])

    def put_all(self) -> bool:
        """Everything that is live, in one append."""
        slots = np.array(list(self.live), dtype=np.int64)
        epochs = np.array([e for e, _ in self.live.values()], dtype=np.int64)
        return self.journal.append(Kind.PUT, slots, epochs, [k for _, k in self.live.values()])

    def delete(self, slot: int) -> bool:
        epoch, _ = self.live.pop(slot)
        return self.journal.append(Kind.DEL, np.array([slot]), np.array([epoch]))

    def churn(self, first: int, count: int) -> None:
        for epoch in range(first, first + count):
            slot = epoch % SLOTS
            if slot in self.live:
                self.delete(slot)
            self.put(slot, epoch, key(epoch))


def content(path: Path) -> dict[int, tuple[int, bytes]]:
    """What a kill now would leave: a copy of the file, opened and let go without a rewrite."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    journal = open_journal(copy)
    journal._file.close()
    copy.unlink()
    found = journal.recovered
    return {
        slot: (epoch, k)
        for slot, epoch, k in zip(
            found.slots.tolist(), found.epochs.tolist(), found.keys, strict=True
        )
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_a_new_journal_is_private_and_empty(path: Path) -> None:
    journal = open_journal(path)
    assert journal.recovered.keys == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert journal.nbytes == path.stat().st_size == HEADER_BYTES
    assert journal.close()
    assert journal.close()
    with pytest.raises(ValueError, match="closed"):
        journal.append(Kind.DEL, np.array([1]), np.array([1]))


def test_records_survive_without_a_sync_or_a_close(path: Path) -> None:
    owner = Owner(open_journal(path))
    owner.put(1, 10, key(1))
    owner.put(2, 11, key(2))
    owner.delete(1)
    assert content(path) == {2: (11, key(2))}


def test_a_clean_close_keeps_the_owners_order(path: Path) -> None:
    owner = Owner(open_journal(path))
    for slot in (3, 1, 2):
        owner.put(slot, slot, key(slot))
    owner.live = {s: owner.live[s] for s in (2, 3, 1)}  # used in this order
    assert owner.journal.close()
    assert list(content(path)) == [2, 3, 1]
    assert path.stat().st_size == HEADER_BYTES + 3 * RECORD_BYTES


def test_sequence_numbers_go_on_after_a_restart(path: Path) -> None:
    owner = Owner(open_journal(path))
    owner.put(1, 1, key(1))
    owner.journal.close()
    again = Owner(open_journal(path))
    again.delete(1)
    again.put(1, 2, key(2))
    assert content(path) == {1: (2, key(2))}


def test_torn_at_every_byte_recovers_and_goes_on(path: Path) -> None:
    owner = Owner(open_journal(path, slack_records=100))
    for slot in range(3):
        owner.put(slot, slot + 1, key(slot))
    data = path.read_bytes()
    torn = path.with_name("torn")
    for length in range(HEADER_BYTES, len(data) + 1):
        torn.write_bytes(data[:length])
        whole, rest = divmod(length - HEADER_BYTES, RECORD_BYTES)
        journal = open_journal(torn, slack_records=100)
        assert journal.recovered.slots.tolist() == list(range(whole))
        assert journal.counters["corrupt_records"] == int(rest > 0)
        # Not attached, so nothing is rewritten: the next record must land on a record border.
        journal.append(Kind.PUT, np.array([7]), np.array([9]), [key(9)])
        journal._file.close()  # as if killed
        again = open_journal(torn, slack_records=100)
        assert again.recovered.slots.tolist() == [*range(whole), 7]
        assert again.counters["corrupt_records"] == 0
        again._file.close()


def test_a_torn_header_is_not_a_journal(path: Path) -> None:
    open_journal(path).close()
    data = path.read_bytes()
    for length in (1, 64, HEADER_BYTES - 1):
        path.write_bytes(data[:length])
        with pytest.raises(FormatError, match=f"header has {length} bytes"):
            open_journal(path, recover="strict")


@pytest.mark.parametrize(
    ("other", "field"), [({"store": UUID(int=6)}, "store"), ({"fingerprint": bytes(16)}, "finger")]
)
def test_a_foreign_journal_is_refused_or_set_aside(
    path: Path, other: dict[str, object], field: str
) -> None:
    owner = Owner(open_journal(path))
    owner.put(1, 1, key(1))
    owner.journal.close()
    data = path.read_bytes()
    with pytest.raises(FormatError, match=f"{path}: journal: {field}.*ssdkv fsck.*recover"):
        open_journal(path, recover="strict", **other)
    assert path.read_bytes() == data
    fresh = open_journal(path, **other)
    assert fresh.recovered.keys == []
    assert fresh.counters["resets"] == 1
    assert path.with_name("journal.rejected").read_bytes() == data
    with pytest.raises(StoreLockedError):
        open_journal(path, **other)
    fresh.close()
    assert open_journal(path, **other).counters["resets"] == 0


def test_damage_is_counted_and_healed_by_a_rewrite(path: Path) -> None:
    owner = Owner(open_journal(path))
    for slot in range(4):
        owner.put(slot, slot + 1, key(slot))
    owner.journal.close()
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + RECORD_BYTES + 20] ^= 1
    path.write_bytes(data)
    again = Owner(open_journal(path))
    assert sorted(again.live) == [0, 2, 3]
    assert again.journal.counters["corrupt_records"] == 1
    assert again.journal.counters["rewrites"] == 1
    again.journal.close()
    assert open_journal(path).counters["corrupt_records"] == 0


def test_only_one_process_at_a_time_and_its_number_is_named(path: Path) -> None:
    owner = Owner(open_journal(path))
    owner.put(1, 1, key(1))
    with pytest.raises(StoreLockedError, match=rf"{path} is in use by this process"):
        open_journal(path)
    code = (
        "import sys; sys.path[:0] = []\n"
        "from vllm_ssdkv.store.index.journal_file import JournalFile\n"
        "from vllm_ssdkv.base.errors import StoreLockedError\n"
        "from pathlib import Path\n"
        "try:\n    JournalFile(Path(sys.argv[1]), 0.0)\n"
        "except StoreLockedError as exc:\n    print(exc)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
        cwd="/",
    )
    assert f"process {os.getpid()}" in run.stdout
    owner.journal.close()
    assert open_journal(path).recovered.keys == [key(1)]


def test_the_lock_moves_with_a_rewrite(path: Path) -> None:
    owner = Owner(open_journal(path))
    owner.churn(1, 100)
    assert owner.journal.counters["rewrites"] > 1
    with pytest.raises(StoreLockedError):
        open_journal(path)


def test_a_file_replaced_between_open_and_lock_is_not_taken(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(open_journal(path))
    real = journal_file.lock_file
    calls = 0

    def replaced_first(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:  # the other side has opened the old file; now the owner rewrites it
            with monkeypatch.context() as undone:
                undone.setattr(journal_file, "lock_file", real)
                owner.churn(1, 20)
                assert owner.journal.counters["rewrites"] > 0
        real(*args)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(journal_file, "lock_file", replaced_first)
    with pytest.raises(StoreLockedError):
        journal_file.JournalFile(path, 0.0)
    assert calls == 2
    assert content(path) == owner.live


def test_waiting_for_the_lock_succeeds_when_it_is_released(path: Path) -> None:
    first = open_journal(path)
    timer = threading.Timer(0.05, first.close)
    timer.start()
    second = open_journal(path, lock_timeout_s=DEADLINE_S)
    timer.join(DEADLINE_S)
    second.close()


def test_the_file_is_bounded_and_rewrites_lose_nothing(path: Path) -> None:
    owner = Owner(open_journal(path))
    journal = owner.journal
    assert journal.max_bytes == HEADER_BYTES + RECORD_BYTES * (3 * SLOTS + 2 * 4)
    for round_ in range(40):
        owner.churn(1 + 5 * round_, 5)
        assert path.stat().st_size == journal.nbytes <= journal.max_bytes
        assert path.stat().st_size <= HEADER_BYTES + RECORD_BYTES * (2 * len(owner.live) + 4 + 1)
        assert content(path) == owner.live
    assert journal.counters["rewrites"] >= 10
    assert journal.counters["lost_records"] == 0
    assert [p.name for p in path.parent.iterdir()] == ["journal"]


def test_a_journal_without_an_owner_stops_at_its_bound(path: Path) -> None:
    journal = open_journal(path)
    room = (journal.max_bytes - HEADER_BYTES) // RECORD_BYTES
    written = [journal.append(Kind.DEL, np.array([1]), np.array([1])) for _ in range(room + 3)]
    assert written == [True] * room + [False] * 3
    assert path.stat().st_size == journal.max_bytes
    assert journal.degraded
    assert journal.counters["lost_records"] == 3
    assert not journal.close()


@pytest.mark.parametrize(
    "options", [{"sync_interval_s": 0.0}, {"retry_interval_s": -1.0}, {"num_slots": -1}]
)
def test_impossible_numbers_are_refused(path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"journal|sync_interval_s"):
        open_journal(path, **options)
    assert not path.exists()


def test_a_missing_directory_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"journal .*absent/journal: No such file"):
        open_journal(tmp_path / "absent" / "journal")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Make system calls fail: name to number of bytes still allowed (-1: works)."""
    state = {"pwrite": -1, "fdatasync": -1, "fsync": -1, "rename": -1}
    real = {name: getattr(os, name) for name in state}

    def wrap(name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            if state[name] < 0:
                return real[name](*args)
            if name == "pwrite" and state[name] > 0:
                part = args[1][: state[name]]  # type: ignore[index]  # the bytes
                state[name] -= len(part)
                return real[name](args[0], part, args[2])
            raise OSError(28, "No space left on device")

        return call

    for name in state:
        monkeypatch.setattr(os, name, wrap(name))
    yield state
    state.update(dict.fromkeys(state, -1))


@pytest.mark.parametrize("allowed", [0, 1, RECORD_BYTES - 1])
def test_a_full_disk_degrades_and_a_rewrite_recovers(
    path: Path, broken: dict[str, int], allowed: int, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner(open_journal(path))
    owner.put(0, 1, key(0))
    broken["pwrite"] = allowed
    assert not owner.put(1, 2, key(1))
    broken["pwrite"] = 0
    assert not owner.put(2, 3, key(2))
    assert not owner.delete(0)
    counters = owner.journal.counters
    assert owner.journal.degraded
    assert (counters["append_errors"], counters["lost_records"]) == (1, 3)
    assert counters["rewrite_errors"] == 3  # retry_interval_s is 0 here
    assert sum("cannot be appended to" in r.message for r in caplog.records) == 1
    broken["pwrite"] = -1
    assert content(path) == {0: (1, key(0))}  # a valid prefix
    assert not owner.put(3, 4, key(3))  # this one is in the rewrite that it starts
    assert not owner.journal.degraded
    assert content(path) == owner.live == {1: (2, key(1)), 2: (3, key(2)), 3: (4, key(3))}
    assert owner.put(4, 5, key(4))
    assert content(path) == owner.live
    assert owner.journal.close()


def test_retries_keep_their_distance(path: Path, broken: dict[str, int]) -> None:
    owner = Owner(open_journal(path, retry_interval_s=1000.0))
    broken["pwrite"] = 0
    for slot in range(5):
        owner.put(slot, 1, key(slot))
    assert owner.journal.counters["rewrite_errors"] == 0
    assert owner.journal.counters["lost_records"] == 5
    broken["pwrite"] = -1
    assert owner.journal.close()  # a last attempt, whatever the distance
    assert len(open_journal(path).recovered.keys) == 5


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_failed_rewrite_keeps_the_file_in_use(
    path: Path, broken: dict[str, int], step: str
) -> None:
    owner = Owner(open_journal(path))
    owner.churn(1, SLOTS)
    broken[step] = 0
    owner.churn(SLOTS + 1, 8)
    assert owner.journal.counters["rewrite_errors"] > 0
    assert owner.journal.counters["rewrites"] == 0
    assert not owner.journal.degraded
    broken[step] = -1
    assert content(path) == owner.live
    owner.churn(SLOTS + 9, 30)
    assert owner.journal.counters["rewrites"] > 0
    assert content(path) == owner.live


def test_a_failed_sync_is_counted_and_repaired_by_a_rewrite(
    path: Path, broken: dict[str, int]
) -> None:
    owner = Owner(open_journal(path))
    owner.put(1, 1, key(1))
    broken["fdatasync"] = 0
    assert not owner.journal.sync()
    assert owner.journal.counters["sync_errors"] == 1
    broken["fdatasync"] = -1
    assert owner.journal.sync()
    assert owner.journal.counters["rewrites"] == 1
    assert content(path) == owner.live


def test_a_real_limit_on_file_size(path: Path) -> None:
    """The kernel itself cuts a write short and refuses the next; then the limit goes away."""
    code = f"""
import resource, sys
import numpy as np
from pathlib import Path
from uuid import UUID
from vllm_ssdkv.store.index import journal_file
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.format.journal_record import Kind, encode_records
journal = Journal(Path(sys.argv[1]), store=UUID(int=5), fingerprint=bytes(range(16)),
                  num_slots={SLOTS}, sync_interval_s=None, retry_interval_s=0.0)
live = {{}}
class Owner:
    journalled = 5
    def begin_walk(self):
        pass
    def walk(self, first_sequence):
        slots = np.array(list(live), dtype=np.int64)
        keys = list(live.values())
        return encode_records(Kind.PUT, slots, slots + 1, keys, first_sequence), False
journal.attach(Owner(), stale=False)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({HEADER_BYTES + 2 * RECORD_BYTES + 10}, hard))
done = []
for slot in range(5):
    live[slot] = slot.to_bytes(32, "big")
    done.append(journal.append(Kind.PUT, np.array([slot]), np.array([slot + 1]), [live[slot]]))
assert done == [True, True, False, False, False], done
assert journal.degraded and journal.counters["append_errors"] == 1, journal.counters
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert journal.sync() and not journal.degraded
"""
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=DEADLINE_S, check=True, cwd="/")
    assert open_journal(path).recovered.slots.tolist() == [0, 1, 2, 3, 4]


# ---- with the background thread ----


class Gate:
    """Lets a system call through, or holds it until opened; counts the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.calls = 0
        self.waiting = threading.Event()
        self.open = threading.Event()
        self.open.set()
        real = getattr(os, name)

        def call(*args: object) -> object:
            self.calls += 1
            self.waiting.set()
            assert self.open.wait(DEADLINE_S), "the gate was never opened"
            return real(*args)

        monkeypatch.setattr(os, name, call)


def test_the_thread_syncs_once_and_only_when_there_is_something(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "fdatasync")
    owner = Owner(open_journal(path, sync_interval_s=0.05))
    owner.put(1, 1, key(1))
    owner.put(2, 2, key(2))
    until(lambda: gate.calls > 0)
    assert owner.journal.sync(DEADLINE_S)
    assert owner.journal.sync(DEADLINE_S)
    assert gate.calls <= 2
    before = gate.calls
    owner.put(3, 3, key(3))
    assert owner.journal.sync(DEADLINE_S)
    assert gate.calls == before + 1
    assert owner.journal.close()


def test_a_hanging_device_blocks_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "fdatasync")
    gate.open.clear()
    owner = Owner(open_journal(path, sync_interval_s=0.01))
    owner.put(1, 1, key(1))
    assert gate.waiting.wait(DEADLINE_S)
    for epoch in range(2, 7):
        assert owner.put(epoch, epoch, key(epoch))
    assert not owner.journal.sync(0.05)
    assert not owner.journal.close(0.05)
    with pytest.raises(StoreLockedError):
        open_journal(path)
    gate.open.set()
    assert owner.journal.close(DEADLINE_S)
    assert content(path) == owner.live


def test_records_appended_during_a_rewrite_are_in_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(open_journal(path, sync_interval_s=1000.0))
    gate = Gate(monkeypatch, "fsync")
    gate.open.clear()
    owner.churn(1, 14)  # longer than 2 * live + slack
    assert gate.waiting.wait(DEADLINE_S)
    owner.churn(15, 3)
    assert content(path) == owner.live  # a kill during the rewrite
    gate.open.set()
    until(lambda: owner.journal.counters["rewrites"] == 1)
    assert content(path) == owner.live
    owner.churn(18, 3)
    assert content(path) == owner.live
    assert owner.journal.close(DEADLINE_S)


def test_closing_waits_for_a_slow_rewrite(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout is the time without progress: a large store takes longer than that."""
    journal = open_journal(path, sync_interval_s=1000.0, num_slots=100)
    owner = Owner(journal)
    for slot in range(40):
        owner.put(slot, slot + 1, key(slot))
    real, writes = os.pwrite, threading.Semaphore(0)

    def slow(fd: int, data: bytes, offset: int) -> int:
        assert writes.acquire(timeout=DEADLINE_S), "nobody waits for this write"
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    assert journal._thread is not None
    thread, timeouts = journal._thread, 0

    def join(timeout_s: float) -> None:
        """A timeout in which the device writes a part."""
        nonlocal timeouts
        timeouts += 1
        before = journal._steps

        def progress() -> bool:
            writes.release()
            return journal._steps > before or not thread.is_alive()

        until(progress)

    monkeypatch.setattr(thread, "join", join)
    assert journal.close(0.5)
    assert timeouts > 1
    assert open_journal(path, num_slots=100).recovered.keys == [key(slot) for slot in range(40)]


def test_a_rewrite_that_hangs_too_long_is_void_and_repeated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(open_journal(path, sync_interval_s=1000.0))
    gate = Gate(monkeypatch, "fsync")
    gate.open.clear()
    owner.churn(1, 14)
    assert gate.waiting.wait(DEADLINE_S)
    owner.churn(15, 40)
    counters = owner.journal.counters
    assert owner.journal.degraded  # the file is at its bound, and the rewrite hangs
    assert path.stat().st_size <= owner.journal.max_bytes
    gate.open.set()
    until(lambda: counters["rewrite_errors"] == 1)
    owner.churn(55, 1)
    until(lambda: counters["rewrites"] == 1)
    assert not owner.journal.degraded
    assert content(path) == owner.live
    assert owner.journal.close(DEADLINE_S)


class Unfit(Owner):
    """An owner one of whose methods raises, so often."""

    def __init__(self, journal: Journal, method: str, times: int) -> None:
        self.left_to_raise = {method: times}
        super().__init__(journal)

    def _raise(self, method: str) -> None:
        if self.left_to_raise.get(method, 0) > 0:
            self.left_to_raise[method] -= 1
            raise MemoryError("nobody thought of this")

    def begin_walk(self) -> None:
        self._raise("begin_walk")
        super().begin_walk()

    def walk(self, first_sequence: int) -> tuple[bytes, bool]:
        self._raise("walk")
        return super().walk(first_sequence)


@pytest.mark.parametrize("method", ["begin_walk", "walk"])
def test_an_error_amid_a_rewrite_ends_no_thread(
    path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Unfit(open_journal(path, sync_interval_s=1000.0), method, times=1)
    owner.churn(1, 14)  # longer than 2 * live + slack
    until(lambda: owner.journal.counters["rewrite_errors"] == 1)
    assert content(path) == owner.live
    owner.churn(15, 3)
    assert owner.journal.sync(DEADLINE_S)
    until(lambda: owner.journal.counters["rewrites"] == 1)
    assert content(path) == owner.live
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left
    assert owner.journal.close(DEADLINE_S)
    assert "MemoryError: nobody thought of this" in caplog.text


def test_a_sync_that_raises_is_no_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(open_journal(path, sync_interval_s=1000.0))

    def fail(_: int) -> None:
        raise ValueError("nobody thought of this")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        owner.put(1, 1, key(1))
        assert not owner.journal.sync(DEADLINE_S)
        assert owner.journal.counters["sync_errors"] == 1
    assert owner.journal.sync(DEADLINE_S)
    assert content(path) == owner.live
    assert owner.journal.close(DEADLINE_S)
