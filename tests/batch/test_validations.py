"""Validation of batches that were handed in: no file keeps another key's waiting."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.batch.served import (
    DEADLINE_S,
    Served,
    chat_line,
    ended,
    jsonl,
    served,
    submit,
    until,
)
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.batch import validations, validator
from vllm_ssdkv.batch.validator import Validator

pytestmark = pytest.mark.usefixtures("no_pauses")


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

    read = Validator.read

    def failing(self: Validator, path: Path, endpoint: str) -> Any:  # noqa: ANN401
        if path.name in unreadable:
            raise error
        return read(self, path, endpoint)

    monkeypatch.setattr(Validator, "read", failing)

    async def scenario(server: Served) -> None:
        client = server.client()
        server.model.open.clear()
        first = await submit(client, [chat_line(str(i), "q") for i in range(50)])
        await until(lambda: server.model.under_way == 4)
        file = await client.files.create(file=jsonl([chat_line("a", "x")]), purpose="batch")
        unreadable.add(file.id)
        # Longer than this test may take: who waits for it does not come through.
        monkeypatch.setattr(validations, "RETRY_S", 10 * DEADLINE_S)
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

    read = Validator.read

    def failing(self: Validator, path: Path, endpoint: str) -> Any:  # noqa: ANN401
        if failures:
            raise failures.pop()
        return read(self, path, endpoint)

    monkeypatch.setattr(Validator, "read", failing)

    async def scenario(server: Served) -> None:
        client = server.client()
        batch = await ended(client, await submit(client, [chat_line("a", "x")]))
        assert batch.status == "completed"
        assert server.metric("batch_errors_total") == 3

    served(tmp_path, scenario)


def test_a_key_waits_for_its_own_files_only(tmp_path: Path) -> None:
    """One of them is read at a time, however many were handed in before another key's."""

    async def scenario(server: Served) -> None:
        slow, quick = server.client("key-a"), server.client("key-b")
        file = await slow.files.create(file=b"\n" * (64 * MIB), purpose="batch")
        many = [
            await slow.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            for _ in range(2 * validations.AT_A_TIME)
        ]
        after = await ended(quick, await submit(quick, [chat_line("a", "x")]))
        assert after.status == "completed"
        left = [(await slow.batches.retrieve(batch.id)).status for batch in many]
        assert left[1:] == ["validating"] * (len(many) - 1)
        for batch in many:
            with contextlib.suppress(openai.ConflictError):  # it has ended meanwhile
                await slow.batches.cancel(batch.id)
            await ended(slow, batch)

    served(tmp_path, scenario)


def test_a_file_that_takes_too_long_twice_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validator, "MEMORY", 40 * MIB)
    monkeypatch.setattr(validator, "MEMORY_PER_LINE", 0)

    async def scenario(server: Served) -> None:
        client = server.client()
        large = await ended(client, await submit(client, [chat_line("a", "x" * 10_000_000)] * 9))
        assert large.status == "failed"
        assert large.errors is not None
        assert large.errors.data is not None
        (error,) = large.errors.data
        assert error.code == "validation_failed"
        assert "40 MiB of memory" in str(error.message)
        assert server.metric("batch_errors_total") == 1, "it was read twice"

    served(tmp_path, scenario)
