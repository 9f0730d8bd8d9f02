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
from typing import Any

import openai
import pytest

from tests.batch.served import (
    ABORT,
    DEADLINE_S,
    Gated,
    Model,
    Served,
    chat_line,
    content,
    ended,
    joined,
    served,
    serving,
    submit,
    until,
)
from vllm_ssdkv.base.sizes import KIB, MIB
from vllm_ssdkv.batch import runner
from vllm_ssdkv.batch.answers import Reply
from vllm_ssdkv.batch.files import Files
from vllm_ssdkv.batch.jobs import Jobs
from vllm_ssdkv.batch.order import BLOCK_BYTES
from vllm_ssdkv.batch.plugin import RUNNER
from vllm_ssdkv.config.batch import BatchConfig

pytestmark = pytest.mark.usefixtures("no_pauses")


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
        await joined(server)  # before anything is answered
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

    def slow(self: Jobs, *arguments: Any) -> int:  # noqa: ANN401
        if begun.is_set():
            # Another one at the same time would find answers that are recorded meanwhile.
            assert ended_once.wait(DEADLINE_S)
            return record(self, *arguments)
        begun.set()
        assert may_end.wait(DEADLINE_S)
        recorded = record(self, *arguments)
        ended_once.set()
        return recorded

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


@dataclass
class Verbose(Model):
    """Answers at length."""

    async def answer(self, endpoint: str, body: dict[str, Any]) -> Reply:
        reply = await super().answer(endpoint, body)
        return Reply(200, json.dumps({"echo": "x" * 200 * KIB}).encode(), reply.usage)


def test_a_batch_whose_results_find_no_room_ends_with_those_that_it_has(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        lines = [chat_line(str(i), f"q{i}") for i in range(40)]
        batch = await ended(client, await submit(client, lines))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == ["storage_full"]
        assert "1 MiB (batch.capacity of this server)." in str(batch.errors.data[0].message)
        # Five of 200 KiB fit; there is room to say of each of the others why it has no answer.
        good = await content(client, batch.output_file_id)
        rest = await content(client, batch.error_file_id)
        assert len(good) == 5
        assert {line["error"]["code"] for line in rest} == {"storage_full"}
        ids = [line["custom_id"] for line in good + rest]
        assert sorted(ids) == sorted(str(i) for i in range(40))
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (40, 5, 35)
        assert server.service.files.used_bytes() <= MIB
        assert len(server.model.seen) < 20, "it was told soon"
        # Everything can be deleted, and then the next one runs.
        for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            assert file is not None
            await client.files.delete(file)
        after = await ended(client, await submit(client, lines[:3]))
        assert after.status == "completed"

    served(tmp_path, scenario, model=Verbose(), config=BatchConfig(capacity=MIB))


def test_where_not_even_reasons_find_room_their_number_is_told(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        server.model.open.clear()
        lines = [chat_line("i" * 500 + str(i), "q") for i in range(60)]
        batch = await submit(client, lines)
        await until(lambda: server.model.under_way == 4)
        filler = b"x" * (MIB - server.service.files.used_bytes() - 5000)
        await client.files.create(file=filler, purpose="batch")
        batch = await ended(client, await client.batches.cancel(batch.id))
        assert batch.status == "cancelled"
        assert batch.errors is not None
        assert batch.errors.data is not None
        (error,) = batch.errors.data
        rest = await content(client, batch.error_file_id)
        assert 5 < len(rest) < 20
        assert error.code == "storage_full"
        assert f"{60 - len(rest)} requests have no line" in str(error.message)
        assert batch.request_counts is not None
        assert batch.request_counts.failed == 60
        assert server.service.files.used_bytes() <= MIB

    served(tmp_path, scenario, config=BatchConfig(capacity=MIB))


def test_a_key_that_has_taken_its_share_keeps_no_other_one_waiting(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        greedy, other = server.client("key-a"), server.client("key-b")
        lines = [chat_line(str(i), f"q{i}") for i in range(20)]
        batch = await ended(greedy, await submit(greedy, lines))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        message = str(batch.errors.data[0].message)
        assert "512 KiB, the share of a key (batch.key_share of this server)" in message
        with pytest.raises(openai.APIStatusError) as refused:
            await greedy.files.create(file=b"x" * 400 * KIB, purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (413, "storage_full")
        batch = await ended(other, await submit(other, lines[:2]))
        assert batch.status == "completed"

    served(tmp_path, scenario, model=Verbose(), config=BatchConfig(capacity=MIB), keys=2)


def test_lines_of_batches_in_progress_count(tmp_path: Path) -> None:
    """Many batches may read one file, and each has a row for each of its lines."""

    async def scenario(server: Served) -> None:
        client = server.client()
        server.model.open.clear()
        lines = [chat_line(str(i), "q") for i in range(4000)]
        first = await submit(client, lines)
        await until(lambda: server.model.under_way == 4)
        assert MIB - 4000 * 64 < server.service.files.used_bytes() <= MIB
        second = await client.batches.create(
            input_file_id=first.input_file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        second = await ended(client, second)
        assert second.status == "failed"
        assert second.errors is not None
        assert second.errors.data is not None
        assert [error.code for error in second.errors.data] == ["storage_full"]
        await client.batches.cancel(first.id)

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

    def failing(self: Jobs, *arguments: Any) -> int:  # noqa: ANN401
        if failures:
            raise failures.pop()
        return record(self, *arguments)

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
        (row,) = server.service.database.rows("SELECT * FROM batches")
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


def test_memory_is_given_back_while_there_are_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[None] = []
    monkeypatch.setattr(runner, "TRIM_S", 0.0)
    monkeypatch.setattr(runner, "trim", lambda: given.append(None))
    rounds: list[None] = []
    unended = Jobs.unended

    def counted(self: Jobs) -> Any:  # noqa: ANN401
        rounds.append(None)
        return unended(self)

    monkeypatch.setattr(Jobs, "unended", counted)

    async def some_rounds() -> None:
        after = len(rounds) + 3
        await until(lambda: len(rounds) >= after)

    async def scenario(server: Served) -> None:
        client = server.client()
        await some_rounds()
        assert not given
        batch = await ended(client, await submit(client, [chat_line("a", "x")]))
        assert batch.status == "completed"
        await some_rounds()
        assert len(given) > 1
        before = len(given)
        await some_rounds()
        assert len(given) == before, "nothing is left to be given back"

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


def test_the_trouble_of_one_batch_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Jobs.finish
    broken: list[int] = []

    def failing(self: Jobs, seq: int, *arguments: Any) -> bool:  # noqa: ANN401
        if seq in broken:
            raise OSError(errno.EIO, "unreadable")
        return finish(self, seq, *arguments)

    monkeypatch.setattr(Jobs, "finish", failing)

    async def scenario(server: Served) -> None:
        client = server.client()
        bad = await submit(client, [chat_line("a", "x")])
        broken.append(1)
        await until(lambda: server.metric("batch_errors_total") >= 1)
        good = await ended(
            client, await submit(client, [chat_line(str(i), "y") for i in range(20)])
        )
        assert good.status == "completed"
        broken.clear()
        assert (await ended(client, bad)).status == "completed"

    served(tmp_path, scenario)
