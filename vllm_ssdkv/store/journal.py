"""The journal: which slot holds which key, so that a restart finds it again.

An append-only file of fixed-size records (:mod:`vllm_ssdkv.store.records`). An append is one plain
write, which survives the death of the process; ``fdatasync`` follows in a background thread, at
most once per interval, so that a power loss costs that interval. What it costs is hits, never
correctness: slot headers carry the epoch, and data that does not match its record is refused.

**Bounds.** When the file holds more than ``2 * live + slack`` records it is rewritten with the
live ones: to a temporary file, fsync, rename, fsync of the directory. It never exceeds
``128 + 72 * (3 * num_slots + 2 * slack)`` bytes (:attr:`Journal.max_bytes`): ``2 * num_slots +
slack`` start a rewrite, the rest is room for one batch that touches every slot and for what
arrives during the rewrite. The temporary file exists besides it while a rewrite runs.

**Errors.** A failed append (disk full, I/O error) is counted and logged, and puts the journal into
the *degraded* state: records are counted as lost, the file keeps its valid prefix, and a rewrite
from the owner's memory is tried every ``retry_interval_s``. Its success makes the journal complete
again. No method called by the scheduler loop raises on I/O.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.errors import FormatError, StoreError
from vllm_ssdkv.store.durable import sync_directory
from vllm_ssdkv.store.journal_file import JournalFile, Replacement
from vllm_ssdkv.store.records import (
    HEADER_BYTES,
    RECORD_BYTES,
    Kind,
    Replay,
    check_header,
    encode_header,
    encode_records,
    replay,
)

logger = logging.getLogger(__name__)

SLACK_RECORDS = 4096
"""Records beyond twice the live ones that start a rewrite: 288 KiB."""

Snapshot: TypeAlias = Callable[[], tuple[NDArray[np.int64], NDArray[np.int64], list[bytes]]]
"""Gives slots [n], epochs [n] and keys [n] of all live records, least recently used first."""


def journal_bytes(num_slots: int, slack_records: int = SLACK_RECORDS) -> int:
    """Bytes that the journal of so many slots never exceeds; twice that while it is rewritten."""
    return HEADER_BYTES + RECORD_BYTES * (3 * num_slots + 2 * slack_records)


class Journal:
    """An open, locked journal file.

    All methods belong to one thread, the scheduler's. The background thread, and only it when
    there is one, syncs and writes rewrites out.

    Attributes:
        path: The file.
        recovered: What the file said when it was opened; emptied by :meth:`attach`.
        counters: ``appended_records``, ``lost_records``, ``corrupt_records``, ``append_errors``,
            ``sync_errors``, ``rewrites``, ``rewrite_errors``, ``resets``.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        store: UUID,
        fingerprint: bytes,
        num_slots: int,
        on_mismatch: Literal["raise", "reset"] = "raise",
        sync_interval_s: float | None = 1.0,
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
            on_mismatch: What to do with a file that is not this store's journal: raise, or rename
                it to ``<name>.rejected`` (one is kept), count ``resets`` and start empty.
            sync_interval_s: Seconds between ``fdatasync`` calls. None: no background thread; the
                caller syncs with :meth:`sync`, and rewrites happen inside :meth:`append`.
            retry_interval_s: Least seconds between attempts to rewrite after an error.
            lock_timeout_s: How long to wait for another process to let go.
            slack_records: Records beyond twice the live ones that start a rewrite.

        Raises:
            FormatError: it is not this store's journal, and ``on_mismatch`` is ``raise``.
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
                "lost_records",
                "corrupt_records",
                "append_errors",
                "sync_errors",
                "rewrites",
                "rewrite_errors",
                "resets",
            ),
            0,
        )
        self._header = encode_header(store, fingerprint)
        self._num_slots = num_slots
        self._slack = slack_records
        self._retry_interval_s = retry_interval_s
        self._lock = threading.Lock()
        """Guards the file, the tail and the flags."""
        self._snapshot: Snapshot | None = None
        self._image: bytes | None = None
        """Live records of a rewrite that was asked for."""
        self._tail: list[bytes] | None = None
        """Records appended since that rewrite's snapshot."""
        self._tail_records = 0
        self._tail_overflow = False
        self._degraded = False
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
                self.recovered = self._recover(store, fingerprint, on_mismatch)
            except BaseException:
                self._file.close()
                raise
        except OSError as exc:
            raise StoreError(f"journal {self.path}: {exc.strerror or exc}") from exc
        self._sequence = self.recovered.newest_sequence + 1
        self._live = len(self.recovered.keys)
        self.counters["corrupt_records"] = self.recovered.corrupt
        self._rewrite_due = self.recovered.corrupt > 0
        self._thread: threading.Thread | None = None
        if sync_interval_s is not None:
            self._thread = threading.Thread(
                target=self._run, args=(sync_interval_s,), name="ssdkv-journal", daemon=True
            )
            self._thread.start()

    def _recover(
        self, store: UUID, fingerprint: bytes, on_mismatch: Literal["raise", "reset"]
    ) -> Replay:
        data = self._file.read()
        if data:
            try:
                check_header(bytes(data[:HEADER_BYTES]), store, fingerprint)
            except FormatError as exc:
                if on_mismatch == "raise":
                    raise FormatError(f"{self.path}: {exc}") from exc
                rejected = self.path.name + ".rejected"
                logger.warning(
                    "%s is not the journal of this store (%s): kept as %s, starting empty",
                    self.path,
                    exc,
                    rejected,
                )
                self._file.set_aside(rejected)
                self.counters["resets"] += 1
                data = bytearray()
        if not data:
            self._file.start(self._header)
            return replay(b"")
        # An incomplete last record lies behind the end: the next one overwrites it.
        whole = (len(data) - HEADER_BYTES) // RECORD_BYTES
        self._file.end = HEADER_BYTES + whole * RECORD_BYTES
        return replay(memoryview(data)[HEADER_BYTES:])

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
        """Whether records are being lost because the file cannot be written."""
        with self._lock:
            return self._degraded

    def attach(self, snapshot: Snapshot, *, stale: bool) -> None:
        """Name the owner of the live records, which rewrites ask for them.

        A file found damaged or too long is rewritten first; blocks on that, up to a deadline.

        Args:
            snapshot: Called from :meth:`append`, :meth:`sync` and :meth:`close`. When a record is
                appended it must already contain that record's effect.
            stale: Whether the owner did not accept all of :attr:`recovered`.
        """
        self._snapshot = snapshot
        self._rewrite_due |= stale
        self.recovered = replay(b"")
        self._maintain()
        if self._tail is not None:
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
        """Write records of one kind; arrays of shape [n]. False when they were lost (counted).

        One write into the page cache; never raises on I/O errors, never waits for the device.

        Raises:
            ValueError: a key has not 32 bytes, or the journal is closed.
        """
        if self._stopping.is_set():
            raise ValueError(f"journal {self.path} is closed")
        data = encode_records(kind, slots, epochs, keys, self._sequence).tobytes()
        self._sequence += slots.size
        self._live += slots.size if kind is Kind.PUT else -slots.size
        with self._lock:
            self._keep_for_rewrite(data, slots.size)
            written = self._write(data, slots.size)
        self._maintain()
        return written

    def _keep_for_rewrite(self, data: bytes, count: int) -> None:
        """Remember what the running rewrite's snapshot does not contain. Lock held."""
        if self._tail is None:
            return
        self._tail_records += count
        if self._tail_records > self._num_slots + self._slack:
            self._tail_overflow = True  # the device hangs: that rewrite is void when it ends
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
                return True
        elif not self._degraded:
            self._degrade(f"its bound of {self.max_bytes} bytes is reached")
        self.counters["lost_records"] += count
        return False

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

    def _maintain(self) -> None:
        """Start a rewrite when one is due, none runs, and the last error is long enough ago."""
        if self._snapshot is None:
            return
        with self._lock:
            records = (self._file.end - HEADER_BYTES) // RECORD_BYTES
            too_long = records > 2 * self._live + self._slack
            idle = self._tail is None and self._image is None
            due = (too_long or self._rewrite_due) and time.monotonic() >= self._next_attempt
            if not (idle and due):
                return
            slots, epochs, keys = self._snapshot()
            image = encode_records(Kind.PUT, slots, epochs, keys, self._sequence)
            self._sequence += slots.size
            self._live = slots.size
            self._image = image.tobytes()
            self._tail, self._tail_records, self._tail_overflow = [], 0, False
            self._rewrite_due = False
        if self._thread is None:
            self._write_out()
        else:
            self._wake.set()

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

        Blocks for ``timeout_s`` at most when there is a background thread. False when the device
        did not answer in time, in which case the file stays open and locked, or when records are
        missing in it.
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
            self._write_out()
            with self._answer:
                asked = self._asked
            if not woken or asked > self._answered:
                self._sync_now()
            with self._answer:
                self._answered = asked
                self._answer.notify_all()
        self._write_out()
        self._sync_now()

    def _sync_now(self) -> None:
        with self._lock:
            if not self._dirty:
                return
            self._dirty = False
        try:
            self._file.sync()
        except OSError as exc:
            self._sync_failed(exc)
        else:
            self._sync_failing = False

    def _sync_failed(self, exc: OSError) -> None:
        with self._lock:
            self.counters["sync_errors"] += 1
            # The kernel forgets dirty pages that failed: only a rewrite brings them back.
            self._rewrite_due = True
            self._next_attempt = time.monotonic() + self._retry_interval_s
        if not self._sync_failing:
            logger.error("journal %s cannot be synced: %s", self.path, exc)
        self._sync_failing = True

    def _write_out(self) -> None:
        """Write a rewrite that was asked for to disk and put it in the journal's place."""
        with self._lock:
            image, self._image = self._image, None
        if image is None:
            return
        replacement: Replacement | None = None
        try:
            replacement = Replacement(self._file)
            replacement.write(self._header + image)
            os.close(self._install(replacement, len(self._header) + len(image)))
            sync_directory(self.path.parent)
        except OSError as exc:
            self._rewrite_failed(exc, replacement)

    def _install(self, replacement: Replacement, written: int) -> int:
        """Add the records appended meanwhile and swap the files; the old descriptor."""
        with self._lock:
            if self._tail is None or self._tail_overflow:
                raise OSError("it took so long that it is out of date")
            tail = b"".join(self._tail)
            old = replacement.install(written, tail)
            self._tail = None
            self._dirty = bool(tail)
            self._sync_failing = False
            if self._degraded:
                logger.warning("journal %s is complete again", self.path)
            self._degraded = False
            self.counters["rewrites"] += 1
            return old

    def _rewrite_failed(self, exc: OSError, replacement: Replacement | None) -> None:
        with self._lock:
            self.counters["rewrite_errors"] += 1
            self._tail = None
            self._rewrite_due = True
            self._next_attempt = time.monotonic() + self._retry_interval_s
        logger.error("journal %s cannot be rewritten: %s", self.path, exc)
        if replacement is not None:
            try:
                replacement.discard()
            except OSError as left:
                logger.warning("journal %s: a temporary file is left behind: %s", self.path, left)
