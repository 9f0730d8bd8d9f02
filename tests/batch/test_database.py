"""The database of the jobs at start: several servers at once, and one that cannot be used."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from vllm_ssdkv.batch import database
from vllm_ssdkv.batch.database import Database
from vllm_ssdkv.errors import StoreError


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
