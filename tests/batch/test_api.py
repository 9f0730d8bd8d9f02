"""The Files and Batches API as the official openai client uses it, and abuses of it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.batch.served import (
    BATCH,
    FILE,
    Model,
    Served,
    chat_line,
    content,
    ended,
    multipart,
    served,
    submit,
)
from vllm_ssdkv.base.sizes import KIB, MIB
from vllm_ssdkv.batch.files import insert_file
from vllm_ssdkv.config.batch import BatchConfig

# --- files


def test_a_file_comes_and_goes(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        made = await client.files.create(
            file=("questions.jsonl", b"abc\n"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (made.object, made.bytes, made.filename) == ("file", 4, "questions.jsonl")
        assert (made.purpose, made.status) == ("batch", "processed")
        assert made.expires_at == made.created_at + 3600
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.content(made.id)).content == b"abc\n"
        assert [file.id async for file in client.files.list()] == [made.id]
        deleted = await client.files.delete(made.id)
        assert (deleted.id, deleted.deleted) == (made.id, True)
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(made.id)
        assert [file.id async for file in client.files.list()] == []
        assert list((tmp_path / "jobs" / "files").iterdir()) == []

    served(tmp_path / "jobs", scenario)


def test_lists_come_in_pages(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        ids = [
            (await client.files.create(file=(f"{i}", b"x"), purpose="batch")).id for i in range(7)
        ]
        page = await client.files.list(limit=3)
        assert [file.id for file in page.data] == ids[:3:-1]
        assert page.has_more
        assert [file.id async for file in client.files.list(limit=3)] == ids[::-1]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids
        assert [file.id async for file in client.files.list(after=ids[2])] == [ids[1], ids[0]]
        assert [file.id async for file in client.files.list(purpose="batch_output")] == []
        made = [
            await client.batches.create(
                input_file_id=i, endpoint="/v1/chat/completions", completion_window="24h"
            )
            for i in ids
        ]
        first = await client.batches.list(limit=5)
        assert [batch.id for batch in first.data] == [batch.id for batch in made[:1:-1]]
        assert first.has_more
        walked = [batch.id async for batch in client.batches.list(limit=2)]
        assert walked == [batch.id for batch in made[::-1]]
        assert [batch.id async for batch in client.batches.list(after=made[1].id)] == [made[0].id]

    served(tmp_path, scenario, run=False)


def test_names_and_modes(tmp_path: Path) -> None:
    """What a client calls a file is shown, and touches no path."""

    async def scenario(server: Served) -> None:
        client = server.client()
        for name, shown in [
            ("../../etc/passwd", "passwd"),
            ("/abs/olute", "olute"),
            ("..\\..\\windows", "windows"),
            ("new\nline\x00.jsonl", "newline.jsonl"),
            ("...", "..."),
            ("x" * 999, "x" * 255),
            ("", "file"),
            ("größe 日本.jsonl", "größe 日本.jsonl"),
        ]:
            body, kind = multipart([("purpose", None, b"batch"), ("file", name, b"x")])
            answer = await server.http.post(
                "/v1/files",
                content=body,
                headers={"Authorization": "Bearer key-a", "Content-Type": kind},
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["filename"] == shown
        for name in (".", "..", "a/..", "b\\.", ".\x00."):
            body, kind = multipart([("purpose", None, b"batch"), ("file", name, b"x")])
            headers = {"Authorization": "Bearer key-a", "Content-Type": kind}
            answer = await server.http.post("/v1/files", content=body, headers=headers)
            assert answer.status_code == 400, name
            assert answer.json()["error"]["param"] == "file"
        for odd in (
            "..",
            "../jobs.db",
            "..%2F..%2Fjobs.db",
            "file-%00",
            "%2e%2e%2fjobs.db",
            "x" * 9999,
        ):
            for path in (f"/v1/files/{odd}", f"/v1/files/{odd}/content", f"/v1/batches/{odd}"):
                answer = await server.http.get(path, headers={"Authorization": "Bearer key-a"})
                assert answer.status_code in (400, 404, 405), path
                assert b"SQLite" not in answer.content
        with pytest.raises(openai.NotFoundError):
            await client.files.delete("../jobs.db")

    served(tmp_path / "jobs", scenario, run=False)
    root = tmp_path / "jobs"
    names = [path for path in tmp_path.rglob("*") if path.parent != root / "files" and path != root]
    ours = {"files", "jobs.db", "jobs.db-wal", "jobs.db-shm", "users"}
    assert {path.name for path in names} <= ours
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    ("parts", "status", "param"),
    [
        ([BATCH], 400, "file"),
        ([FILE], 400, "purpose"),
        ([FILE, ("purpose", None, b"fine-tune")], 400, "purpose"),
        ([BATCH, FILE, FILE], 400, "file"),
        ([BATCH, ("other", "f", b"x")], 400, "other"),
        ([BATCH, FILE, ("other", None, b"x")], 400, "other"),
        ([BATCH, FILE, ("expires_after[anchor]", None, b"now")], 400, "expires_after.anchor"),
        (
            [
                BATCH,
                FILE,
                ("expires_after[anchor]", None, b"created_at"),
                ("expires_after[seconds]", None, b"1"),
            ],
            400,
            "expires_after.seconds",
        ),
        ([BATCH, FILE, ("x", None, b"y" * 8000)], 400, None),
        ([BATCH, FILE, *[(f"x{i}", None, b"") for i in range(20)]], 400, None),
        ([BATCH, ("file", "f", b"x" * (2 * KIB))], 413, "file"),
    ],
)
def test_bad_uploads_leave_nothing(
    tmp_path: Path, parts: list[tuple[str, str | None, bytes]], status: int, param: str | None
) -> None:
    async def scenario(server: Served) -> None:
        body, kind = multipart(parts)
        answer = await server.http.post(
            "/v1/files",
            content=body,
            headers={"Authorization": "Bearer key-a", "Content-Type": kind},
        )
        assert answer.status_code == status
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert server.service.files.used_bytes() == 0

    served(tmp_path, scenario, run=False, config=BatchConfig(max_file=KIB))
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "multipart/form-data; boundary=XbX"),
        (b"garbage", "multipart/form-data; boundary=XbX"),
        (multipart([BATCH, FILE])[0][:-9], "multipart/form-data; boundary=XbX"),
        (multipart([BATCH, FILE])[0], "multipart/form-data"),
        (multipart([BATCH, FILE])[0], "multipart/form-data; boundary=other"),
        (b"{}", "application/json"),
        (b"{}", ""),
    ],
)
def test_what_is_no_form_is_refused(tmp_path: Path, body: bytes, kind: str) -> None:
    async def scenario(server: Served) -> None:
        answer = await server.http.post(
            "/v1/files",
            content=body,
            headers={"Authorization": "Bearer key-a", "Content-Type": kind},
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"

    served(tmp_path, scenario, run=False)
    assert list((tmp_path / "files").iterdir()) == []


def test_the_capacity_holds_for_all_files_together(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        first = await client.files.create(file=b"x" * (700 * KIB), purpose="batch")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=b"x" * (700 * KIB), purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (413, "storage_full")
        await client.files.delete(first.id)
        await client.files.create(file=b"x" * (700 * KIB), purpose="batch")

    served(tmp_path, scenario, run=False, config=BatchConfig(capacity=MIB))
    assert len(list((tmp_path / "files").iterdir())) == 1


def test_files_and_batches_expire(tmp_path: Path) -> None:
    now = [1_000_000.0]

    async def scenario(server: Served) -> None:
        client = server.client()
        kept = await client.files.create(file=b"x", purpose="batch")
        soon = await client.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        now[0] += 3601
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(soon.id)
        assert [file.id async for file in client.files.list()] == [kept.id]
        assert server.service.files.expire() == 1
        assert [path.name for path in (tmp_path / "files").iterdir()] == [kept.id]

    served(tmp_path, scenario, run=False, clock=lambda: now[0])


# --- keys


def test_without_a_right_key_nothing_is_served(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client("wrong")
        with pytest.raises(openai.AuthenticationError):
            await client.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.AuthenticationError):
            await client.batches.list()
        assert (await server.http.get("/v1/files")).status_code == 401

    served(tmp_path, scenario, run=False)


def test_each_key_has_its_own(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        ours, theirs = server.client("key-a"), server.client("key-b")
        batch = await ended(ours, await submit(ours, [chat_line("a", "secret")]))
        assert batch.output_file_id is not None
        for identifier in (batch.input_file_id, batch.output_file_id):
            with pytest.raises(openai.NotFoundError):
                await theirs.files.retrieve(identifier)
            with pytest.raises(openai.NotFoundError):
                await theirs.files.content(identifier)
            with pytest.raises(openai.NotFoundError):
                await theirs.files.delete(identifier)
        with pytest.raises(openai.NotFoundError):
            await theirs.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            await theirs.batches.cancel(batch.id)
        with pytest.raises(openai.NotFoundError):
            await theirs.batches.list(after=batch.id)
        with pytest.raises(openai.NotFoundError):
            await theirs.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )
        assert [file.id async for file in theirs.files.list()] == []
        assert [one.id async for one in theirs.batches.list()] == []

    served(tmp_path, scenario)
    held = b"".join(path.read_bytes() for path in tmp_path.glob("jobs.db*"))
    assert b"key-a" not in held


# --- batches


def test_a_batch_from_end_to_end(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        lines = [chat_line(f"id-{i}", f"question {i}") for i in range(20)]
        made = await submit(client, lines, metadata={"night": "1"})
        assert made.status == "validating"
        batch = await ended(client, made)
        assert batch.status == "completed"
        assert (batch.object, batch.endpoint, batch.model) == ("batch", "/v1/chat/completions", "m")
        assert batch.metadata == {"night": "1"}
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
        assert batch.usage is not None
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (200, 40)
        assert batch.usage.input_tokens_details.cached_tokens == 80
        assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        assert batch.error_file_id is None
        answers = await content(client, batch.output_file_id)
        assert sorted(line["custom_id"] for line in answers) == sorted(f"id-{i}" for i in range(20))
        for line in answers:
            number = line["custom_id"].removeprefix("id-")
            assert set(line) == {"id", "custom_id", "response", "error"}
            assert line["error"] is None
            assert line["response"]["status_code"] == 200
            assert line["response"]["body"] == {"echo": f"question {number}"}
        assert len({line["id"] for line in answers}) == 20
        assert batch.output_file_id is not None
        output = await client.files.retrieve(batch.output_file_id)
        assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        assert server.model.most <= 4
        assert server.metric("batches_ended_total", outcome="completed") == 1
        assert server.metric("batch_requests_total", outcome="completed") == 20
        assert server.metric("batch_prompt_tokens_total") == 200
        assert server.metric("batch_saved_tokens_total") == 80

    served(tmp_path, scenario)


def test_bad_lines_and_failed_requests_go_to_the_error_file(tmp_path: Path) -> None:
    model = Model(
        errors={"four": [400], "five": [500, 500, 500], "six": [500, 0], "busy": [503, 0]}
    )

    async def scenario(server: Served) -> None:
        client = server.client()
        lines = [
            chat_line("good", "one"),
            b"{not json",
            b"[1, 2]",
            b'{"custom_id": "\xff"}',
            {"method": "POST"},
            chat_line("method", "x", method="GET"),
            chat_line("url", "x", url="/v1/nonsense"),
            chat_line("other", "x", url="/v1/completions"),
            chat_line("body", "x", body=[]),
            chat_line("stream", "x", body={"stream": True}),
            b"",
            chat_line("client error", "four"),
            chat_line("server error", "five"),
            chat_line("passing error", "six"),
            chat_line("busy", "busy"),
        ]
        batch = await ended(client, await submit(client, lines))
        assert batch.status == "completed"
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (14, 3, 11)
        good = await content(client, batch.output_file_id)
        assert {line["custom_id"] for line in good} == {"good", "passing error", "busy"}
        errors = await content(client, batch.error_file_id)
        bad = {
            (line["custom_id"], line["error"]["code"], line["error"]["line"])
            for line in errors
            if line["error"]
        }
        assert bad == {
            (None, "invalid_json_line", 2),
            (None, "invalid_json_line", 3),
            (None, "invalid_json_line", 4),
            (None, "invalid_custom_id", 5),
            ("method", "invalid_method", 6),
            ("url", "invalid_url", 7),
            ("other", "mismatched_url", 8),
            ("body", "invalid_body", 9),
            ("stream", "invalid_stream", 10),
        }
        sent = {
            line["custom_id"]: line["response"]["status_code"]
            for line in errors
            if not line["error"]
        }
        assert sent == {"client error": 400, "server error": 500}
        assert server.model.seen.count("five") == 3

    served(tmp_path, scenario, model=model)


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([], "empty_file", None),
        ([b"", b"  "], "empty_file", None),
        ([b"nonsense"], "invalid_json_line", 1),
        ([chat_line("a", "x"), chat_line("b", "x"), chat_line("a", "y")], "duplicate_custom_id", 3),
        ([chat_line(str(i), "x") for i in range(4)], "too_many_requests", 4),
    ],
)
def test_some_files_fail_as_a_whole(
    tmp_path: Path, lines: list[dict[str, Any] | bytes], code: str, number: int | None
) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        batch = await ended(client, await submit(client, lines))
        assert batch.status == "failed"
        assert batch.failed_at is not None
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [(e.code, e.line) for e in batch.errors.data] == [(code, number)]
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        assert server.model.seen == []

    served(tmp_path, scenario, config=BatchConfig(max_requests=3))


@pytest.mark.parametrize(
    ("changed", "status", "param"),
    [
        ({"endpoint": "/v1/nonsense"}, 400, "endpoint"),
        ({"endpoint": 7}, 400, "endpoint"),
        ({"endpoint": None}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"completion_window": 24}, 400, "completion_window"),
        ({"input_file_id": "file-none"}, 404, "id"),
        ({"input_file_id": "../jobs.db"}, 404, "id"),
        ({"input_file_id": ["x"]}, 400, "input_file_id"),
        ({"metadata": "x"}, 400, "metadata"),
        ({"metadata": {"k": 1}}, 400, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, 400, "metadata"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, 400, "metadata"),
        ({"output_expires_after": 3}, 400, "output_expires_after"),
        ({"output_expires_after": {"seconds": 3600}}, 400, "output_expires_after.anchor"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": True}},
            400,
            "output_expires_after.seconds",
        ),
        ({"unknown": 1}, 400, "unknown"),
    ],
)
def test_bad_batches_are_refused(
    tmp_path: Path, changed: dict[str, object], status: int, param: str
) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        file = await client.files.create(file=b"x", purpose="batch")
        body: dict[str, object] = {
            "input_file_id": file.id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            **changed,
        }
        with pytest.raises(openai.APIStatusError) as refused:
            await client.post("/batches", body=body, cast_to=object)
        error = refused.value
        assert (error.status_code, error.param) == (status, param)
        assert error.type == "invalid_request_error"
        assert [batch.id async for batch in client.batches.list()] == []

    served(tmp_path, scenario, run=False)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"7", b'{"a": "\\ud800"}', b"\xff", b"[" * 9999]
)
def test_bodies_that_are_no_object_are_refused(tmp_path: Path, body: bytes) -> None:
    async def scenario(server: Served) -> None:
        answer = await server.http.post(
            "/v1/batches", content=body, headers={"Authorization": "Bearer key-a"}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"

    served(tmp_path, scenario, run=False)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/files?limit=0", "limit"),
        ("/v1/files?limit=10001", "limit"),
        ("/v1/files?limit=x", "limit"),
        ("/v1/files?order=up", "order"),
        ("/v1/files?nonsense=1", "nonsense"),
        ("/v1/files?limit=1&limit=2", "limit"),
        ("/v1/files?after=nobody", "id"),
        ("/v1/batches?limit=101", "limit"),
        ("/v1/batches?after=nobody", "id"),
        ("/v1/batches?order=asc", "order"),
    ],
)
def test_bad_pages_are_refused(tmp_path: Path, path: str, param: str) -> None:
    async def scenario(server: Served) -> None:
        answer = await server.http.get(path, headers={"Authorization": "Bearer key-a"})
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"] == param

    served(tmp_path, scenario, run=False)


def test_the_input_of_a_running_batch_stays(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        server.model.open.clear()
        batch = await submit(client, [chat_line("a", "x")])
        with pytest.raises(openai.ConflictError):
            await client.files.delete(batch.input_file_id)
        server.model.open.set()
        batch = await ended(client, batch)
        await client.files.delete(batch.input_file_id)
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)

    served(tmp_path, scenario)


def test_a_list_has_room_for_so_much(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        file = await client.files.create(file=b"x", purpose="batch")
        metadata = {f"{i}" * 32: "\U0001f600" * 512 for i in range(10, 26)}
        for _ in range(60):
            await client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                metadata=metadata,
            )
        answer = await server.http.get(
            "/v1/batches?limit=100", headers={"Authorization": "Bearer key-a"}
        )
        page = answer.json()
        assert len(answer.content) < 1.1 * MIB
        assert page["has_more"]
        assert 20 < len(page["data"]) < 60
        assert page["last_id"] == page["data"][-1]["id"]
        ids = [batch.id async for batch in client.batches.list(limit=100)]
        assert len(set(ids)) == len(ids) == 60
        (owner,) = server.service.database.rows("SELECT owner FROM files")
        with server.service.database.transaction() as connection:
            for i in range(4000):
                row = (f"file-{i}", owner["owner"], "batch", "\U0001f600" * 255, 1, 1, 10**10)
                insert_file(connection, row)
        answer = await server.http.get("/v1/files", headers={"Authorization": "Bearer key-a"})
        assert len(answer.content) < 1.1 * MIB
        assert answer.json()["has_more"]
        ids = [file.id async for file in client.files.list()]
        assert len(set(ids)) == len(ids) == 4001

    served(tmp_path, scenario, run=False)


def test_the_model_of_a_batch_is_a_name(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        client = server.client()
        lines = [chat_line("a", "x"), chat_line("b", "x")]
        lines[1]["body"]["model"] = "m" * 1000
        batch = await ended(client, await submit(client, lines))
        assert batch.status == "completed"
        (error,) = await content(client, batch.error_file_id)
        assert error["error"]["code"] == "invalid_model"
        assert len(batch.model_dump_json()) < 3000

    served(tmp_path, scenario)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files"),
        ("GET", "/v1/files/x"),
        ("GET", "/v1/files/x/content"),
        ("DELETE", "/v1/files/x"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/batches/x"),
        ("POST", "/v1/batches/x/cancel"),
    ],
)
def test_a_database_that_fails_is_told_as_such(tmp_path: Path, method: str, path: str) -> None:
    async def scenario(server: Served) -> None:
        server.service.database.close()
        answer = await server.http.request(method, path, headers={"Authorization": "Bearer key-a"})
        assert answer.status_code == 507
        assert answer.json()["error"]["message"] == (
            "The server cannot store this: ProgrammingError."
        )

    served(tmp_path, scenario, run=False)
