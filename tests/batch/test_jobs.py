"""Batches that are remembered: how many, of which key, and which ones go."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.batch.served import Served, chat_line, ended, served, submit
from vllm_ssdkv.batch.jobs import NewBatch
from vllm_ssdkv.batch.request import COMPLETIONS
from vllm_ssdkv.config.batch import BatchConfig


def test_the_number_of_batches_is_bounded(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        server.model.open.clear()
        first = await submit(client, [chat_line("a", "x")])
        with pytest.raises(openai.RateLimitError) as refused:
            await submit(client, [chat_line("a", "x")])
        assert refused.value.code == "too_many_batches"
        server.model.open.set()
        await ended(client, first)
        second = await submit(client, [chat_line("a", "x")])
        assert [batch.id async for batch in client.batches.list()] == [second.id]

    served(tmp_path, scenario, config=BatchConfig(max_batches=1))


def test_many_batches_of_a_key_push_out_its_own(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        many, few = server.client("key-a"), server.client("key-b")

        async def begin(client: openai.AsyncOpenAI, number: int, *, end: bool) -> None:
            for _ in range(number):
                await submit(client, [chat_line("a", "x")])
                if end:
                    with server.service.database.transaction() as connection:
                        connection.execute("UPDATE batches SET status = 'failed'")

        async def kept() -> tuple[int, int]:
            first, second = [[one async for one in c.batches.list()] for c in (many, few)]
            return len(first), len(second)

        await begin(few, 3, end=True)
        newest = await few.batches.list(limit=1)
        await begin(many, 15, end=True)
        assert await kept() == (7, 3)
        # Who has fewer gets as many, and then pushes out their own, oldest first.
        await begin(few, 4, end=False)
        assert await kept() == (5, 5)
        assert (await few.batches.retrieve(newest.data[0].id)).status == "failed"
        await begin(few, 1, end=False)
        assert await kept() == (5, 5)
        with pytest.raises(openai.RateLimitError) as refused:
            await begin(few, 1, end=False)
        assert refused.value.code == "too_many_batches"
        await begin(many, 5, end=False)
        assert await kept() == (5, 5)
        with pytest.raises(openai.RateLimitError):
            await begin(many, 1, end=False)

    served(tmp_path, scenario, run=False, config=BatchConfig(max_batches=10))


def test_a_key_without_batches_finds_room_among_many_keys(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        files, jobs = server.service.files, server.service.jobs
        for i in range(8):
            owner = f"owner-{i}".encode()
            with files.upload() as upload:
                file = files.keep(upload, owner, "f", "batch", 3600)
            jobs.create(owner, NewBatch(COMPLETIONS, file["id"], "24h", 86400, None))
            with server.service.database.transaction() as connection:
                connection.execute("UPDATE batches SET status = 'failed'")
        left = server.service.database.rows("SELECT owner FROM batches ORDER BY seq")
        assert [bytes(row["owner"]) for row in left] == [b"owner-5", b"owner-6", b"owner-7"]

    served(tmp_path, scenario, run=False, config=BatchConfig(max_batches=3))


def test_a_key_has_its_share_of_batches(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        many, few = server.client("key-a"), server.client("key-b")
        for _ in range(5):
            await submit(many, [chat_line("a", "x")])
        with pytest.raises(openai.RateLimitError) as refused:
            await submit(many, [chat_line("a", "x")])
        assert refused.value.code == "too_many_batches"
        assert "5 of a key" in str(refused.value)
        for _ in range(5):
            await submit(few, [chat_line("a", "x")])

    served(tmp_path, scenario, run=False, config=BatchConfig(max_batches=10), keys=2)
