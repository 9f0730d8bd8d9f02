"""Batches from file to file: same format, order of the input, interrupted and gone on with."""

from __future__ import annotations

import asyncio
import json
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from tests.batch.served import DEADLINE_S, KEYS, Model, chat_line, jsonl
from vllm_ssdkv.base.errors import BatchError
from vllm_ssdkv.batch import offline
from vllm_ssdkv.batch.answers import Reply, run_batch_line
from vllm_ssdkv.batch.endpoint_protocol import NoReplyError
from vllm_ssdkv.batch.offline import Progress, read_plan, run
from vllm_ssdkv.batch.order import BLOCK_BYTES
from vllm_ssdkv.batch.output_log import PartialOutput
from vllm_ssdkv.cli.main import app

MODEL = Path(__file__).resolve().parents[2] / "vllm_ssdkv" / "demo_model"


def written(root: Path, texts: list[str]) -> Path:
    path = root / "in.jsonl"
    path.write_bytes(jsonl([chat_line(f"id-{i}", text) for i, text in enumerate(texts)]))
    return path


def go(path: Path, output: Path, model: Model, publish: bool = True) -> Progress:
    found = read_plan(path)
    partial = PartialOutput(path, output, "m")
    told: list[int] = []
    try:
        progress = asyncio.run(
            run(path, found, partial, model, 3, lambda now: told.append(now.done))
        )
        assert told == sorted(told)
        assert told[-1] == progress.requests == progress.done
        if publish:
            partial.publish([f"id-{i}" for i in range(progress.requests)])
    finally:
        partial.close()
    return progress


def test_answers_come_in_the_order_of_the_input(tmp_path: Path) -> None:
    texts = [f"{i % 3}" * (2 * BLOCK_BYTES) + f" q{i}" for i in range(12)]
    path, output = written(tmp_path, texts), tmp_path / "out.jsonl"
    model = Model(errors={texts[4]: [400]})
    progress = go(path, output, model)
    assert (progress.failed, progress.usage.prompt, progress.usage.cached) == (1, 110, 44)
    assert progress.expected_share == pytest.approx(0.75, abs=0.01)
    groups = [text[0] for text in model.seen]
    assert groups == sorted(groups, key=groups.index), "groups are contiguous"
    lines = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"id-{i}" for i in range(12)]
    for i, line in enumerate(lines):
        assert set(line) == {"id", "custom_id", "response", "error"}
        if i == 4:
            assert line["response"]["status_code"] == 400
            assert line["response"]["body"] is None
            assert line["error"] == {"error": {"message": f"no {texts[4]}"}}
        else:
            assert line["response"]["body"] == {"echo": texts[i]}
            assert line["error"] is None
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    "tail", [b"", b'{"custom_id": "id-9", "tor', b"\x00\x00\n", b'{"id":"x"}\n']
)
def test_an_interrupted_run_is_gone_on_with(tmp_path: Path, tail: bytes) -> None:
    texts = [f"q{i}" for i in range(10)]
    path, output = written(tmp_path, texts), tmp_path / "out.jsonl"
    first = Model(errors={"q5": [None]})
    with pytest.raises(NoReplyError):
        go(path, output, first)
    assert not output.exists()
    (part,) = tmp_path.glob("*.part")
    with part.open("ab") as file:
        file.write(tail)
    answered = part.read_bytes().count(b'"response"')
    assert answered >= 3
    second = Model()
    progress = go(path, output, second)
    assert len(second.seen) == 10 - answered
    assert (progress.requests, progress.usage.prompt) == (10, 10 * len(second.seen))
    lines = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [line["response"]["body"]["echo"] for line in lines] == texts
    assert not part.exists()


def test_failures_of_an_interrupted_run_count(tmp_path: Path) -> None:
    """The command's exit code is about the file, not about its last run."""
    path, output = written(tmp_path, ["a", "b"]), tmp_path / "out.jsonl"
    assert go(path, output, Model(errors={"a": [400]}), publish=False).failed == 1
    assert go(path, output, Model()).failed == 1


def test_what_an_engine_died_of_is_tried_alone_and_then_no_more(tmp_path: Path) -> None:
    path, output = written(tmp_path, [f"q{i}" for i in range(10)]), tmp_path / "out.jsonl"
    first = Model(errors={"q5": [None]})
    with pytest.raises(NoReplyError):
        go(path, output, first)
    second = Model(errors={"q5": [None]})
    with pytest.raises(NoReplyError):
        go(path, output, second)
    assert second.seen[-1] == "q5", "the rest comes first, and it runs alone"
    third = Model()
    progress = go(path, output, third)
    assert "q5" not in third.seen
    assert progress.failed == 1
    lines = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"id-{i}" for i in range(10)]
    assert [line["error"]["code"] for line in lines if line["error"]] == ["server_died"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal, although a shell has its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interruption_is_no_death(tmp_path: Path, error: type[BaseException]) -> None:
    path, output = written(tmp_path, [f"q{i}" for i in range(10)]), tmp_path / "out.jsonl"

    class Interrupted(Model):
        async def answer(self, endpoint: str, body: dict[str, Any]) -> Reply:
            reply = await super().answer(endpoint, body)
            await asyncio.sleep(0)
            if len(self.seen) < 5:
                return reply
            if error is OSError:
                raise OSError
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(DEADLINE_S)
            return reply

    for _ in range(3):
        with pytest.raises(error):
            go(path, output, Interrupted())
    (part,) = tmp_path.glob("*.part")
    assert b'"begun"' in part.read_bytes()
    last = PartialOutput(path, output, "m")
    assert [last.attempts(f"id-{i}") for i in range(10)] == [0] * 10
    last.close()


def test_another_input_or_model_begins_anew(tmp_path: Path) -> None:
    path, output = written(tmp_path, ["a", "b"]), tmp_path / "out.jsonl"
    go(path, output, Model(), publish=False)
    partial = PartialOutput(path, output, "other")
    assert partial.answered == frozenset()
    partial.close()
    open_now = PartialOutput(path, output, "m")
    with pytest.raises(BatchError, match="another process writes it"):
        PartialOutput(path, output, "m")
    open_now.close()
    written(tmp_path, ["a", "c"])
    partial = PartialOutput(path, output, "m")
    assert partial.answered == frozenset()
    with pytest.raises(KeyError):
        partial.publish(["id-0"])
    assert not output.exists()
    partial.append("id-0", run_batch_line("id-0", Reply(200, b"{}")))
    partial.publish(["id-0"])
    assert json.loads(output.read_bytes())["custom_id"] == "id-0"


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["batch", "run", *arguments])
    return result.exit_code, result.output


