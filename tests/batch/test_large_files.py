"""A file of 50 MB goes in, through a batch and out again, and is never held in memory."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.batch.served import chat_line, ended, serving, until
from vllm_ssdkv.base.sizes import KIB, MIB

LINES = 400
SIZE = 128 * KIB
BOUND = 12 * MIB


async def file_in_pieces() -> AsyncIterator[bytes]:
    yield b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    yield b'--B\r\nContent-Disposition: form-data; name="file"; filename="large.jsonl"\r\n\r\n'
    for i in range(LINES):
        yield json.dumps(chat_line(str(i), f"{i} " + "x" * SIZE)).encode() + b"\n"
    yield b"\r\n--B--\r\n"


async def download(app: Any, path: str) -> tuple[int, int]:  # noqa: ANN401 - any ASGI app
    """Status and size of an answer whose body is thrown away piece by piece."""
    status, size = 0, 0
    arrived = asyncio.Event()

    async def receive() -> dict[str, object]:
        await arrived.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, size
        status = message.get("status", status)
        size += len(message.get("body", b""))
        if message["type"] == "http.response.body" and not message.get("more_body"):
            arrived.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer key-a")],
    }
    await app(scope, receive, send)
    return status, size


def test_a_large_file_is_streamed(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, concurrency=2) as server:
            client = server.client()
            server.model.open.clear()
            tracemalloc.start()
            answer = await server.http.post(
                "/v1/files",
                content=file_in_pieces(),
                headers={
                    "Authorization": "Bearer key-a",
                    "Content-Type": "multipart/form-data; boundary=B",
                },
                timeout=300,
            )
            assert answer.status_code == 200, answer.text
            file = answer.json()
            assert file["bytes"] > 50 * 10**6
            batch = await client.batches.create(
                input_file_id=file["id"],
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )
            await until(lambda: server.model.under_way == 2)
            assert await download(server.app, f"/v1/files/{file['id']}/content") == (
                200,
                file["bytes"],
            )
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert most < BOUND
            await client.batches.cancel(batch.id)
            batch = await ended(client, batch)
            assert batch.status == "cancelled"
            assert batch.request_counts is not None
            assert batch.request_counts.failed == LINES

    asyncio.run(run())
