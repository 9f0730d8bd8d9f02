"""Kill -9 at any moment: every request gets one answer, and what was answered is not sent again.

Two deaths that only a batch can be to blame for end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.batch.victim import OWNER
from vllm_ssdkv.batch.answers import Usage
from vllm_ssdkv.batch.files import KEPT_S
from vllm_ssdkv.batch.jobs import Finished, NewBatch
from vllm_ssdkv.batch.request import COMPLETIONS
from vllm_ssdkv.batch.service import Service, open_service
from vllm_ssdkv.batch.validation import Summary, plan
from vllm_ssdkv.config.batch import BatchConfig

pytestmark = pytest.mark.slow

VICTIM = Path(__file__).with_name("victim.py")
DEADLINE_S = 300.0
REQUESTS = 500


def sent(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def answered(directory: Path) -> set[str]:
    """Prompts whose answer is recorded, as the database has it now."""
    with contextlib.closing(sqlite3.connect(directory / "jobs.db")) as database:
        rows = database.execute(
            "SELECT line FROM requests WHERE done UNION SELECT -1 FROM batches "
            "WHERE status = 'completed'"
        ).fetchall()
    lines = {row[0] for row in rows}
    return {str(i) for i in range(REQUESTS)} if -1 in lines else {str(line - 1) for line in lines}


def kill_again_and_again(root: Path, kills: int) -> None:
    directory, log, output = root / "jobs", root / "sent.log", root / "victim.log"
    source = random.Random(kills)
    counted: set[str] = set()
    for round_number in range(kills + 1):
        before = len(sent(log))
        with output.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, str(VICTIM), str(directory), str(log), str(REQUESTS)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stderr=errors,
            )
        deadline = time.monotonic() + DEADLINE_S
        share = REQUESTS // (kills + 1)
        wanted = before + source.randrange(0, 2 * share)
        while process.poll() is None and (round_number == kills or len(sent(log)) < wanted):
            assert time.monotonic() < deadline, output.read_text()[-4000:]
            time.sleep(source.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        assert counted.isdisjoint(sent(log)[before:]), "what was answered is not sent again"
        if (directory / "jobs.db").exists() and round_number < kills:
            with contextlib.suppress(sqlite3.OperationalError):  # killed before there were tables
                now = answered(directory)
                assert counted <= now, "what was answered stays answered"
                counted = now
    assert process.returncode == 0, output.read_text()[-4000:]
    service = open_service(directory, BatchConfig(), frozenset())
    ((batch,), _) = service.jobs.page(OWNER, after=None, limit=10)
    assert batch["status"] == "completed"
    assert batch["completed"] + batch["failed"] == batch["total"] == REQUESTS
    assert batch["deaths"] == batch["failed"], "one that was alone at two deaths, or none"
    assert batch["failed"] <= 1
    assert batch["prompt_tokens"] == 3 * batch["completed"]
    good, bad = (lines_of(service, batch[f"{name}_file"]) for name in ("output", "error"))
    assert {line["error"]["code"] for line in bad} <= {"server_died"}
    assert (len(good), len(bad)) == (batch["completed"], batch["failed"])
    names = [line["custom_id"] for line in good + bad]
    assert sorted(names) == sorted(f"id-{i}" for i in range(REQUESTS))
    for line in good:
        assert line["custom_id"] == f"id-{line['response']['body']['echo']}"
    known = {row["id"] for row in service.database.rows("SELECT id FROM files")}
    assert {batch["input_file"], batch["output_file"]} <= known
    assert {path.name for path in (directory / "files").iterdir()} == known
    service.database.close()


def lines_of(service: Service, name: str) -> list[dict[str, Any]]:
    path = service.files.path(name)
    return [json.loads(line) for line in path.open()] if path.exists() else []


def test_killed_a_few_times(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 4)


def test_a_request_that_kills_the_server_kills_two(tmp_path: Path) -> None:
    directory, log = tmp_path / "jobs", tmp_path / "sent.log"
    command = [sys.executable, str(VICTIM), str(directory), str(log), "60", "7"]
    statuses = []
    starts: list[list[str]] = []
    for _ in range(3):
        before = len(sent(log))
        ended = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=DEADLINE_S,
            check=False,
        )
        statuses.append(ended.returncode)
        starts.append(sent(log)[before:])
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL, 0]
    # Then all that is not suspect comes first, and it dies alone.
    first, second, third = starts
    assert "7" in first
    assert second[-1] == "7"
    assert third == [], "the batch has ended"
    service = open_service(directory, BatchConfig(), frozenset())
    ((batch,), _) = service.jobs.page(OWNER, after=None, limit=10)
    assert (batch["status"], batch["completed"] + batch["failed"]) == ("failed", 60)
    assert batch["completed"] >= 56, "all that was not under way with it"
    good, bad = (lines_of(service, batch[f"{name}_file"]) for name in ("output", "error"))
    assert len(good) == batch["completed"]
    assert "id-7" in {line["custom_id"] for line in bad}
    assert {line["error"]["code"] for line in bad} == {"server_died"}
    service.database.close()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kills", [10, int(os.environ.get("SSDKV_SOAK_ROUNDS", "20"))])
def test_killed_many_times(tmp_path: Path, kills: int) -> None:
    kill_again_and_again(tmp_path, kills)


def begun(directory: Path, count: int) -> tuple[Service, int]:
    """A batch in progress: its service and number."""
    service = open_service(directory, BatchConfig(), frozenset())
    with service.files.upload() as upload:
        for i in range(count):
            body = {"prompt": str(i)}
            line = {"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": body}
            service.files.append(upload, json.dumps(line).encode() + b"\n")
        file = service.files.keep(upload, OWNER, "f", "batch", KEPT_S)
    service.jobs.create(OWNER, NewBatch(COMPLETIONS, file["id"], "24h", 86400, None))
    (row,) = service.jobs.unended()
    with service.files.path(file["id"]).open("rb") as content:
        found = plan(content, COMPLETIONS, count)
    service.jobs.start(row["seq"], found.summary, found.in_order())
    return service, row["seq"]


def test_a_kill_between_file_and_database_leaves_no_trace(tmp_path: Path) -> None:
    service, seq = begun(tmp_path, 3)
    row = service.jobs.page(OWNER, after=None, limit=1)[0][0]
    torn = b'{"custom_id": "0", "torn": true}\n{"half'
    service.files.path(row["output_file"]).write_bytes(torn)
    service.jobs.record(seq, [Finished(1, b"one\n", succeeded=True, usage=Usage(1, 1, 1))])
    service.jobs.record(seq, [Finished(0, b"zero\n", succeeded=True)])
    assert not service.jobs.finish(seq, "completed"), "one request has no answer"
    service.jobs.record(seq, [Finished(2, b"bad\n", succeeded=False)])
    assert [pending.rank for pending in service.jobs.pending(seq, -1, 9)] == []
    assert service.jobs.finish(seq, "completed")
    assert service.files.path(row["output_file"]).read_bytes() == b"one\nzero\n"
    assert service.files.path(row["error_file"]).read_bytes() == b"bad\n"
    service.database.close()


def test_an_answer_is_recorded_once(tmp_path: Path) -> None:
    service, seq = begun(tmp_path, 2)
    service.jobs.record(seq, [Finished(0, b"first\n", succeeded=True)])
    with pytest.raises(ValueError, match="1 of these answers are not awaited"):
        service.jobs.record(
            seq,
            [Finished(0, b"again\n", succeeded=True), Finished(1, b"new\n", succeeded=True)],
        )
    assert [pending.rank for pending in service.jobs.pending(seq, -1, 9)] == [1]
    service.jobs.record(seq, [Finished(1, b"second\n", succeeded=True)])
    assert service.jobs.finish(seq, "completed")
    row = service.jobs.page(OWNER, after=None, limit=1)[0][0]
    assert service.files.path(row["output_file"]).read_bytes() == b"first\nsecond\n"
    service.database.close()


def test_finishing_again_after_a_kill_changes_nothing(tmp_path: Path) -> None:
    service, seq = begun(tmp_path, 1)
    service.jobs.record(seq, [Finished(0, b"x\n", succeeded=True)])
    with service.database.transaction() as connection:
        connection.execute("UPDATE batches SET status = 'finalizing', finalizing_at = 7")
    service.jobs.start(seq, Summary(0, None, 0, 0, [], [], 0), [])
    assert service.jobs.finish(seq, "completed")
    row = service.jobs.page(OWNER, after=None, limit=1)[0][0]
    assert (row["finalizing_at"], row["total"]) == (7, 1)
    service.database.close()
