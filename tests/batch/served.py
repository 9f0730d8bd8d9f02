"""The Batch API as vLLM serves it, with vLLM's middleware and error handlers, but without a model:
what stands for the endpoints answers at once, or when a test lets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI
from openai import AsyncOpenAI
from openai.types import Batch
from prometheus_client import CollectorRegistry
from starlette.responses import Response
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_ssdkv.batch.answers import Reply, Usage
from vllm_ssdkv.batch.endpoint_protocol import AbortedError, NoReplyError
from vllm_ssdkv.batch.plugin import RUNNER, BatchPlugin, running
from vllm_ssdkv.batch.prometheus import BatchCounters
from vllm_ssdkv.batch.request import CHAT, ENDPOINTS
from vllm_ssdkv.batch.room import Engine, Room
from vllm_ssdkv.batch.routes import STATE
from vllm_ssdkv.batch.runner import Runner
from vllm_ssdkv.batch.service import Service, open_service
from vllm_ssdkv.batch.users import STATE as USERS
from vllm_ssdkv.batch.users import Users
from vllm_ssdkv.config.batch import BatchConfig

DEADLINE_S = 120.0
KEYS = ("key-a", "key-b")
ABORT = -1
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass
class Model:
    """Answers with the prompt's last message.

    Attributes:
        seen: Last messages in the order of coming.
        errors: Statuses to answer with, per last message, one after the other; 0 is an answer, and
            None that the engine has ended, ``ABORT`` that it has aborted the request.
        most: Largest number of requests that were under way together.
    """

    seen: list[str] = field(default_factory=list)
    errors: dict[str, list[int | None]] = field(default_factory=dict)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    under_way: int = 0
    most: int = 0
    aborted: int = 0

    def __post_init__(self) -> None:
        self.open.set()

    async def answer(self, endpoint: str, body: dict[str, Any]) -> Reply:
        assert endpoint == CHAT
        last = body["messages"][-1]["content"]
        self.seen.append(last)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.under_way -= 1
        status = self.errors[last].pop(0) if self.errors.get(last) else 0
        if status is None:
            raise NoReplyError("the engine has ended")
        if status == ABORT:
            raise AbortedError("the engine has aborted a request")
        if status:
            return Reply(status, json.dumps({"error": {"message": f"no {last}"}}).encode())
        return Reply(200, json.dumps({"echo": last}).encode(), Usage(10, 4, 2))


@dataclass
class Gated(Model):
    """Stops answering after a number of requests, so that a batch does not end too early."""

    closes_after: int = 0

    async def answer(self, endpoint: str, body: dict[str, Any]) -> Reply:
        if len(self.seen) >= self.closes_after:
            self.open.clear()
        return await super().answer(endpoint, body)


@dataclass
class Served:
    """A running server."""

    app: FastAPI
    service: Service
    model: Model
    registry: CollectorRegistry
    http: httpx2.AsyncClient

    def client(self, key: str = KEYS[0]) -> AsyncOpenAI:
        """The official client, which would otherwise try again on its own."""
        return AsyncOpenAI(
            api_key=key, base_url="http://batch.test/v1", http_client=self.http, max_retries=0
        )

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"vllm:ssdkv_{name}", labels)
        assert value is not None, name
        return value


async def _health() -> Response:
    return Response()


@contextlib.asynccontextmanager
async def serving(
    directory: Path,
    model: Model | None = None,
    *,
    config: BatchConfig | None = None,
    concurrency: int = 4,
    clock: Callable[[], float] = time.time,
    run: bool = True,
    keys: int = 1,
    engine: Engine | None = None,
    room: Room | None = None,
) -> AsyncIterator[Served]:
    """A server on a directory, as a restart would find it.

    It takes two keys; each has its share where ``keys`` says so.
    """
    app = FastAPI()
    BatchPlugin().attach_router(app)
    app.add_api_route("/health", _health, include_in_schema=False)
    init_exception_handler(app)
    app.add_middleware(AuthenticationMiddleware, tokens=list(KEYS))
    config = config or BatchConfig()
    model = model or Model()
    service = open_service(directory, config, frozenset(ENDPOINTS), clock, keys)
    registry = CollectorRegistry()
    counters = BatchCounters(registry)
    runner = Runner(service, model, concurrency, counters, clock, engine, room)
    setattr(app.state, STATE, service)
    setattr(app.state, RUNNER, runner)
    setattr(app.state, USERS, Users(directory, engine, counters))
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://batch.test") as http:
        served = Served(app, service, model, registry, http)
        if not run:
            yield served
            service.database.close()
            getattr(app.state, USERS).close()
            return
        async with running(app.state):
            yield served


Scenario = Callable[[Served], Awaitable[None]]


def served(directory: Path, scenario: Scenario, **options: Any) -> None:  # noqa: ANN401 - those of serving()
    """Run a scenario against a server."""

    async def run() -> None:
        async with serving(directory, **options) as server:
            await scenario(server)

    asyncio.run(run())


def chat_line(custom_id: str, text: str, **others: object) -> dict[str, Any]:
    """A request as a line of the input holds it."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "m", "messages": [{"role": "user", "content": text}]},
        **others,
    }


def jsonl(lines: Iterable[Mapping[str, object] | bytes]) -> bytes:
    """A file of lines; bytes are taken as they are."""
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


def multipart(
    parts: list[tuple[str, str | None, bytes]], boundary: str = "XbX"
) -> tuple[bytes, str]:
    """A form, written by hand: names as they are."""
    body = b""
    for name, filename, value in parts:
        named = "" if filename is None else f'; filename="{filename}"'
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
        body += head.encode() + value + b"\r\n"
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


FILE = ("file", "f", b"x")
BATCH = ("purpose", None, b"batch")


async def submit(
    client: AsyncOpenAI,
    lines: Sequence[Mapping[str, object] | bytes],
    window: str = "24h",
    **others: Any,  # noqa: ANN401 - options of batches.create
) -> Batch:
    """Upload the lines and begin a batch of them."""
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window=window,  # type: ignore[arg-type]  # others are ours
        **others,
    )


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.01)


async def joined(server: Served) -> None:
    """Wait until no batch is to be validated, and the runner has taken up each, which is a moment
    later."""
    tested, jobs = getattr(server.app.state, RUNNER), server.service.jobs
    await until(lambda: all(row["status"] == "in_progress" for row in jobs.unended()))
    await until(lambda: "_sending" in vars(tested))  # it runs
    await until(lambda: len(tested._sending.active) >= len(jobs.unended()))


async def ended(client: AsyncOpenAI, batch: Batch) -> Batch:
    """Wait until the batch has ended."""
    deadline = time.monotonic() + DEADLINE_S
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, f"still {batch.status}"
        await asyncio.sleep(0.02)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def content(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file; none if there is no file."""
    if file_id is None:
        return []
    answer = await client.files.content(file_id)
    return [json.loads(line) for line in answer.content.splitlines()]
