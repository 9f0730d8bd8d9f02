"""The journal: which slot holds which key, so that a restart finds it again.

An append-only file of fixed-size records (``store/format/journal_record.py``). An append is one
plain write of any number of records, which survives the death of the process; one ``fdatasync`` for
all of them follows in a background thread, at most once per :data:`SYNC_INTERVAL_S`, so that a
power loss costs that interval. What it costs is hits, never correctness: slot headers carry the
epoch, and data that does not match its record is refused.

**Bounds.** When the file holds more than ``2 * live + slack`` records it is rewritten with the
live ones: to a temporary file, fsync, rename, fsync of the directory. It never exceeds
``128 + 72 * (3 * num_slots + 2 * slack)`` bytes (:attr:`Journal.max_bytes`): ``2 * num_slots +
slack`` start a rewrite, the rest is room for one batch that touches every slot and for what
arrives during the rewrite. The temporary file exists besides it while a rewrite runs.

A rewrite walks over the owner's table in steps, between which appends go on: the new file holds
what each step saw and every record appended since the rewrite began, and sequence numbers say which
is newer. It needs memory for one step and for what is appended during one write, and holds the
scheduler up for one step, some tenths of a millisecond, at a time.

**Errors.** A failed append (disk full, I/O error) is counted and logged, and puts the journal into
the *degraded* state: records are counted as lost, the file keeps its valid prefix, and a rewrite
from the owner's memory is tried every ``retry_interval_s``. Its success makes the journal complete
again. No method called by the scheduler loop raises on I/O.

**A file that somebody deletes, replaces or cuts** under us is noticed before the next append, and
by the background thread, which looks every ``sync_interval_s``. What the path names is set aside as
``<name>.rejected``: a kill then leaves no journal rather than a wrong one, and a start makes a lost
one anew from the slots. The journal is degraded until it is written again from the owner's memory,
at once. Nothing is written where the directory is gone, empty, or another one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv._index import Replay
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.file_access import why_refused
from vllm_ssdkv.store.format.journal_record import (
    HEADER_BYTES,
    RECORD_BYTES,
    Kind,
    encode_header,
    encode_records,
)
from vllm_ssdkv.store.index.journal_file import JournalFile, Replacement
from vllm_ssdkv.store.index.recovery import Progress, Recover, recover_journal

logger = logging.getLogger(__name__)


SLACK_RECORDS = 4096
"""Records beyond twice the live ones that start a rewrite: 288 KiB."""

SYNC_INTERVAL_S = 1.0
"""Maximum time whose records a power loss costs, besides the time of one sync. A longer interval
saves little: a sync is one flush of a drive's cache, and a drive does hundreds of these per
second."""

WRITE_RECORDS = 65536
"""Most records of one write: bounds the memory of an append that gives up every slot."""


class LiveRecords(Protocol):
    """The owner of what is live. It must contain an appended record's effect before the append."""

    @property
    def journalled(self) -> int:
        """Number of live records. Called on the scheduler's side."""

    def begin_walk(self) -> None:
        """Start at the beginning. This and :meth:`walk` are called by the thread that rewrites."""

    def walk(self, first_sequence: int) -> tuple[bytes, bool]:
        """Sealed ``PUT`` records of the next few, maybe none; False when these were the last."""


def journal_bytes(num_slots: int, slack_records: int = SLACK_RECORDS) -> int:
    """Bytes that the journal of so many slots never exceeds; twice that while it is rewritten."""
    return HEADER_BYTES + RECORD_BYTES * (3 * num_slots + 2 * slack_records)


