"""Running batches: order, turns, bounds, cancelling, expiry, ends of the process at bad moments."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import random
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import openai
import pytest

from tests.batch.served import (
    ABORT,
    DEADLINE_S,
    Model,
    Served,
    chat_line,
    content,
    ended,
    jsonl,
    served,
    serving,
    submit,
    until,
)
from vllm_ssdkv.batch import runner
from vllm_ssdkv.batch.answers import Reply
from vllm_ssdkv.batch.files import Files
from vllm_ssdkv.batch.jobs import Jobs
from vllm_ssdkv.batch.order import BLOCK_BYTES
from vllm_ssdkv.batch.plugin import RUNNER
from vllm_ssdkv.batch.validation import Plan, plan
from vllm_ssdkv.config_batch import BatchConfig
from vllm_ssdkv.sizes import MIB


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    monkeypatch.setattr(runner, "POLL_S", 0.05)


@dataclass
class Gated(Model):
    """Stops answering after a number of requests, so that a batch does not end too early."""

    closes_after: int = 0

    async def answer(self, endpoint: str, body: dict[str, Any]) -> Reply:
        if len(self.seen) >= self.closes_after:
            self.open.clear()
        return await super().answer(endpoint, body)


def texts(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Answers by custom_id; each is there once."""
    found = {line["custom_id"]: line["response"]["body"]["echo"] for line in lines}
    assert len(found) == len(lines)
    return found


def test_requests_that_begin_alike_run_together(tmp_path: Path) -> None:
    groups = [f"{group:x}" * (4 * BLOCK_BYTES) for group in range(8)]
    prompts = [f"{prefix} question {i}" for i in range(5) for prefix in groups]
    random.Random(7).shuffle(prompts)

    async def scenario(server: Served) -> None:
        client = server.client()
        lines = [chat_line(str(i), prompt) for i, prompt in enumerate(prompts)]
        batch = await ended(client, await submit(client, lines))
        assert batch.status == "completed"
        seen = [prompt[0] for prompt in server.model.seen]
        assert sorted(seen) == sorted(prompt[0] for prompt in prompts)
        assert sum(a != b for a, b in itertools.pairwise(seen)) == len(groups) - 1
        assert texts(await content(client, batch.output_file_id)) == {
            str(i): prompt for i, prompt in enumerate(prompts)
        }
        # Four of each five prompts find their prefix hot.
        assert batch.model_extra is not None
        share = batch.model_extra["ordering"]["shared_prefix_share"]
        assert share == pytest.approx(0.8, abs=0.01)
        saved = batch.model_extra["ordering"]["estimated_saved_tokens"]
        assert saved == pytest.approx(share * 10 * len(prompts), abs=1)

    served(tmp_path, scenario, concurrency=1)


