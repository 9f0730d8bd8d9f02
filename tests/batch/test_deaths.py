"""Servers that die while requests of batches are under way: whose fault it was, and who pays."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from tests.batch.served import DEADLINE_S, Model, Served, chat_line, content, joined, served, submit
from vllm_ssdkv.batch.answers import Reply
from vllm_ssdkv.batch.endpoint_protocol import NoReplyError
from vllm_ssdkv.batch.runner import WELL_S
from vllm_ssdkv.batch.users import STATE as USERS
from vllm_ssdkv.batch.users import Users, left_by_the_dead

pytestmark = pytest.mark.usefixtures("no_pauses")

SEATS = 4


@dataclass
class Life(Model):
    """One server: dies of poison, and takes what is under way with it."""

    died: bool = False
    kv: None = None
    now: float = 1e6
    sent_at: dict[str, float] = field(default_factory=dict)
    together: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Answers nothing at first."""

    def load(self) -> None:
        return None

    async def answer(self, endpoint: str, body: dict[str, Any]) -> Reply:
        name = body["messages"][-1]["content"]
        self.sent_at[name] = self.now
        self.under_way += 1
        self.together[name] = self.under_way
        await self.open.wait()
        await asyncio.sleep(0.01)
        self.under_way -= 1
        self.died |= "poison" in name
        if self.died:
            self.seen.append(name)
            raise NoReplyError("the engine has ended")
        return await super().answer(endpoint, body)


@dataclass
class Directory:
    """The batches of a directory, over many lives of its server."""

    root: Path
    batches: dict[str, list[str]]
    users: bool = False
    lives: list[Life] = field(default_factory=list)

    def live(self, ends: Callable[[Life], bool] = lambda _: False) -> None:
        """One life: until it dies, nothing is left to do, or a user's request ends it."""
        life = Life(now=self.lives[-1].now + 10 if self.lives else 1e6)

        async def scenario(server: Served) -> None:
            for name, texts in self.batches.items() if not self.lives else ():
                lines = [chat_line(f"{name}{i}", text) for i, text in enumerate(texts)]
                await submit(server.client(), lines, metadata={"name": name})
            jobs = server.service.jobs
            await joined(server)
            life.open.set()
            user = server.app.state.__getattr__(USERS).one() if self.users else None
            with contextlib.nullcontext() if user is None else user:
                deadline = time.monotonic() + DEADLINE_S
                while jobs.unended() and not life.died:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.005)
                    life.now += 2
                    life.died |= ends(life)
            while life.under_way:
                await asyncio.sleep(0.001)

        served(
            self.root, scenario, model=life, engine=life, clock=lambda: life.now, concurrency=SEATS
        )
        self.lives.append(life)

    def live_until_all_ended(self, most: int) -> int:
        """The number of deaths."""
        while not self.lives or self.lives[-1].died:
            assert len(self.lives) <= most, "it dies again and again"
            self.live()
        return len(self.lives) - 1

    def results(self) -> dict[str, tuple[str, set[str], dict[str, str]]]:
        """Status, requests with an answer, and codes of those without one, by batch."""
        found: dict[str, tuple[str, set[str], dict[str, str]]] = {}

        async def scenario(server: Served) -> None:
            client = server.client()
            async for batch in client.batches.list():
                good = {line["custom_id"] for line in await content(client, batch.output_file_id)}
                bad = {
                    line["custom_id"]: line["error"]["code"]
                    for line in await content(client, batch.error_file_id)
                }
                assert batch.metadata is not None
                name = batch.metadata["name"]
                ids = {f"{name}{i}" for i in range(len(self.batches[name]))}
                assert (good | bad.keys(), good & bad.keys()) == (ids, set())
                told = (batch.errors and batch.errors.data) or []
                assert [e.code for e in told] == ["server_died"] * (batch.status == "failed")
                found[batch.metadata["name"]] = (batch.status, good, bad)

        served(self.root, scenario, run=False, clock=lambda: self.lives[-1].now)
        return found


def fine(count: int, name: str = "fine") -> list[str]:
    return [f"{name} {i}" for i in range(count)]


def poison(count: int) -> list[str]:
    return [f"poison {i}" for i in range(count)]


def test_a_batch_of_poison_ends_two_servers(tmp_path: Path) -> None:
    directory = Directory(tmp_path, {"bad": fine(3) + poison(20)})
    assert directory.live_until_all_ended(most=2) == 2
    status, good, bad = directory.results()["bad"]
    assert status == "failed"
    assert good <= {"bad0", "bad1", "bad2"}
    assert set(bad.values()) == {"server_died"}


