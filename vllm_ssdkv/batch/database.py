"""The SQLite database of files, batches and their requests: durable, one writer at a time."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import FormatError, StoreError
from vllm_ssdkv.base.sizes import KIB, MIB

VERSION: Final = 3
BUSY_S: Final = 30.0
"""Time that a call waits for another process's transaction."""
_AGAIN_S: Final = 0.01
_DAMAGE: Final = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

SMALLEST: Final = 4 * KIB
"""Least bytes that a file counts, so that many empty ones are bounded, too."""
REQUEST_BYTES: Final = 64
"""Bytes that a line of a batch that has not ended counts: its row takes about as much."""
_WAL_BYTES: Final = 64 * MIB
"""Bytes of the journal that a large transaction leaves."""
_SHRINK_PAGES: Final = 4096
"""Pages that are given back at a time, as the database is locked meanwhile."""

_SCHEMA: Final = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    """
CREATE TABLE files (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  owner BLOB NOT NULL,
  purpose TEXT NOT NULL,
  filename TEXT NOT NULL,
  bytes INTEGER NOT NULL,
  created_at INTEGER NOT NULL,
  expires_at INTEGER
)""",
    "CREATE INDEX files_of_owner ON files (owner, seq)",
    """
CREATE TABLE batches (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  owner BLOB NOT NULL,
  endpoint TEXT NOT NULL,
  input_file TEXT NOT NULL,
  completion_window TEXT NOT NULL,
  metadata TEXT,
  output_expires_s INTEGER NOT NULL,
  status TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  expires_at INTEGER NOT NULL,
  in_progress_at INTEGER,
  finalizing_at INTEGER,
  completed_at INTEGER,
  failed_at INTEGER,
  expired_at INTEGER,
  cancelling_at INTEGER,
  cancelled_at INTEGER,
  model TEXT,
  errors TEXT,
  output_file TEXT NOT NULL,
  error_file TEXT NOT NULL,
  output_bytes INTEGER NOT NULL DEFAULT 0,
  error_bytes INTEGER NOT NULL DEFAULT 0,
  total INTEGER NOT NULL DEFAULT 0,
  completed INTEGER NOT NULL DEFAULT 0,
  failed INTEGER NOT NULL DEFAULT 0,
  prompt_tokens INTEGER NOT NULL DEFAULT 0,
  cached_tokens INTEGER NOT NULL DEFAULT 0,
  completion_tokens INTEGER NOT NULL DEFAULT 0,
  prompt_bytes INTEGER NOT NULL DEFAULT 0,
  shared_bytes INTEGER NOT NULL DEFAULT 0
)""",
    "CREATE INDEX batches_of_owner ON batches (owner, seq)",
    "CREATE INDEX batches_by_status ON batches (status, seq)",
    """
CREATE TABLE requests (
  batch INTEGER NOT NULL REFERENCES batches (seq) ON DELETE CASCADE,
  rank INTEGER NOT NULL,
  line INTEGER NOT NULL,
  offset INTEGER NOT NULL,
  length INTEGER NOT NULL,
  done INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (batch, rank)
) WITHOUT ROWID""",
)
"""Version 1."""

_FROM_1_TO_2: Final = (
    # Times that the request was sent by a server that died before it was answered.
    "ALTER TABLE requests ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0",
    # What it takes of the engine. Lines of version 1 were not measured.
    "ALTER TABLE requests ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE requests ADD COLUMN answers INTEGER NOT NULL DEFAULT 1",
    "ALTER TABLE requests ADD COLUMN answer_tokens INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE requests ADD COLUMN logprobs INTEGER NOT NULL DEFAULT 0",
    "UPDATE requests SET tokens = length / 4",
    "UPDATE batches SET model = substr(model, 1, 256)",
    # Sums of files, so that nothing has to be added up when one comes in.
    "CREATE TABLE usage (owner BLOB PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID",
    f"INSERT INTO usage SELECT owner, sum(max(bytes, {SMALLEST})) FROM files GROUP BY owner",
    f"""
CREATE TRIGGER file_added AFTER INSERT ON files BEGIN
  INSERT INTO usage VALUES (new.owner, max(new.bytes, {SMALLEST}))
    ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes;
END""",
    f"""
CREATE TRIGGER file_removed AFTER DELETE ON files BEGIN
  UPDATE usage SET bytes = bytes - max(old.bytes, {SMALLEST}) WHERE owner = old.owner;
  DELETE FROM usage WHERE owner = old.owner AND bytes <= 0;
END""",
)