def test_batches_take_turns_and_seats_are_bounded(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        server.model.open.clear()
        large = await submit(client, [chat_line(str(i), f"L{i}") for i in range(60)])
        small = await submit(client, [chat_line(str(i), f"S{i}") for i in range(6)])
        await until(lambda: server.model.under_way == 3)
        # The small one is validated before anything is answered.
        while (await client.batches.retrieve(small.id)).status != "in_progress":
            await asyncio.sleep(0.01)
        server.model.open.set()
        for batch in (large, small):
            assert (await ended(client, batch)).status == "completed"
        assert server.model.most == 3
        seen = "".join(text[0] for text in server.model.seen)
        assert (seen.count("L"), seen.count("S")) == (60, 6)
        # Three seats were taken before; then every other request is the small batch's.
        assert seen.rindex("S") < 3 + 2 * 6 + 3

    served(tmp_path, scenario, concurrency=3)


def test_cancelling_keeps_what_is_answered(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        made = await submit(client, [chat_line(str(i), f"q{i}") for i in range(40)])
        await until(lambda: server.metric("batch_requests_total", outcome="completed") >= 5)
        await until(lambda: server.model.under_way == 4)
        cancelled = await client.batches.cancel(made.id)
        assert cancelled.status == "cancelling"
        assert cancelled.cancelling_at is not None
        batch = await ended(client, cancelled)
        assert batch.status == "cancelled"
        assert server.model.aborted == 4
        good = await content(client, batch.output_file_id)
        rest = await content(client, batch.error_file_id)
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (40, len(good), len(rest))
        assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
        ids = [line["custom_id"] for line in good + rest]
        assert sorted(ids) == sorted(str(i) for i in range(40))

    served(tmp_path, scenario, model=Gated(closes_after=12))


def test_a_batch_that_takes_too_long_expires(tmp_path: Path) -> None:
    now = [1_000_000.0]

    async def scenario(server: Served) -> None:
        client = server.client()
        server.model.open.clear()
        made = await submit(client, [chat_line(str(i), "q") for i in range(9)], window="90m")
        assert made.expires_at == made.created_at + 5400
        await until(lambda: server.model.under_way == 4)
        now[0] += 5401
        batch = await ended(client, made)
        assert batch.status == "expired"
        assert batch.expired_at is not None
        assert batch.output_file_id is None
        rest = await content(client, batch.error_file_id)
        assert sorted(line["custom_id"] for line in rest) == [str(i) for i in range(9)]
        assert {line["error"]["code"] for line in rest} == {"batch_expired"}

    served(tmp_path, scenario, clock=lambda: now[0])


def test_the_next_start_goes_on(tmp_path: Path) -> None:
    """Answers of before are kept and not asked for again; what was under way is."""

    async def first(server: Served) -> None:
        client = server.client()
        await submit(client, [chat_line(str(i), f"q{i}") for i in range(30)])
        await until(lambda: server.metric("batch_requests_total", outcome="completed") >= 5)
        await until(lambda: server.model.under_way == 4)

    async def second(server: Served) -> None:
        client = server.client()
        (batch,) = [batch async for batch in client.batches.list()]
        batch = await ended(client, batch)
        assert batch.status == "completed"
        good = await content(client, batch.output_file_id)
        assert texts(good) == {str(i): f"q{i}" for i in range(30)}

    before, after = Gated(closes_after=12), Model()
    served(tmp_path, first, model=before)
    assert before.aborted == 4
    served(tmp_path, second, model=after)
    answered = set(before.seen) - set(after.seen)
    assert len(answered) == 30 - len(after.seen) >= 5
    assert len(after.seen) == len(set(after.seen))


def test_a_stop_while_answers_are_made_final_costs_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, ended_once = (threading.Event() for _ in range(3))
    record = Jobs.record

    def slow(self: Jobs, *arguments: Any) -> None:  # noqa: ANN401
        if begun.is_set():
            # Another one at the same time would find answers that are recorded meanwhile.
            assert ended_once.wait(DEADLINE_S)
            record(self, *arguments)
            return
        begun.set()
        assert may_end.wait(DEADLINE_S)
        record(self, *arguments)
        ended_once.set()

    monkeypatch.setattr(Jobs, "record", slow)

    async def first(server: Served) -> None:
        tested: runner.Runner = getattr(server.app.state, RUNNER)
        task = asyncio.create_task(tested.run())
        await submit(server.client(), [chat_line(str(i), f"q{i}") for i in range(9)])
        await until(lambda: begun.is_set() and len(server.model.seen) == 4)
        task.cancel()
        for _ in range(10):  # it takes note of that
            await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert server.metric("batch_errors_total") == 0
        assert server.metric("batch_requests_total", outcome="completed") == 4

    async def second(server: Served) -> None:
        client = server.client()
        (batch,) = [batch async for batch in client.batches.list()]
        batch = await ended(client, batch)
        good = await content(client, batch.output_file_id)
        assert texts(good) == {str(i): f"q{i}" for i in range(9)}
        assert len(server.model.seen) == 5

    served(tmp_path, first, run=False)
    served(tmp_path, second)


def test_a_batch_in_validation_or_cancelled_is_seen_to_by_the_next_start(tmp_path: Path) -> None:
    async def first(server: Served) -> None:
        client = server.client()
        await submit(client, [chat_line("a", "x")])
        await client.batches.cancel((await submit(client, [chat_line("b", "x")])).id)

    async def second(server: Served) -> None:
        client = server.client()
        cancelled, run = [batch async for batch in client.batches.list()]
        assert (await ended(client, run)).status == "completed"
        cancelled = await ended(client, cancelled)
        assert cancelled.status == "cancelled"
        assert (cancelled.output_file_id, cancelled.error_file_id) == (None, None)

    served(tmp_path, first, run=False)
    served(tmp_path, second)


def test_when_the_engine_ends_nothing_is_called_failed(tmp_path: Path) -> None:
    async def first(server: Served) -> None:
        client = server.client()
        await submit(client, [chat_line(str(i), f"q{i}") for i in range(10)])
        await until(lambda: server.metric("batch_requests_total", outcome="completed") == 4)
        await until(lambda: server.model.under_way == 0)
        # A sign of life of the runner: a new batch is validated, but nothing is sent.
        batch = await submit(client, [b"nonsense"])
        assert (await ended(client, batch)).status == "failed"

    async def second(server: Served) -> None:
        client = server.client()
        _, batch = [batch async for batch in client.batches.list()]
        batch = await ended(client, batch)
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (10, 10, 0)

    dying = Model(errors={"q4": [None]})
    served(tmp_path, first, model=dying, concurrency=1)
    assert dying.seen == [f"q{i}" for i in range(5)]
    served(tmp_path, second)


def test_what_a_paused_engine_aborts_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    model = Model(errors={"q2": [ABORT, ABORT], "q3": [ABORT]})

    async def work(server: Served) -> None:
        client = server.client()
        batch = await submit(client, [chat_line(str(i), f"q{i}") for i in range(6)])
        counts = (await ended(client, batch)).request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (6, 6, 0)
        assert server.metric("batch_errors_total") == 3

    served(tmp_path, work, model=model)
    assert sorted(model.seen) == ["q0", "q1", *["q2"] * 3, *["q3"] * 2, "q4", "q5"]


def test_two_processes_share_a_directory_and_one_runs(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as one, serving(tmp_path) as two:
            lines = [chat_line(str(i), f"q{i}") for i in range(8)]
            # Whichever was asked, whichever runs it.
            for asked in (one, two):
                client = asked.client()
                batch = await ended(client, await submit(client, lines))
                assert texts(await content(client, batch.output_file_id)).keys() == {
                    str(i) for i in range(8)
                }
            assert sorted(one.model.seen + two.model.seen) == sorted(
                2 * [f"q{i}" for i in range(8)]
            )
            assert not one.model.seen or not two.model.seen

    asyncio.run(run())


def test_batches_wait_for_room(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        server.model.open.clear()
        batch = await submit(client, [chat_line(str(i), "q") for i in range(6)])
        await until(lambda: server.model.under_way == 4)
        free = MIB - server.service.files.used_bytes()
        filler = await client.files.create(file=b"x" * free, purpose="batch")
        server.model.open.set()
        await until(lambda: server.metric("batch_requests_total", outcome="completed") == 4)
        assert not server.service.files.has_room()
        assert await one_more(server, batch.input_file_id) == "cancelled"
        assert len(server.model.seen) == 4
        await client.files.delete(filler.id)
        assert (await ended(client, batch)).status == "completed"
        assert len(server.model.seen) == 6

    served(tmp_path, scenario, config=BatchConfig(capacity=MIB))


async def one_more(server: Served, file_id: str) -> str:
    """Begin another batch and cancel it: when it has ended, the runner has been round."""
    client = server.client()
    batch = await client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return (await ended(client, await client.batches.cancel(batch.id))).status


def test_a_full_disk_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [
        OSError(errno.ENOSPC, "no space"),
        sqlite3.OperationalError("database or disk is full"),
    ]
    record = Jobs.record

    def failing(self: Jobs, *arguments: Any) -> None:  # noqa: ANN401
        if failures:
            raise failures.pop()
        record(self, *arguments)

    monkeypatch.setattr(Jobs, "record", failing)

    async def scenario(server: Served) -> None:
        client = server.client()
        batch = await ended(
            client, await submit(client, [chat_line(str(i), f"q{i}") for i in range(9)])
        )
        assert batch.status == "completed"
        assert len(texts(await content(client, batch.output_file_id))) == 9
        assert len(server.model.seen) == 9
        assert server.metric("batch_errors_total") == 2

    served(tmp_path, scenario)


def test_an_upload_to_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on /secret/path")

    monkeypatch.setattr(Files, "append", failing)

    async def scenario(server: Served) -> None:
        with pytest.raises(openai.APIStatusError) as refused:
            await server.client().files.create(file=b"x", purpose="batch")
        assert refused.value.status_code == 507
        assert "secret" not in str(refused.value)

    served(tmp_path, scenario, run=False)
    assert list((tmp_path / "files").iterdir()) == []


def test_a_batch_that_is_refused_keeps_no_other_one_waiting(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        for lines in ([b"nonsense"], [chat_line("a", "x"), chat_line("a", "y")], []):
            assert (await ended(client, await submit(client, lines))).status == "failed"
        after = await ended(client, await submit(client, [chat_line("a", "x")]))
        assert after.status == "completed"

    served(tmp_path, scenario)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "unreadable"), RuntimeError("a defect")])
def test_a_batch_that_cannot_be_validated_keeps_no_other_one_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    unreadable: set[str] = set()

    def failing(file: BinaryIO, *arguments: Any) -> Plan:  # noqa: ANN401
        if Path(file.name).name in unreadable:
            raise error
        return plan(file, *arguments)

    monkeypatch.setattr(runner, "plan", failing)

    async def scenario(server: Served) -> None:
        client = server.client()
        server.model.open.clear()
        first = await submit(client, [chat_line(str(i), "q") for i in range(50)])
        await until(lambda: server.model.under_way == 4)
        file = await client.files.create(file=jsonl([chat_line("a", "x")]), purpose="batch")
        unreadable.add(file.id)
        # Longer than this test may take: who waits for it does not come through.
        monkeypatch.setattr(runner, "RETRY_S", 10 * DEADLINE_S)
        bad = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        await until(lambda: server.metric("batch_errors_total") == 1)
        server.model.open.set()
        for batch in (first, await submit(client, [chat_line("b", "y")])):
            assert (await ended(client, batch)).status == "completed"
        assert server.metric("batch_errors_total") == 1
        assert (await ended(client, await client.batches.cancel(bad.id))).status == "cancelled"

    served(tmp_path, scenario)


def test_what_could_not_be_validated_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EIO, "unreadable") for _ in range(3)]

    def failing(*arguments: Any) -> Plan:  # noqa: ANN401
        if failures:
            raise failures.pop()
        return plan(*arguments)

    monkeypatch.setattr(runner, "plan", failing)

    async def scenario(server: Served) -> None:
        client = server.client()
        batch = await ended(client, await submit(client, [chat_line("a", "x")]))
        assert batch.status == "completed"
        assert server.metric("batch_errors_total") == 3

    served(tmp_path, scenario)


