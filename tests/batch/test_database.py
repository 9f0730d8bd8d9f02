"""The database of the jobs at start: several servers at once, an older one, an unusable one."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.batch.served import Served, chat_line, jsonl, served, until
from vllm_ssdkv.base.errors import FormatError, StoreError
from vllm_ssdkv.batch import database
from vllm_ssdkv.batch.database import Database
from vllm_ssdkv.batch.request import CHAT


def other_starts(monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> None:
    """Whenever it is switched to WAL, so often, another process is about to write its tables.

    SQLite refuses the switch then without the wait that the connection asks for.
    """
    left = [times]

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:  # noqa: ANN401
            if "journal_mode" not in sql or not left[0]:
                return super().execute(sql, *values)
            left[0] -= 1
            with contextlib.closing(connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                return super().execute(sql, *values)

    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *given, **more: connect(*given, factory=Connection, **more)
    )


def test_a_start_waits_for_another_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "jobs.db"
    other_starts(monkeypatch, path, 3)
    opened = Database(path)
    assert [tuple(row) for row in opened.rows("PRAGMA journal_mode")] == [("wal",)]
    assert opened.row("SELECT value FROM settings WHERE name = 'salt'")
    opened.close()


def test_it_does_not_wait_for_ever_and_calls_nothing_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "jobs.db"
    other_starts(monkeypatch, path, 10**9)
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    with pytest.raises(StoreError, match="database is locked; start again when that is over"):
        Database(path)


def test_what_is_no_database_is_told(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="is not a database; move the directory away"):
        Database(path)
    assert path.read_bytes() == b"no database" * 1000


VERSION_1 = """
PRAGMA auto_vacuum = INCREMENTAL;
CREATE TABLE settings (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE files (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
  owner BLOB NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL,
  created_at INTEGER NOT NULL, expires_at INTEGER);
CREATE INDEX files_of_owner ON files (owner, seq);
CREATE TABLE batches (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
  owner BLOB NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL,
  completion_window TEXT NOT NULL, metadata TEXT, output_expires_s INTEGER NOT NULL,
  status TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
  in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER,
  expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER, model TEXT, errors TEXT,
  output_file TEXT NOT NULL, error_file TEXT NOT NULL, output_bytes INTEGER NOT NULL DEFAULT 0,
  error_bytes INTEGER NOT NULL DEFAULT 0, total INTEGER NOT NULL DEFAULT 0,
  completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
  prompt_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0,
  completion_tokens INTEGER NOT NULL DEFAULT 0, prompt_bytes INTEGER NOT NULL DEFAULT 0,
  shared_bytes INTEGER NOT NULL DEFAULT 0);
CREATE INDEX batches_of_owner ON batches (owner, seq);
CREATE INDEX batches_by_status ON batches (status, seq);
CREATE TABLE requests (batch INTEGER NOT NULL REFERENCES batches (seq) ON DELETE CASCADE,
  rank INTEGER NOT NULL, line INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
  done INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (batch, rank)) WITHOUT ROWID;
INSERT INTO settings VALUES ('salt', x'0123');
PRAGMA user_version = 1;
"""
"""Schema of `jobs.db` in the first development versions."""


def test_the_jobs_of_an_older_version_go_on(tmp_path: Path) -> None:
    """One that it had half done, and a model's name of a megabyte."""
    lines = [chat_line(str(i), f"q{i}") for i in range(4)]
    data = jsonl(lines)
    files = tmp_path / "files"
    files.mkdir()
    (files / "file-in").write_bytes(data)
    (files / "file-out").write_bytes(b'{"custom_id": "0"}\n')
    (files / "file-err").touch()
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as old, old:
        old.executescript(VERSION_1)
        old.execute(
            "INSERT INTO files (id, owner, purpose, filename, bytes, created_at) "
            "VALUES ('file-in', x'aa', 'batch', 'f', ?, 1)",
            (len(data),),
        )
        old.execute(
            "INSERT INTO batches (id, owner, endpoint, input_file, completion_window, "
            "output_expires_s, status, created_at, expires_at, model, output_file, error_file, "
            "output_bytes, total, completed) VALUES ('batch_1', x'aa', ?, 'file-in', '24h', "
            "3600, 'in_progress', 1, 99999999999, ?, 'file-out', 'file-err', 19, 4, 1)",
            (CHAT, "m" * 10**6),
        )
        offset = 0
        for i, line in enumerate(data.splitlines()):
            row = (i, i + 1, offset, len(line), int(i == 0))
            old.execute(
                "INSERT INTO requests (batch, rank, line, offset, length, done) "
                "VALUES (1, ?, ?, ?, ?, ?)",
                row,
            )
            offset += len(line) + 1

    async def scenario(server: Served) -> None:
        service = server.service
        assert service.salt == b"\x01\x23"
        await until(lambda: service.jobs.get(b"\xaa", "batch_1")["status"] == "completed")
        row = service.jobs.get(b"\xaa", "batch_1")
        assert (row["completed"], row["failed"], len(row["model"])) == (4, 0, 256)
        assert sorted(server.model.seen) == ["q1", "q2", "q3"]
        written = service.files.path("file-out").read_bytes()
        assert written.startswith(b'{"custom_id": "0"}\n')
        assert len(written.splitlines()) == 4
        # Files of before count, and so do those that came.
        assert service.files.used_bytes(b"\xaa") == service.files.used_bytes() == 8192
        service.files.delete(b"\xaa", "file-in")
        service.files.delete(b"\xaa", "file-out")
        assert service.files.used_bytes() == 0

    served(tmp_path, scenario)
    again = Database(tmp_path / "jobs.db")
    assert [row[0] for row in again.rows("SELECT status FROM batches")] == ["completed"]
    again.close()


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    Database(path).close()
    with contextlib.closing(sqlite3.connect(path)) as later, later:
        later.execute("PRAGMA user_version = 99")
    with pytest.raises(FormatError, match="version 99, this program reads 3; give another"):
        Database(path)


def test_what_is_committed_without_a_sync_is_there(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    opened = Database(path)
    with opened.transaction(synced=False) as connection:
        connection.execute("INSERT INTO settings VALUES ('a', 1)")
    with contextlib.closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT value FROM settings WHERE name = 'a'").fetchall() == [(1,)]
    assert [row[0] for row in opened.rows("PRAGMA synchronous")] == [2], "the next one is synced"
    with pytest.raises(sqlite3.OperationalError), opened.transaction(synced=False) as connection:
        connection.execute("nonsense")
    assert [row[0] for row in opened.rows("PRAGMA synchronous")] == [2]
    opened.close()