def test_one_line_of_poison_costs_the_others_no_answer(tmp_path: Path) -> None:
    directory = Directory(tmp_path, {"bad": [*fine(6), *poison(1), *fine(12, "more")]})
    assert directory.live_until_all_ended(most=2) == 2
    first, second, _ = directory.lives
    suspects = [name for name in first.seen if name in second.seen]
    assert 1 <= len(suspects) <= SEATS
    # All that is not suspect comes first. Then they run alone, when the server has served well.
    assert second.seen[-1] == "poison 0"
    assert second.together["poison 0"] == 1
    for name in set(suspects) & second.sent_at.keys():
        assert second.together[name] == 1
        assert second.sent_at[name] >= first.now + 10 + WELL_S
    status, good, bad = directory.results()["bad"]
    assert status == "failed"
    assert bad["bad6"] == "server_died"
    assert len(good) > 19 - SEATS - 1


def test_a_death_with_two_batches_under_way_is_charged_when_it_is_known_whose(
    tmp_path: Path,
) -> None:
    # The longest come first.
    directory = Directory(
        tmp_path, {"bad": [*poison(1), *fine(9, "longer than it")], "good": fine(30)}
    )
    assert directory.live_until_all_ended(most=2) == 2
    found = directory.results()
    assert found["good"][0] == found["bad"][0] == "completed"
    assert found["good"][2] == {}
    assert found["bad"][2] == {"bad0": "server_died"}


def test_a_batch_of_poison_beside_another_one_ends_and_the_other_does_not(tmp_path: Path) -> None:
    directory = Directory(tmp_path, {"bad": poison(30), "good": fine(30)})
    assert directory.live_until_all_ended(most=4) <= 4
    found = directory.results()
    assert (found["good"][0], found["good"][2]) == ("completed", {})
    assert found["bad"][0] == "failed"


def test_a_batch_of_poison_on_a_busy_server_ends(tmp_path: Path) -> None:
    directory = Directory(tmp_path, {"bad": poison(30)}, users=True)
    assert directory.live_until_all_ended(most=6) <= 6
    assert directory.results()["bad"][0] == "failed"


def test_deaths_by_requests_of_users_cost_a_batch_nothing(tmp_path: Path) -> None:
    """Some come at once, as by a client that tries again; one when a suspect runs alone."""
    directory = Directory(tmp_path, {"good": fine(20)}, users=True)
    directory.live(ends=lambda life: life.under_way == SEATS)
    for _ in range(3):
        soon = directory.lives[-1].now + WELL_S / 2
        directory.live(ends=lambda life: life.now > soon)  # noqa: B023
        assert directory.lives[-1].seen == []
    directory.live(ends=lambda life: life.under_way > 0)
    assert len(directory.lives[-1].seen) == 1
    directory.live_until_all_ended(most=6)
    assert directory.results()["good"] == ("completed", {f"good{i}" for i in range(20)}, {})


def test_what_users_ask_is_counted_and_left_by_the_dead(tmp_path: Path) -> None:
    counts: list[int] = []

    async def scenario(server: Served) -> None:
        async def seen() -> Response:
            (path,) = (tmp_path / "users").iterdir()
            counts.append(int.from_bytes(path.read_bytes()))
            return Response()

        for path in ("/v1/completions", "/v1/files/none"):
            server.app.add_api_route(path, seen, methods=["POST", "GET"])
        headers = {"Authorization": "Bearer key-a"}
        for method, path in (("POST", "completions"), ("GET", "completions")):
            assert (await server.http.request(method, f"/v1/{path}", headers=headers)).is_success
        await server.http.post("/v1/files/none", headers=headers)
        assert left_by_the_dead(tmp_path) == [], "it lives"
        life.died = True
        await server.http.post("/v1/completions", headers=headers)

    life = Life()
    served(tmp_path, scenario, run=False, engine=life)
    assert counts == [1, 0, 0, 1]
    ((path, count),) = left_by_the_dead(tmp_path)
    assert count == 1
    path.unlink()


def test_a_clean_end_leaves_no_count(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        users: Users = getattr(server.app.state, USERS)
        with users.one():
            pass

    served(tmp_path, scenario, run=False, engine=Life())
    assert list((tmp_path / "users").iterdir()) == []