def test_a_batch_whose_input_is_gone_fails(tmp_path: Path) -> None:
    async def first(server: Served) -> None:
        batch = await submit(server.client(), [chat_line("a", "x")])
        server.service.files.path(batch.input_file_id).unlink()

    async def second(server: Served) -> None:
        client = server.client()
        (batch,) = [batch async for batch in client.batches.list()]
        batch = await ended(client, batch)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == ["input_lost"]
        await until(lambda: server.metric("batches_ended_total", outcome="failed") == 1)

    served(tmp_path, first, run=False)
    served(tmp_path, second)


@pytest.mark.parametrize(
    ("lost", "deleted"), [("input", True), ("output", False), ("output", True)]
)
def test_files_that_somebody_damaged_end_the_batch(
    tmp_path: Path, lost: str, *, deleted: bool
) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        made = await submit(client, [chat_line(str(i), f"q{i}") for i in range(30)])
        await until(lambda: server.model.under_way == 4 and len(server.model.seen) > 12)
        await until(lambda: server.metric("batch_requests_total", outcome="completed") >= 1)
        row = server.service.jobs.unended()[0]
        path = server.service.files.path(row[f"{lost}_file"])
        if deleted:
            path.unlink()
        else:
            os.truncate(path, 1)
        server.model.closes_after = 10**9
        server.model.open.set()
        batch = await ended(client, made)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == ["files_damaged"]
        # Others go on.
        after = await ended(client, await submit(client, [chat_line("a", "x")]))
        assert after.status == "completed"

    served(tmp_path, scenario, model=Gated(closes_after=12))