_FROM_2_TO_3: Final = (
    # Whether it is with the engine now, or was when the server died.
    "ALTER TABLE requests ADD COLUMN under_way INTEGER NOT NULL DEFAULT 0",
    # Two deaths were final for a request; see Jobs.charge for what the numbers mean now.
    "UPDATE requests SET attempts = 3 WHERE attempts >= 2",
    # Deaths of servers that are charged to the batch; whether the last one was not.
    "ALTER TABLE batches ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE batches ADD COLUMN doubted INTEGER NOT NULL DEFAULT 0",
)


class Database:
    """A connection that any thread may use, one at a time. Every method blocks on I/O.

    What a transaction committed survives a crash and a power loss (WAL with a sync per commit).
    """

    def __init__(self, path: Path) -> None:
        """Open or create it, mode 0600.

        Raises:
            OSError: the file cannot be created.
            FormatError: it was made by another version.
            StoreError: it is no database, or damaged; or it cannot be used now.
        """
        self._lock = threading.RLock()
        # SQLite gives its journal files the mode of the database.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        self._connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._connection.row_factory = sqlite3.Row
        try:
            self._prepare(path)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            if _code(error) in _DAMAGE:
                raise StoreError(
                    f"{path}: {error}; move the directory away to begin with an empty one"
                ) from error
            raise StoreError(f"{path}: {error}; start again when that is over") from error
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, path: Path) -> None:
        run = self._connection.execute
        # Before there is a table: space of what was deleted can then be given back.
        run("PRAGMA auto_vacuum = INCREMENTAL")
        self._switch_to_wal()
        run("PRAGMA synchronous = FULL")
        run(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        run("PRAGMA foreign_keys = ON")
        with self.transaction():
            version = int(run("PRAGMA user_version").fetchone()[0])
            if version == 0:
                for statement in _SCHEMA:
                    run(statement)
                run("INSERT INTO settings VALUES ('salt', ?)", (os.urandom(32),))
            if version > VERSION:
                raise FormatError(
                    f"{path}: version {version}, this program reads {VERSION}; give another "
                    "batch.directory, or move this one away"
                )
            for statements in (_FROM_1_TO_2, _FROM_2_TO_3)[max(0, version - 1) :]:
                for statement in statements:
                    run(statement)
            run(f"PRAGMA user_version = {VERSION}")

    def _switch_to_wal(self) -> None:
        """SQLite does not wait here, as it does elsewhere, where several servers start at once."""
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    raise
            else:
                return
            time.sleep(_AGAIN_S)

    @contextlib.contextmanager
    def transaction(self, *, synced: bool = True) -> Iterator[sqlite3.Connection]:
        """All or nothing, and durable when the block has ended.

        One that is not ``synced`` survives the end of the process, but maybe not that of the
        machine; it costs no write to the disk.

        Raises:
            sqlite3.Error: among others the disk is full; nothing was changed.
        """
        with self._lock:
            run = self._connection.execute
            if not synced:
                run("PRAGMA synchronous = NORMAL")
            try:
                run("BEGIN IMMEDIATE")
                yield self._connection
                run("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    run("ROLLBACK")
                raise
            finally:
                if not synced:
                    run("PRAGMA synchronous = FULL")

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """All rows of a query."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def row(self, query: str, *values: object) -> sqlite3.Row | None:
        """The first row of a query, or None."""
        with self._lock:
            found: sqlite3.Row | None = self._connection.execute(query, values).fetchone()
            return found

    def shrink(self) -> None:
        """Give space of deleted rows back to the file system, some of it at a time."""
        with self._lock:
            self._connection.execute(f"PRAGMA incremental_vacuum({_SHRINK_PAGES})").fetchall()

    def close(self) -> None:
        """Close it. Idempotent; nothing else may be called afterwards."""
        with self._lock:
            self._connection.close()


def _code(error: sqlite3.DatabaseError) -> int:
    """SQLite's primary result code: the rest of an extended one says only where it came up."""
    return error.sqlite_errorcode & 0xFF