class Journal:
    """An open, locked journal file.

    All methods belong to one thread, the scheduler's; where there is a background thread, others
    may call :meth:`sync`, too. That thread, and only it when there is one, syncs and writes
    rewrites out.

    Attributes:
        path: The file.
        recovered: What the file said when it was opened; emptied by :meth:`attach`.
        counters: ``appended_records``, ``writes``, ``lost_records``, ``corrupt_records``,
            ``append_errors``, ``syncs``, ``sync_errors``, ``rewrites``, ``rewrite_errors``,
            ``resets``, ``restores``, ``look_errors``.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        store: UUID,
        fingerprint: bytes,
        num_slots: int,
        recover: Recover = "quiet",
        progress: Progress | None = None,
        sync_interval_s: float | None = SYNC_INTERVAL_S,
        retry_interval_s: float = 5.0,
        lock_timeout_s: float = 0.0,
        slack_records: int = SLACK_RECORDS,
    ) -> None:
        """Open or create the file, lock it and read it. Blocks on I/O.

        Args:
            path: The file; its directory must exist.
            store: Identity of the store, as in its manifest.
            fingerprint: :attr:`Fingerprint.digest`.
            num_slots: Slots of the store; bounds the file.
            recover: ``strict``: raise when the file is damaged or not this store's. ``quiet``:
                leave out damaged records, and start empty instead of with another store's file,
                which is renamed to ``<name>.rejected`` (one is kept, counted as ``resets``).
                ``none``: set the file aside like that, whatever it is.
            progress: Told how many bytes of how many were read, every few MiB.
            sync_interval_s: Seconds between ``fdatasync`` calls. None: no background thread; the
                caller syncs with :meth:`sync`, and rewrites happen inside :meth:`append`.
            retry_interval_s: Least seconds between attempts to rewrite after an error.
            lock_timeout_s: How long to wait for another process to let go.
            slack_records: Records beyond twice the live ones that start a rewrite.

        Raises:
            FormatError: it is damaged or not this store's, and ``recover`` is ``strict``; or it is
                of another version, and ``recover`` is not ``none``.
            StoreLockedError: another process holds it.
            DeviceError: the file system has no locks.
            StoreError: it cannot be opened, read or created.
            ValueError: ``sync_interval_s`` is not positive, or another number is negative.
        """
        if sync_interval_s is not None and sync_interval_s <= 0:
            raise ValueError(f"sync_interval_s is {sync_interval_s}")
        if retry_interval_s < 0 or num_slots < 0 or slack_records < 0:
            raise ValueError(f"journal of {num_slots} slots, {slack_records} slack records")
        self.path = Path(path)
        self.counters: dict[str, int] = dict.fromkeys(
            (
                "appended_records",
                "writes",
                "lost_records",
                "corrupt_records",
                "append_errors",
                "syncs",
                "sync_errors",
                "rewrites",
                "rewrite_errors",
                "resets",
                "restores",
                "look_errors",
            ),
            0,
        )
        self._header = encode_header(store, fingerprint)
        self._num_slots = num_slots
        self._slack = slack_records
        self._retry_interval_s = retry_interval_s
        self._lock = threading.Lock()
        """Guards the file, the tail and the flags."""
        self._owner: LiveRecords | None = None
        self._rewrite_asked = False
        self._tail: list[bytes] | None = None
        """While a rewrite runs: records appended that are not in the new file yet."""
        self._tail_records = 0
        self._tail_overflow = False
        self._steps = 0
        """Of all rewrites so far: grows while the device answers."""
        self._degraded = False
        self._lost = False
        """Somebody has deleted, replaced or cut the file, and it is not written again yet."""
        self._rewrite_due = False
        self._next_attempt = 0.0
        self._dirty = False
        self._sync_failing = False
        self._closed = False
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._answer = threading.Condition()
        """Guards the two numbers of :meth:`sync` calls: asked for, and answered by the thread."""
        self._asked = self._answered = 0
        try:
            self._file = JournalFile(self.path, lock_timeout_s)
            try:
                self.recovered, was_reset = recover_journal(
                    self._file,
                    store=store,
                    fingerprint=fingerprint,
                    num_slots=num_slots,
                    recover=recover,
                    progress=progress,
                )
            except BaseException:
                self._file.close()
                raise
        except OSError as exc:
            raise StoreError(f"journal {self.path}: {why_refused(self.path, exc)}") from exc
        self._sequence = self.recovered.newest_sequence + 1
        self.counters["resets"] += was_reset
        self.counters["corrupt_records"] = self.recovered.corrupt
        self._rewrite_due = self.recovered.corrupt > 0
        self._thread: threading.Thread | None = None
        if sync_interval_s is not None:
            self._thread = threading.Thread(
                target=self._run, args=(sync_interval_s,), name="ssdkv-journal", daemon=True
            )
            try:
                self._thread.start()
            except BaseException:
                self._file.close()
                raise

    # ---- the scheduler's side ----

    @property
    def max_bytes(self) -> int:
        """Bytes the file never exceeds (:func:`journal_bytes`)."""
        return journal_bytes(self._num_slots, self._slack)

    @property
    def nbytes(self) -> int:
        """Bytes of valid content."""
        with self._lock:
            return self._file.end

    @property
    def degraded(self) -> bool:
        """Check whether records are being lost because the file cannot be written."""
        with self._lock:
            return self._degraded

    @property
    def ending(self) -> bool:
        """Check whether :meth:`close` was called. Any thread."""
        return self._stopping.is_set()

    def directory_is_there(self) -> bool:
        """Check whether the path of the file's directory still names it. Any thread; blocks on I/O.

        Raises:
            OSError: it cannot be read.
        """
        return self._file.home.is_there()

    def attach(self, owner: LiveRecords, *, stale: bool) -> None:
        """Name the owner of the live records, whom rewrites ask for them.

        A file found damaged or too long is rewritten first; blocks on that, up to a deadline.

        Args:
            owner: Outlives the journal's last rewrite.
            stale: Whether the owner did not accept all of :attr:`recovered`.
        """
        self._owner = owner
        self._rewrite_due |= stale
        self.recovered = Replay(0)
        if self._maintain():
            # Finished before the first append: an owner that is killed again and again before its
            # rewrites end would otherwise reach the file's bound.
            self.sync()

    def append(
        self,
        kind: Kind,
        slots: NDArray[np.int64],
        epochs: NDArray[np.int64],
        keys: Sequence[bytes] | None = None,
    ) -> bool:
        """Write records of one kind; arrays of shape [n]. False when some were lost (counted).

        One write into the page cache for up to :data:`WRITE_RECORDS` of them; never raises on I/O
        errors, never waits for the device.

        Raises:
            ValueError: a key has not 32 bytes, lengths differ, or the journal is closed.
        """
        if self._stopping.is_set():
            raise ValueError(f"journal {self.path} is closed")
        written = True
        with self._lock:
            self._notice_loss()
        for begin in range(0, slots.size, WRITE_RECORDS):
            part = slice(begin, begin + WRITE_RECORDS)
            some = None if keys is None else keys[part]
            with self._lock:
                data = encode_records(kind, slots[part], epochs[part], some, self._sequence)
                count = len(data) // RECORD_BYTES
                self._sequence += count
                self._keep_for_rewrite(data, count)
                written &= self._write(data, count)
        self._maintain()
        return written

    def _keep_for_rewrite(self, data: bytes, count: int) -> None:
        """Remember what the running rewrite may not have seen. Lock held."""
        if self._tail is None:
            return
        self._tail_records += count
        if self._tail_records > self._num_slots + self._slack:
            self._tail_overflow = True  # the device hangs: that rewrite is void when it ends
            self._tail.clear()
        if not self._tail_overflow:
            self._tail.append(data)

    def _write(self, data: bytes, count: int) -> bool:
        """Append to the file, or count the records as lost. Lock held."""
        if not self._degraded and self._file.end + len(data) <= self.max_bytes:
            try:
                self._file.append(data)
            except OSError as exc:
                self.counters["append_errors"] += 1
                self._degrade(exc.strerror or str(exc))
            else:
                self._dirty = True
                self.counters["appended_records"] += count
                self.counters["writes"] += 1
                return True
        elif not self._degraded:
            self._degrade(f"its bound of {self.max_bytes} bytes is reached")
        self.counters["lost_records"] += count
        return False

    def _notice_loss(self) -> None:
        """Set a file aside that is not what was written, and have it written again. Lock held."""
        why = "" if self._lost else self._file.why_lost(self._header)
        if not why:
            return
        self._lost = self._degraded = self._rewrite_due = True
        self._next_attempt = 0.0
        logger.error("journal %s %s by somebody else: it is written again", self.path, why)
        try:
            self._file.set_path_aside(self.path.name + ".rejected")
        except OSError as exc:
            logger.warning("journal %s: the wrong file stays until then: %s", self.path, exc)

    def _degrade(self, reason: str) -> None:
        self._degraded = True
        self._rewrite_due = True
        self._next_attempt = time.monotonic() + self._retry_interval_s
        logger.error(
            "journal %s cannot be appended to (%s): slots stored from now on will not be found "
            "after a restart, until a rewrite succeeds; retrying every %g s",
            self.path,
            reason,
            self._retry_interval_s,
        )

    def _maintain(self) -> bool:
        """Ask for a rewrite when one is due, none runs, and the last error is long enough ago."""
        if self._owner is None:
            return False
        live = self._owner.journalled
        with self._lock:
            records = (self._file.end - HEADER_BYTES) // RECORD_BYTES
            due = records > 2 * live + self._slack or self._rewrite_due
            idle = self._tail is None and not self._rewrite_asked
            if not (due and idle and time.monotonic() >= self._next_attempt):
                return False
            self._rewrite_asked = True
        if self._thread is None:
            self._rewrite()
        else:
            self._wake.set()
        return True

    def sync(self, timeout_s: float = 10.0) -> bool:
        """Retry a rewrite that is due, and make all records survive a power loss.

        Blocks until done, or, with a background thread, for ``timeout_s``. False when it did not
        end in time or failed (counted).
        """
        self._maintain()
        if self._thread is None:
            self._sync_now()
        else:
            with self._answer:
                self._asked += 1
                self._wake.set()
                asked = self._asked
                if not self._answer.wait_for(lambda: self._answered >= asked, timeout_s):
                    return False
        return not (self._sync_failing or self._degraded)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Rewrite in the owner's order, sync, and release the file. Idempotent.

        Blocks until done; with a background thread, until nothing was written for ``timeout_s``.
        False when the device did not answer in that time, in which case the file stays open and
        locked, or when records are missing in it.
        """
        if self._closed:
            return True
        with self._lock:
            self._rewrite_due = True
            self._next_attempt = 0.0
        self._maintain()
        self._stopping.set()
        self._wake.set()
        if self._thread is None:
            self._sync_now()
        else:
            steps = -1
            while self._thread.is_alive() and steps != self._steps:
                steps = self._steps
                self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.error("journal %s: the device did not answer in %g s", self.path, timeout_s)
                return False
        self._file.close()
        self._closed = True
        return not (self._sync_failing or self._degraded)

    # ---- the background thread ----

    def _run(self, interval_s: float) -> None:
        while not self._stopping.is_set():
            woken = self._wake.wait(interval_s)
            self._wake.clear()
            self._look_after()
            self._rewrite()
            with self._answer:
                asked = self._asked
            if not woken or asked > self._answered:
                self._sync_now()
            with self._answer:
                self._answered = asked
                self._answer.notify_all()
        self._rewrite()
        self._sync_now()

    def _look_after(self) -> None:
        """Notice that the file is lost, and ask for it: an idle scheduler does neither."""
        try:
            # First without the lock: appends must not wait for a device that hangs.
            if self._lost or self._file.why_lost(self._header):
                with self._lock:
                    self._notice_loss()
                    idle = self._tail is None and time.monotonic() >= self._next_attempt
                    self._rewrite_asked |= self._lost and idle
        except Exception:  # whatever it is, syncs and rewrites go on
            if not self.counters["look_errors"]:
                logger.exception("journal %s cannot be looked after", self.path)
            self.counters["look_errors"] += 1

    def _sync_now(self) -> None:
        with self._lock:
            if not self._dirty:
                return
            self._dirty = False
        try:
            self._file.sync()
        except Exception as exc:  # noqa: BLE001 - what it is, it is no sync, and the thread goes on
            self._sync_failed(exc)
        else:
            self.counters["syncs"] += 1
            self._sync_failing = False

    def _sync_failed(self, exc: Exception) -> None:
        with self._lock:
            self.counters["sync_errors"] += 1
            # The kernel forgets dirty pages that failed: only a rewrite brings them back.
            self._rewrite_due = True
            self._next_attempt = time.monotonic() + self._retry_interval_s
        if not self._sync_failing:
            logger.error(
                "journal %s cannot be synced: %s", self.path, exc, exc_info=_unforeseen(exc)
            )
        self._sync_failing = True

    def _rewrite(self) -> None:
        """Write a new file, if that was asked for, and put it in the journal's place."""
        with self._lock:
            if not self._rewrite_asked or self._owner is None:
                return
            self._rewrite_asked = self._rewrite_due = False
            self._tail, self._tail_records, self._tail_overflow = [], 0, False
        replacement: Replacement | None = None
        try:
            with self._lock:
                self._owner.begin_walk()
            replacement = Replacement(self._file, self._header)
            self._copy_live(self._owner, replacement)
            # From here on to the end the old file is not synced: whatever a caller of sync() was
            # told to be safe is in the new one before that takes its name.
            replacement.sync()
            os.close(self._install(replacement))
        except Exception as exc:  # noqa: BLE001 - what it is, the file in use is whole
            self._rewrite_failed(exc, replacement)
        else:
            self._sync_now()

    def _copy_live(self, owner: LiveRecords, replacement: Replacement) -> None:
        """Write what is live, and every record appended meanwhile."""
        next_sync = time.monotonic() + SYNC_INTERVAL_S
        more = True
        while more:
            with self._lock:
                tail = self._take_tail()
                # With the lock, so that no record about a slot gets a number below that of an
                # earlier state of it.
                records, more = owner.walk(self._sequence)
                self._sequence += len(records) // RECORD_BYTES
            replacement.write(records + tail)
            if time.monotonic() >= next_sync:  # a long rewrite must not hold up what is promised
                self._sync_now()
                replacement.sync()
                next_sync = time.monotonic() + SYNC_INTERVAL_S
            self._steps += 1
        with self._lock:
            tail = self._take_tail()
        replacement.write(tail)

    def _take_tail(self) -> bytes:
        """Records appended since the last call. Lock held."""
        if self._tail is None or self._tail_overflow:
            raise OSError("it took so long that it is out of date")
        tail = b"".join(self._tail)
        self._tail.clear()
        self._tail_records = 0
        return tail

    def _install(self, replacement: Replacement) -> int:
        """Add the records appended meanwhile and swap the files; the old descriptor."""
        with self._lock:
            old = replacement.install(self._take_tail())
            self._tail = None
            self._dirty = True
            self._sync_failing = False
            if self._degraded:
                logger.warning("journal %s is complete again", self.path)
            self.counters["restores"] += self._lost
            self._degraded = self._lost = False
            self.counters["rewrites"] += 1
            return old

    def _rewrite_failed(self, exc: Exception, replacement: Replacement | None) -> None:
        with self._lock:
            self.counters["rewrite_errors"] += 1
            self._tail = None
            self._rewrite_due = True
            self._next_attempt = time.monotonic() + self._retry_interval_s
        logger.error(
            "journal %s cannot be rewritten: %s", self.path, exc, exc_info=_unforeseen(exc)
        )
        if replacement is not None:
            try:
                replacement.discard()
            except OSError as left:
                logger.warning("journal %s: a temporary file is left behind: %s", self.path, left)


def _unforeseen(error: Exception) -> Exception | None:
    """The error, where only its traceback says what it means."""
    return None if isinstance(error, OSError) else error
