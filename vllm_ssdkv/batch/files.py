"""The files of ``/v1/files``: rows in the database, content on disk under names of our own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from vllm_ssdkv.base.durable_file import sync_directory
from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.base.sizes import DAY_S, format_size
from vllm_ssdkv.batch.api_error import ApiError, not_found
from vllm_ssdkv.batch.database import REQUEST_BYTES, SMALLEST, Database
from vllm_ssdkv.config.batch import BatchConfig

KEPT_S: Final = 30 * DAY_S
"""Lifetime of uploads and results for which the user names none, as at OpenAI."""
_LIVE: Final = "(expires_at IS NULL OR expires_at > ?)"


class NoRoomError(SSDKVError):
    """Results would take more than the capacity, or a key's share of it; the text says which."""


def new_id(prefix: str) -> str:
    """An identifier that nobody can guess."""
    return prefix + secrets.token_hex(16)


def file_object(row: sqlite3.Row) -> dict[str, Any]:
    """The API's ``file`` object."""
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["bytes"],
        "created_at": row["created_at"],
        "expires_at": row["expires_at"],
        "filename": row["filename"],
        "purpose": row["purpose"],
        "status": "processed",
        "status_details": None,
    }


def counted(size: int) -> int:
    """Bytes that a file of so many counts."""
    return max(size, SMALLEST)


@dataclass
class Upload:
    """A file on its way in. Its lock tells other processes that somebody still writes it."""

    id: str
    owner: bytes
    path: Path
    file: BinaryIO
    bytes: int = 0


