"""Uploads and downloads: how slow they may be, and how many a key has at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.batch.served import BATCH, DEADLINE_S, FILE, Served, multipart, served, until
from tests.kit.clock import Clock
from vllm_ssdkv.base.sizes import KIB, MIB
from vllm_ssdkv.batch import transfers


async def slowly(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
    await asyncio.sleep(DEADLINE_S)


@pytest.mark.parametrize(
    ("path", "pieces", "kind"),
    [
        ("/v1/files", [], "multipart/form-data; boundary=XbX"),
        (
            "/v1/files",
            [multipart([BATCH, ("file", "f", b"x" * 99_999)])[0][:9999]],
            "multipart/form-data; boundary=XbX",
        ),
        ("/v1/batches", [b'{"input_file_id"'], "application/json"),
    ],
)
def test_what_comes_too_slowly_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, pieces: list[bytes], kind: str
) -> None:
    monkeypatch.setattr(transfers, "GRACE_S", 0.2)

    async def scenario(server: Served) -> None:
        answer = await server.http.post(
            path,
            content=slowly(*pieces),
            headers={"Authorization": "Bearer key-a", "Content-Type": kind},
        )
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "too_slow"
        assert answer.headers["connection"] == "close"
        assert server.service.files.used_bytes() == 0

    served(tmp_path, scenario, run=False)
    assert list((tmp_path / "files").iterdir()) == []


def test_what_comes_slowly_but_steadily_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    clock.govern(monkeypatch, transfers)
    monkeypatch.setattr(transfers, "SLOWEST", 10)
    body, kind = multipart([BATCH, ("file", "f", b"x" * 9 * KIB)])

    async def steadily() -> AsyncIterator[bytes]:
        for start in range(0, len(body), KIB):
            clock.sleep(transfers.GRACE_S + 20)
            await asyncio.sleep(0)  # whose time is over is ended now
            yield body[start : start + KIB]

    async def scenario(server: Served) -> None:
        answer = await server.http.post(
            "/v1/files",
            content=steadily(),
            headers={"Authorization": "Bearer key-a", "Content-Type": kind},
        )
        assert answer.status_code == 200, answer.text

    served(tmp_path, scenario, run=False)


def test_a_key_has_its_share_of_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "AT_A_TIME", 4)
    body, kind = multipart([BATCH, FILE])
    goes_on = asyncio.Event()
    begun: list[None] = []

    async def waiting() -> AsyncIterator[bytes]:
        yield body[:20]
        begun.append(None)
        await goes_on.wait()
        yield body[20:]

    async def scenario(server: Served) -> None:
        async def upload(key: str, content: Any = body) -> int:  # noqa: ANN401
            headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
            answer = await server.http.post("/v1/files", content=content, headers=headers)
            assert answer.status_code in (200, 429)
            if answer.status_code == 429:
                assert answer.json()["error"]["code"] == "too_many_transfers"
            return answer.status_code

        slow = [asyncio.create_task(upload("key-a", waiting())) for _ in range(2)]
        await until(lambda: len(begun) == 2)
        assert await upload("key-a") == 429
        assert await upload("key-b") == 200
        goes_on.set()
        assert [await task for task in slow] == [200, 200]
        assert await upload("key-a") == 200

    served(tmp_path, scenario, run=False, keys=2)


def test_who_does_not_take_a_file_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "GRACE_S", 0.2)
    sent: list[int] = []

    async def scenario(server: Served) -> None:
        client = server.client()
        file = await client.files.create(file=b"x" * MIB, purpose="batch")

        async def never() -> Any:  # noqa: ANN401
            await asyncio.sleep(DEADLINE_S)

        async def send(message: Any) -> None:  # noqa: ANN401
            sent.append(len(message.get("body", b"")))
            if len(sent) > 2:
                await never()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "path": f"/v1/files/{file.id}/content",
            "raw_path": b"",
            "query_string": b"",
            "headers": [(b"authorization", b"Bearer key-a")],
        }
        async with asyncio.timeout(DEADLINE_S / 4):
            await server.app(scope, never, send)
        assert sum(sent) < MIB

    served(tmp_path, scenario, run=False)