def test_bad_input_is_told_before_anything_starts(tmp_path: Path) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(jsonl([b"bad", chat_line("a", "x"), chat_line("b", "x", method="GET")]))
    code, text = command(str(path), str(output), "--model", "m")
    assert code == 1
    flat = text.replace("\n", "")
    assert f"{path}:1: This line is not JSON" in flat
    assert f"{path}:3: 'method' must be 'POST'." in flat
    path.write_bytes(b"")
    assert command(str(path), str(output), "--model", "m")[0] == 1
    path.write_bytes(jsonl([chat_line("a", "x"), chat_line("a", "y")]))
    code, text = command(str(path), str(output), "--model", "m")
    assert code == 1
    assert "was used before" in text
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_output_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path, output = written(tmp_path, ["a"]), tmp_path / "out.jsonl"
    output.write_text("precious")
    code, text = command(str(path), str(output), "--model", "m")
    assert code == 1
    assert "exists; remove it" in text
    assert output.read_text() == "precious"


def test_the_command_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that are not ours reach vLLM; what is left is told as JSON."""
    path, output = written(tmp_path, ["a", "b"]), tmp_path / "out.jsonl"
    seen: list[Any] = []

    async def run_file(*arguments: Any) -> Progress:  # noqa: ANN401
        *others, tell = arguments
        seen.extend(others)
        progress = Progress(2, done=2, failed=1, expected_share=0.5)
        tell(progress)
        return progress

    monkeypatch.setattr(offline, "run_file", run_file)
    flags = ["--max-model-len", "99", "--enforce-eager"]
    monkeypatch.chdir(tmp_path)
    words = ["batch", "run", "in.jsonl", "./out.jsonl", "--model", "m", *flags, "--json"]
    result = CliRunner().invoke(app, words)
    assert seen == [path, output, "m", flags]
    assert json.loads(result.stdout)["failed"] == 1
    assert result.exit_code == 1, "a request failed"
    assert f"1 of them with an error, see {output}" in result.stderr


def test_a_setting_that_vllm_refuses_is_told_in_the_last_line(tmp_path: Path) -> None:
    path, output = written(tmp_path, ["a"]), tmp_path / "out.jsonl"
    words = ["batch", "run", str(path), str(output), "--model", str(MODEL)]
    result = CliRunner().invoke(app, [*words, "--max-model-len", "99999999"])
    assert result.exit_code == 1
    *before, last = result.stderr.splitlines()
    assert last.startswith("vLLM does not start: ")
    assert "User-specified max_model_len (99999999)" in last
    assert not any("Traceback" in line for line in before)
    assert not output.exists()


def test_batches_of_a_server(url: str, tmp_path: Path) -> None:
    client = openai.OpenAI(api_key=KEYS[0], base_url=f"{url}/v1", max_retries=0)
    file = client.files.create(file=written(tmp_path, ["a", "b"]), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    def ask(*arguments: str, key: str = KEYS[0]) -> tuple[int, str]:
        result = CliRunner().invoke(
            app, ["batch", *arguments, "--url", f"{url}/v1"], env={"OPENAI_API_KEY": key}
        )
        return result.exit_code, result.output

    deadline = time.monotonic() + DEADLINE_S
    while (shown := json.loads(ask("show", batch.id)[1]))["status"] != "completed":
        assert time.monotonic() < deadline, shown
    assert shown["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    code, text = ask("ls", "--json")
    assert (code, [one["id"] for one in json.loads(text)]) == (0, [batch.id])
    code, text = ask("ls")
    assert code == 0
    assert "completed" in text
    code, text = ask("cancel", batch.id)
    assert code == 1
    assert "409: Cannot cancel a batch with status 'completed'." in text
    assert ask("show", "../files")[0] == 1
    assert ask("ls", key="wrong") == (1, f"{url}/v1: 401: Unauthorized\n")
    code, text = ask("ls", key=KEYS[1])
    assert code == 0
    assert text.startswith("No batches were made with this key.")
    assert "--api-key" in text
    assert ask("ls", "--json", key=KEYS[1]) == (0, "[]\n")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    for arguments in (["ls"], ["show", "x"], ["cancel", "x"]):
        for url in ("http://127.0.0.1:9/v1", "file:///etc/passwd", "nonsense"):
            result = CliRunner().invoke(app, ["batch", *arguments, "--url", url])
            assert result.exit_code == 1, url
            assert url in result.output