class Files:
    """All files of one directory. Any thread may call; every method blocks on I/O."""

    def __init__(
        self,
        database: Database,
        directory: Path,
        config: BatchConfig,
        clock: Callable[[], float],
        share: float = 1.0,
    ) -> None:
        """One key may have ``share`` of the capacity."""
        self._database = database
        self._directory = directory
        self._config = config
        self._clock = clock
        self._of_a_key = int(config.capacity * share)
        self._lock = threading.Lock()
        self._arriving: Counter[bytes] = Counter()
        directory.mkdir(mode=0o700, exist_ok=True)

    def path(self, identifier: str) -> Path:
        """Path of a file. ``identifier`` comes from the database, never from a request."""
        return self._directory / identifier

    def used_bytes(self, owner: bytes | None = None) -> int:
        """Bytes that count against the capacity, of a key or of all.

        These are files, and what batches have in progress. What arrives does not count yet.
        """
        row = self._database.row(
            "SELECT (SELECT coalesce(sum(bytes), 0) FROM usage WHERE ?1 IS NULL OR owner = ?1) "
            "+ (SELECT coalesce(sum(max(output_bytes, ?2) + max(error_bytes, ?2) + total * ?3), 0)"
            " FROM batches WHERE status IN ('in_progress', 'finalizing', 'cancelling') "
            "AND total > 0 AND (?1 IS NULL OR owner = ?1)) AS used",
            owner,
            SMALLEST,
            REQUEST_BYTES,
        )
        return 0 if row is None else int(row["used"])

    def room(self, owner: bytes) -> int:
        """Bytes that results of a key may still take; below 0 where there is none."""
        return min(
            self._config.capacity - self.used_bytes(), self._of_a_key - self.used_bytes(owner)
        )

    def full(self, owner: bytes) -> str:
        """Reason for no room: the share that is used up, and the option that says so."""
        if self._config.capacity - self.used_bytes() <= self._of_a_key - self.used_bytes(owner):
            return f"{format_size(self._config.capacity)} (batch.capacity of this server)"
        return f"{format_size(self._of_a_key)}, the share of a key (batch.key_share of this server)"

    # ---- coming in ----

    @contextlib.contextmanager
    def upload(self, owner: bytes = b"") -> Iterator[Upload]:
        """A new file of a key to write to; gone again unless :meth:`keep` was called.

        Raises:
            OSError: it cannot be created.
        """
        identifier = new_id("file-")
        path = self.path(identifier)
        file = create_locked(path)
        upload = Upload(identifier, owner, path, file)
        try:
            yield upload
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            with self._lock:
                self._arriving[owner] -= upload.bytes
                self._arriving = +self._arriving
            file.close()

    def append(self, upload: Upload, data: bytes) -> None:
        """Write the next bytes of an upload.

        Raises:
            ApiError: 413, there is no room for them.
            OSError: they could not be written.
        """
        if upload.bytes + len(data) > self._config.max_file:
            raise ApiError(
                413,
                f"The file is larger than {format_size(self._config.max_file)} "
                "(batch.max_file of this server).",
                "file",
                "file_too_large",
            )
        owner = upload.owner
        with self._lock:
            self._arriving[owner] += len(data)
            upload.bytes += len(data)
            mine, all_together = self._arriving[owner], self._arriving.total()
        if (
            self.used_bytes() + all_together > self._config.capacity
            or self.used_bytes(owner) + mine > self._of_a_key
        ):
            raise ApiError(
                413,
                f"Files and results would take more than {self.full(owner)}; delete some.",
                "file",
                "storage_full",
            )
        view = memoryview(data)
        while view:
            view = view[upload.file.write(view) :]

    def keep(
        self, upload: Upload, owner: bytes, filename: str, purpose: str, lifetime_s: int
    ) -> sqlite3.Row:
        """Make an upload a file: durable and listed from now on.

        Raises:
            OSError, sqlite3.Error: it was not kept.
        """
        os.fsync(upload.file.fileno())
        sync_directory(self._directory)
        now = int(self._clock())
        with self._database.transaction() as connection:
            insert_file(
                connection,
                (upload.id, owner, purpose, filename, upload.bytes, now, now + lifetime_s),
            )
        return self.get(owner, upload.id)

    # ---- what is there ----

    def get(self, owner: bytes, identifier: str) -> sqlite3.Row:
        """The row of a file.

        Raises:
            ApiError: 404.
        """
        row = self._database.row(
            f"SELECT * FROM files WHERE id = ? AND owner = ? AND {_LIVE}",
            _text(identifier),
            owner,
            int(self._clock()),
        )
        if row is None:
            raise not_found("File", identifier)
        return row

    def page(
        self,
        owner: bytes,
        *,
        after: str | None,
        limit: int,
        newest_first: bool,
        purpose: str | None,
    ) -> tuple[list[sqlite3.Row], bool]:
        """Up to ``limit`` files after a given one, and whether there are more.

        Raises:
            ApiError: 404, there is no file ``after``.
        """
        query = f"SELECT * FROM files WHERE owner = ? AND {_LIVE}"
        values: list[object] = [owner, int(self._clock())]
        if purpose is not None:
            query += " AND purpose = ?"
            values.append(_text(purpose))
        if after is not None:
            query += f" AND seq {'<' if newest_first else '>'} ?"
            values.append(self.get(owner, after)["seq"])
        query += f" ORDER BY seq {'DESC' if newest_first else 'ASC'} LIMIT ?"
        rows = self._database.rows(query, *values, limit + 1)
        return rows[:limit], len(rows) > limit

    def open(self, owner: bytes, identifier: str) -> tuple[BinaryIO, int]:
        """A file to read from, and its size. It stays readable if it is deleted meanwhile.

        Raises:
            ApiError: 404.
            OSError: the content is gone or cannot be read.
        """
        row = self.get(owner, identifier)
        return self.path(row["id"]).open("rb", buffering=0), int(row["bytes"])

    def delete(self, owner: bytes, identifier: str) -> None:
        """Remove a file.

        Raises:
            ApiError: 404; or 409, a batch that has not ended reads it.
        """
        with self._database.transaction() as connection:
            row = self.get(owner, identifier)
            user = connection.execute(
                "SELECT id FROM batches WHERE input_file = ? AND status IN "
                "('validating', 'in_progress', 'finalizing', 'cancelling')",
                (row["id"],),
            ).fetchone()
            if user is not None:
                raise ApiError(
                    409, f"{row['id']} is the input of {user['id']}, which has not ended.", "id"
                )
            connection.execute("DELETE FROM files WHERE seq = ?", (row["seq"],))
        self.path(row["id"]).unlink(missing_ok=True)

    # ---- housekeeping ----

    def expire(self) -> int:
        """Remove files whose time is over, and that no batch reads; the number of them."""
        with self._database.transaction() as connection:
            gone = connection.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN (SELECT input_file FROM "
                "batches WHERE status IN ('validating', 'in_progress', 'finalizing', "
                "'cancelling')) RETURNING id",
                (int(self._clock()),),
            ).fetchall()
        for row in gone:
            self.path(row["id"]).unlink(missing_ok=True)
        self._database.shrink()
        return len(gone)

    def remove_orphans(self) -> int:
        """Remove content without a row that nobody writes: left by a kill. The number of them.

        Only the process that runs the batches may call this, before it runs any.
        """
        removed = 0
        for path in self._directory.iterdir():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self._is_known(path.name):
                    path.unlink(missing_ok=True)
                    removed += 1
            except BlockingIOError:
                continue  # an upload in another process
            finally:
                os.close(fd)
        return removed

    def _is_known(self, name: str) -> bool:
        return (
            self._database.row(
                "SELECT 1 FROM files WHERE id = ?1 UNION SELECT 1 FROM batches WHERE "
                "(output_file = ?1 OR error_file = ?1) AND status IN ('in_progress', "
                "'finalizing', 'cancelling')",
                name,
            )
            is not None
        )


def create_locked(path: Path) -> BinaryIO:
    """A new file, mode 0600, that :meth:`Files.remove_orphans` of no process takes for left over.

    Raises:
        OSError: it cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # taken away before it was locked


def insert_file(
    connection: sqlite3.Connection, values: tuple[str, bytes, str, str, int, int, int]
) -> None:
    """Add the row of a file: id, owner, purpose, filename, bytes, created and expires."""
    connection.execute(
        "INSERT INTO files (id, owner, purpose, filename, bytes, created_at, expires_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        values,
    )


def _text(value: str) -> str:
    """A text that SQLite can take: lone surrogates, which no name of ours has, are replaced."""
    return value.encode("utf-8", "replace").decode()
