"""The batches of ``/v1/batches``: what users asked for, what is done, what is left to do.

A batch is ``validating`` until its lines are known, ``in_progress`` until each has its answer,
then ``completed``; or ``cancelling`` and ``cancelled``, ``expired``, ``failed``. Answers are
appended to a file and counted in the database: what the database counts is what exists.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vllm_ssdkv.base.durable_file import sync_directory, write_all
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.batch.answers import NO_TOKENS, Usage
from vllm_ssdkv.batch.api_error import ApiError, not_found
from vllm_ssdkv.batch.database import REQUEST_BYTES, Database
from vllm_ssdkv.batch.files import KEPT_S, Files, NoRoomError, counted, insert_file, new_id
from vllm_ssdkv.batch.order import BLOCK_BYTES
from vllm_ssdkv.batch.validation import Entry, Summary
from vllm_ssdkv.config.batch import BatchConfig

ENDED: Final = ("completed", "failed", "expired", "cancelled")
SUSPECT: Final = 1
"""Value of ``attempts`` of a request that was under way when a server died."""
CONVICTED: Final = 3
"""Value of ``attempts`` of a request that servers died of. In between it was alone at a death, but
for requests of users."""
_UNENDED_SQL: Final = "('validating', 'in_progress', 'finalizing', 'cancelling')"


def batch_object(row: sqlite3.Row) -> dict[str, Any]:
    """The API's ``batch`` object, and in ``ordering`` what the order of running saves."""
    shown = {
        name: row[name]
        for name in (
            "id",
            "endpoint",
            "model",
            "completion_window",
            "status",
            "created_at",
            "in_progress_at",
            "expires_at",
            "finalizing_at",
            "completed_at",
            "failed_at",
            "expired_at",
            "cancelling_at",
            "cancelled_at",
        )
    }
    ended = row["status"] in ENDED
    share = row["shared_bytes"] / row["prompt_bytes"] if row["prompt_bytes"] else 0.0
    errors = None
    if row["errors"] is not None:
        errors = {"object": "list", "data": json.loads(row["errors"])}
    return {
        **shown,
        "object": "batch",
        "errors": errors,
        "input_file_id": row["input_file"],
        "output_file_id": row["output_file"] if ended and row["output_bytes"] else None,
        "error_file_id": row["error_file"] if ended and row["error_bytes"] else None,
        "request_counts": {name: row[name] for name in ("total", "completed", "failed")},
        "metadata": None if row["metadata"] is None else json.loads(row["metadata"]),
        "usage": {
            "input_tokens": row["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": row["cached_tokens"]},
            "output_tokens": row["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": row["prompt_tokens"] + row["completion_tokens"],
        },
        "ordering": {
            "shared_prefix_share": round(share, 4),
            "estimated_saved_tokens": round(share * row["prompt_tokens"]),
        },
    }


@dataclass(frozen=True, slots=True)
class NewBatch:
    """Request for a batch; checked."""

    endpoint: str
    input_file: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None
    output_expires_s: int = KEPT_S


@dataclass(frozen=True, slots=True)
class Pending:
    """A request without an answer.

    Attributes:
        rank: Its place in the order of running.
        number, offset, length: Its line.
        tokens, answers, answer_tokens, logprobs: What it takes of the engine, see
            :class:`request.Size`.
        attempts: Evidence that servers die of it, up to ``CONVICTED``; see :meth:`Jobs.charge`.
    """

    rank: int
    number: int
    offset: int
    length: int
    tokens: int = 0
    answers: int = 1
    answer_tokens: int = 0
    logprobs: int = 0
    attempts: int = 0

    @property
    def seats(self) -> int:
        """Seats that it takes; a line that is no request takes one for a moment."""
        return max(1, self.answers)

    @property
    def is_suspect(self) -> bool:
        """Check whether it has to run alone."""
        return SUSPECT <= self.attempts < CONVICTED


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a server that had requests under way.

    Attributes:
        lines: How many there were.
        batches: Batches that they belong to.
        charged: Whether it is charged to one of them.
    """

    lines: int
    batches: int
    charged: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer to record.

    Attributes:
        line: For the output file, or the error file when it did not succeed.
    """

    rank: int
    line: bytes
    succeeded: bool
    usage: Usage = NO_TOKENS


class Jobs:
    """All batches of one directory. Any thread may call; every method blocks on I/O."""

    def __init__(
        self,
        database: Database,
        files: Files,
        config: BatchConfig,
        clock: Callable[[], float],
        share: float = 1.0,
    ) -> None:
        """One key may have ``share`` of the batches that have not ended."""
        self._database = database
        self._files = files
        self._config = config
        self._of_a_key = max(1, int(config.max_batches * share))
        self._clock = clock

    # ---- for users ----

    def create(self, owner: bytes, new: NewBatch) -> sqlite3.Row:
        """A batch to be run; it survives a crash from now on.

        Raises:
            ApiError: 404, no such file; 429, too many batches.
        """
        now = int(self._clock())
        identifier = new_id("batch_")
        metadata = None if new.metadata is None else json.dumps(new.metadata)
        with self._database.transaction() as connection:
            self._files.get(owner, new.input_file)
            self._make_room(connection, owner)
            connection.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file, completion_window, "
                "metadata, output_expires_s, status, created_at, expires_at, output_file, "
                "error_file) VALUES (?, ?, ?, ?, ?, ?, ?, 'validating', ?, ?, ?, ?)",
                (
                    identifier,
                    owner,
                    new.endpoint,
                    new.input_file,
                    new.completion_window,
                    metadata,
                    new.output_expires_s,
                    now,
                    now + new.window_s,
                    new_id("file-"),
                    new_id("file-"),
                ),
            )
        return self.get(owner, identifier)

    def _make_room(self, connection: sqlite3.Connection, owner: bytes) -> None:
        """Forget ended batches for a new one of ``owner``: the oldest of the key that has most.

        Otherwise one key's many batches would push out all of another one's.
        """
        (unended,) = connection.execute(
            f"SELECT count(*) FROM batches WHERE owner = ? AND status IN {_UNENDED_SQL}", (owner,)
        ).fetchone()
        if unended >= self._of_a_key:
            raise self._too_many()
        (count,) = connection.execute("SELECT count(*) FROM batches").fetchone()
        excess = count + 1 - self._config.max_batches
        if excess <= 0:
            return
        # Each key's batches are a pile: unended ones lowest, the new one on them, then those that
        # have ended, newest first. What is highest goes; of another key only what is higher than
        # the new one's place.
        gone = connection.execute(
            "DELETE FROM batches WHERE seq IN (SELECT seq FROM (SELECT seq, owner, status, "
            "(owner = :owner) + row_number() OVER (PARTITION BY owner ORDER BY status IN "
            f"{_UNENDED_SQL} DESC, seq DESC) AS height FROM batches) "
            f"WHERE status NOT IN {_UNENDED_SQL} AND (owner = :owner OR height > :unended) "
            "ORDER BY height DESC, seq LIMIT :excess)",
            {"owner": owner, "unended": unended, "excess": excess},
        ).rowcount
        if gone < excess:
            raise self._too_many()

    def _too_many(self) -> ApiError:
        return ApiError(
            429,
            f"This server keeps {self._config.max_batches} batches (batch.max_batches), "
            f"{self._of_a_key} of a key that have not ended (batch.key_share), and too few of "
            "yours have ended.",
            code="too_many_batches",
        )

    def get(self, owner: bytes, identifier: str) -> sqlite3.Row:
        """The row of a batch.

        Raises:
            ApiError: 404.
        """
        name = identifier.encode("utf-8", "replace").decode()
        row = self._database.row("SELECT * FROM batches WHERE id = ? AND owner = ?", name, owner)
        if row is None:
            raise not_found("Batch", identifier)
        return row

    def page(
        self, owner: bytes, *, after: str | None, limit: int
    ) -> tuple[list[sqlite3.Row], bool]:
        """Up to ``limit`` batches, newest first, after a given one, and whether there are more.

        Raises:
            ApiError: 404, there is no batch ``after``.
        """
        bound = 2**62 if after is None else self.get(owner, after)["seq"]
        rows = self._database.rows(
            "SELECT * FROM batches WHERE owner = ? AND seq < ? ORDER BY seq DESC LIMIT ?",
            owner,
            bound,
            limit + 1,
        )
        return rows[:limit], len(rows) > limit

    def cancel(self, owner: bytes, identifier: str) -> sqlite3.Row:
        """Ask for the end of a batch; what is answered so far is kept.

        Raises:
            ApiError: 404; or 409, it has ended or is about to.
        """
        with self._database.transaction() as connection:
            row = self.get(owner, identifier)
            if row["status"] in ("validating", "in_progress"):
                connection.execute(
                    "UPDATE batches SET status = 'cancelling', cancelling_at = ? WHERE seq = ?",
                    (int(self._clock()), row["seq"]),
                )
            elif row["status"] != "cancelling":
                raise ApiError(409, f"Cannot cancel a batch with status '{row['status']}'.", "id")
        return self.get(owner, identifier)

    # ---- for the runner: one process, the only one that changes batches otherwise ----

    def unended(self) -> list[sqlite3.Row]:
        """Batches that have not ended, oldest first: what is needed to run them."""
        return self._database.rows(
            "SELECT seq, id, owner, endpoint, input_file, status, expires_at, deaths, doubted "
            f"FROM batches WHERE status IN {_UNENDED_SQL} ORDER BY seq"
        )

    def start(self, seq: int, summary: Summary, entries: Iterable[Entry]) -> None:
        """A validated batch is in progress, unless it was cancelled meanwhile.

        Args:
            seq: The batch.
            summary: What there is in its file.
            entries: Its lines, in the order of running.

        Raises:
            NoRoomError: its lines and results would not fit.
            OSError, sqlite3.Error: nothing has changed; try again.
        """
        owner = self._one(seq)["owner"]
        if self._files.room(owner) < 2 * counted(0) + REQUEST_BYTES * summary.lines:
            raise NoRoomError(f"Its results would take more than {self._files.full(owner)}.")
        for column in ("output_file", "error_file"):
            self._create(seq, column)
        with self._database.transaction() as connection:
            changed = connection.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = ?, total = ?, "
                "model = ?, prompt_bytes = ?, shared_bytes = ? "
                "WHERE seq = ? AND status = 'validating'",
                (
                    int(self._clock()),
                    summary.lines,
                    summary.model,
                    summary.blocks * BLOCK_BYTES,
                    summary.shared_blocks * BLOCK_BYTES,
                    seq,
                ),
            ).rowcount
            if changed:
                connection.executemany(
                    "INSERT INTO requests (batch, rank, line, offset, length, tokens, answers, "
                    "answer_tokens, logprobs) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        (seq, rank, *msgspec.structs.astuple(entry))
                        for rank, entry in enumerate(entries)
                    ),
                )

    def _create(self, seq: int, column: str) -> None:
        path = self._files.path(self._one(seq)[column])
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        sync_directory(path.parent)

    def _one(self, seq: int) -> sqlite3.Row:
        (row,) = self._database.rows("SELECT * FROM batches WHERE seq = ?", seq)
        return row

    def pending(self, seq: int, after_rank: int, limit: int) -> list[Pending]:
        """The next requests without an answer, in the order of running, suspects left out."""
        return self._pending(seq, f"attempts IN (0, {CONVICTED})", after_rank, limit)

    def suspects(self, seq: int) -> list[Pending]:
        """Requests that were under way when a server died, and have to run alone."""
        return self._pending(seq, f"attempts NOT IN (0, {CONVICTED})", -1, -1)

    def rest(self, seq: int, limit: int) -> list[Pending]:
        """The first requests without an answer, whichever."""
        return self._pending(seq, "TRUE", -1, limit)

    def left(self, seq: int) -> int:
        """The number of requests without an answer."""
        (row,) = self._database.rows(
            "SELECT count(*) FROM requests WHERE batch = ? AND NOT done", seq
        )
        return int(row[0])

    def _pending(self, seq: int, which: str, after_rank: int, limit: int) -> list[Pending]:
        return [
            Pending(*row)
            for row in self._database.rows(
                "SELECT rank, line, offset, length, tokens, answers, answer_tokens, logprobs, "
                f"attempts FROM requests WHERE batch = ? AND rank > ? AND NOT done AND {which} "
                "ORDER BY rank LIMIT ?",
                seq,
                after_rank,
                limit,
            )
        ]

    def begin(self, sent: Iterable[tuple[int, int]]) -> None:
        """These requests (batch, rank) are under way: if the server dies now, they may be why.

        Known to the next start, unless the machine has gone down with the server.

        Raises:
            sqlite3.Error: nothing has changed; try again.
        """
        self._mark(sent, under_way=True)

    def put_back(self, sent: Iterable[tuple[int, int]]) -> None:
        """These are under way no more, have no answer, and killed nobody.

        Raises:
            sqlite3.Error: nothing has changed; the next server takes it for a death.
        """
        self._mark(sent, under_way=False)

    def _mark(self, sent: Iterable[tuple[int, int]], *, under_way: bool) -> None:
        with self._database.transaction(synced=False) as connection:
            connection.executemany(
                "UPDATE requests SET under_way = ? WHERE batch = ? AND rank = ? AND NOT done",
                ((under_way, seq, rank) for seq, rank in sent),
            )

    def charge(self, *, users: bool) -> Death | None:
        """Judge the death of the last server, before anything is sent; None: it did not die, or
        nothing was under way.

        A suspect that died alone is convicted; with ``users`` under way as well, at the second
        time. Otherwise all that was under way is suspect. A death is charged to a batch when one of
        its requests is convicted, or when nothing but its requests was under way. Safe to repeat.

        Raises:
            sqlite3.Error: nothing has changed; try again.
        """
        with self._database.transaction() as connection:
            rows = connection.execute(
                "SELECT batch, count(*) AS lines, max(attempts) AS attempts FROM requests "
                "WHERE under_way AND NOT done GROUP BY batch"
            ).fetchall()
            if not rows:
                return None
            lines = sum(row["lines"] for row in rows)
            was_alone = lines == 1 and rows[0]["attempts"] >= SUSPECT
            attempts, charged = SUSPECT, len(rows) == 1 and not users
            if was_alone:
                attempts = rows[0]["attempts"] + 1 if users else CONVICTED
                charged = attempts >= CONVICTED
            connection.execute(
                "UPDATE requests SET under_way = 0, attempts = min(max(attempts, ?), ?) "
                "WHERE under_way AND NOT done",
                (attempts, CONVICTED),
            )
            connection.executemany(
                "UPDATE batches SET deaths = deaths + ?, doubted = ? WHERE seq = ?",
                [(charged, not charged, row["batch"]) for row in rows],
            )
        return Death(lines, len(rows), charged)

    def record(self, seq: int, finished: Iterable[Finished]) -> int:
        """Make answers final: durable, counted, each request's once.

        First the lines are on disk, then the database counts them: a crash in between leaves
        bytes behind the counted ones, which the next record overwrites.

        Returns:
            How many there was room for; those are recorded, the first ones.

        Raises:
            OSError, sqlite3.Error: nothing was recorded; try again.
            StoreError: somebody has shortened the file of answers.
            ValueError: one of them has an answer already, or is no request of this batch.
        """
        row = self._one(seq)
        answers = self._fitting(row, finished)
        output = b"".join(answer.line for answer in answers if answer.succeeded)
        errors = b"".join(answer.line for answer in answers if not answer.succeeded)
        self._append(row["output_file"], row["output_bytes"], output)
        self._append(row["error_file"], row["error_bytes"], errors)
        usage = sum((answer.usage for answer in answers), NO_TOKENS)
        good = sum(answer.succeeded for answer in answers)
        with self._database.transaction() as connection:
            changed = connection.executemany(
                "UPDATE requests SET done = 1 WHERE batch = ? AND rank = ? AND NOT done",
                [(seq, answer.rank) for answer in answers],
            ).rowcount
            if answers and changed != len(answers):
                raise ValueError(f"{len(answers) - changed} of these answers are not awaited")
            connection.execute(
                "UPDATE batches SET output_bytes = output_bytes + ?, error_bytes = error_bytes + ?,"
                " completed = completed + ?, failed = failed + ?, prompt_tokens = prompt_tokens + "
                "?, cached_tokens = cached_tokens + ?, completion_tokens = completion_tokens + ? "
                "WHERE seq = ?",
                (
                    len(output),
                    len(errors),
                    good,
                    len(answers) - good,
                    usage.prompt,
                    usage.cached,
                    usage.completion,
                    seq,
                ),
            )
        return len(answers)

    def _fitting(self, row: sqlite3.Row, finished: Iterable[Finished]) -> list[Finished]:
        """The first answers, as many as there is room for."""
        sizes = {True: row["output_bytes"], False: row["error_bytes"]}
        room = self._files.room(row["owner"]) + sum(map(counted, sizes.values()))
        fitting: list[Finished] = []
        for answer in finished:
            sizes[answer.succeeded] += len(answer.line)
            if sum(map(counted, sizes.values())) > room:
                break
            fitting.append(answer)
        return fitting

    def _append(self, identifier: str, offset: int, data: bytes) -> None:
        if not data:
            return
        fd = os.open(self._files.path(identifier), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size < offset:
                raise StoreError(f"{identifier} has lost answers that were on disk")
            write_all(fd, data, offset)
            os.fsync(fd)
        finally:
            os.close(fd)

    def finish(self, seq: int, status: str, errors: Sequence[dict[str, Any]] = ()) -> bool:
        """End a batch: its results become files, its requests are forgotten.

        Safe to repeat after a crash. Does nothing to a batch that would be completed but was
        cancelled meanwhile, or has a request without an answer.

        Args:
            seq: The batch.
            status: ``completed``, ``expired``, ``cancelled`` or ``failed``.
            errors: Why it failed, as :meth:`fail` has them.

        Returns:
            Whether it has ended.
        """
        now = int(self._clock())
        if status == "completed":
            with self._database.transaction() as connection:
                connection.execute(
                    "UPDATE batches SET status = 'finalizing', finalizing_at = ? "
                    "WHERE seq = ? AND status = 'in_progress' AND NOT EXISTS "
                    "(SELECT 1 FROM requests WHERE batch = batches.seq AND NOT done)",
                    (now, seq),
                )
        row = self._one(seq)
        if status == "completed" and row["status"] != "finalizing":
            return False
        for name in ("output", "error"):
            self._truncate(row[f"{name}_file"], row[f"{name}_bytes"])
        with self._database.transaction() as connection:
            for name in ("output", "error"):
                if row[f"{name}_bytes"]:
                    insert_file(
                        connection,
                        (
                            row[f"{name}_file"],
                            row["owner"],
                            "batch_output",
                            f"{row['id']}_{name}.jsonl",
                            row[f"{name}_bytes"],
                            now,
                            now + row["output_expires_s"],
                        ),
                    )
            connection.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, errors = ?, "
                "failed = total - completed WHERE seq = ?",
                (status, now, json.dumps(list(errors)) if errors else None, seq),
            )
            connection.execute("DELETE FROM requests WHERE batch = ?", (seq,))
        self._database.shrink()
        return True

    def _truncate(self, identifier: str, size: int) -> None:
        path = self._files.path(identifier)
        if size == 0:
            path.unlink(missing_ok=True)
            return
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.ftruncate(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)

    def fail(self, seq: int, errors: Sequence[dict[str, Any]]) -> None:
        """End a batch of which no request can run, or whose files somebody has damaged.

        Args:
            seq: The batch.
            errors: Up to ``MAX_ERRORS`` objects with code, message, param and line.
        """
        row = self._one(seq)
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE batches SET status = 'failed', failed_at = ?, errors = ?, "
                "output_bytes = 0, error_bytes = 0 WHERE seq = ?",
                (int(self._clock()), json.dumps(list(errors)), seq),
            )
            connection.execute("DELETE FROM requests WHERE batch = ?", (seq,))
        for name in ("output", "error"):
            self._files.path(row[f"{name}_file"]).unlink(missing_ok=True)
        self._database.shrink()
