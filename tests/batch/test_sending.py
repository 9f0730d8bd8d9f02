"""Sending requests: after deaths of what they were sent to, and while there is room for them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.batch.served import (
    Gated,
    Model,
    Served,
    chat_line,
    ended,
    served,
    submit,
    until,
)
from vllm_ssdkv.batch import sending
from vllm_ssdkv.batch.answers import Reply
from vllm_ssdkv.batch.room import KVCache, Load, Room

pytestmark = pytest.mark.usefixtures("no_pauses")


def under_way(server: Served) -> list[int]:
    rows = server.service.database.rows("SELECT under_way FROM requests WHERE NOT done")
    return sorted(row[0] for row in rows)


def test_a_stop_is_no_death(tmp_path: Path) -> None:
    async def stopped(server: Served) -> None:
        client = server.client()
        if not [batch async for batch in client.batches.list()]:
            await submit(client, [chat_line(str(i), f"q{i}") for i in range(10)])
        await until(lambda: server.model.under_way == 4)
        assert under_way(server) == [0] * 6 + [1] * 4

    for _ in range(4):
        served(tmp_path, stopped, model=Gated())

    async def last(server: Served) -> None:
        assert under_way(server) == [0] * 10
        (row,) = server.service.jobs.unended()
        assert row["deaths"] == 0
        assert server.service.jobs.suspects(row["seq"]) == []

    served(tmp_path, last, run=False)


class Busy:
    """An engine with a load that a test sets."""

    died = False
    kv = KVCache(tokens=10_000, of_a_request=4000)

    def __init__(self) -> None:
        self.says = Load(0, 0, 0.0)

    def load(self) -> Load:
        return self.says


def test_requests_are_sent_while_there_is_room_for_them(tmp_path: Path) -> None:
    busy = Busy()
    tested = Room(busy.kv, 0.5, users_first=False)

    async def scenario(server: Served) -> None:
        client = server.client()
        server.model.open.clear()
        # Some 2,000 tokens each, of which half of KV has two; there are seats for four.
        lines = [chat_line(str(i), "x" * 8000, body=wanted(100)) for i in range(8)]
        busy.says = Load(waiting=1, running=4, used=0.2)
        batch = await submit(client, lines)
        while (await client.batches.retrieve(batch.id)).status != "in_progress":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert server.model.seen == [], "a user waits"
        await until(lambda: server.metric("batches_held") == 1)
        busy.says = Load(waiting=0, running=4, used=0.8)
        await asyncio.sleep(0.3)
        assert server.model.seen == [], "users have all of it"
        busy.says = Load(waiting=0, running=4, used=0.2)
        await until(lambda: server.model.under_way == 2)
        await asyncio.sleep(0.3)
        assert server.model.under_way == 2
        await until(lambda: server.metric("batches_held") == 0)
        server.model.open.set()
        assert (await ended(client, batch)).status == "completed"
        assert server.model.most == 2

    def wanted(tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": "x" * 8000}]
        return {"model": "m", "messages": messages, "max_tokens": tokens}

    served(tmp_path, scenario, engine=busy, room=tested)


def test_small_requests_pass_a_large_one_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "PATIENCE_S", 0.5)
    busy = Busy()
    busy.says = Load(waiting=0, running=4, used=0.2)
    # The large one takes the share of batches but for the tokens of three words.
    tested = Room(KVCache(tokens=8010, of_a_request=4000), 0.5, users_first=False)

    source = random.Random(3)

    class Steady(Model):
        async def answer(self, endpoint: str, body: dict[str, Any]) -> Reply:
            await asyncio.sleep(source.uniform(0.1, 0.3))  # so that one always runs
            return await super().answer(endpoint, body)

    async def scenario(server: Served) -> None:
        large, small = server.client("key-a"), server.client("key-b")
        many = await submit(small, [chat_line(str(i), f"s{i}") for i in range(300)])
        await until(lambda: len(server.model.seen) > 20)
        before = len(server.model.seen)
        one = await submit(large, [chat_line("large", "L" * 16_000)])
        assert (await ended(large, one)).status == "completed"
        alone = next(i for i, text in enumerate(server.model.seen) if text[0] == "L")
        # Twenty in a second: it waited for half a second, and not for the rest.
        assert before + 4 < alone < before + 60
        await small.batches.cancel(many.id)

    served(tmp_path, scenario, model=Steady(), engine=busy, room=tested)