def test_what_a_kill_left_behind_is_removed(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        with server.service.files.upload() as upload:
            server.service.files.append(upload, b"x")
            left = tmp_path / "files" / "file-left"
            left.write_bytes(b"x")
            assert server.service.files.remove_orphans() == 1
            assert not left.exists()
            assert upload.path.exists(), "somebody still writes it"

    served(tmp_path, scenario, run=False)


def test_lines_of_the_error_file_are_json(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        odd = 'quote " newline \n é \u2028'
        batch = await ended(client, await submit(client, [chat_line(odd, "x")]))
        (line,) = await content(client, batch.output_file_id)
        assert line["custom_id"] == odd
        assert json.dumps(line)

    served(tmp_path, scenario)


def test_it_ends_although_it_was_woken_at_that_moment(tmp_path: Path) -> None:
    """What asyncio.wait_for of Python 3.11 forgets: a cancellation that comes with the event."""

    async def run() -> None:
        async with serving(tmp_path, run=False) as server:
            tested: runner.Runner = getattr(server.app.state, RUNNER)
            for pause in range(10):  # in milliseconds: most find it waiting for something to do
                task = asyncio.create_task(tested.run())
                await asyncio.sleep(0.03 + pause / 1000)
                tested.wake()
                task.cancel()
                _, late = await asyncio.wait([task], timeout=10)
                assert not late

    asyncio.run(run())
