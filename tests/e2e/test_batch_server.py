"""The Batch API on a real `vllm serve`, with the official client: answers, cancelling, kill -9,
users beside it, and keys that mean no good.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.batch.hostile import MIB, Siege
from tests.kit.forks import Program
from tests.kit.server import free_port
from vllm_ssdkv.batch.lines import MAX_LINE
from vllm_ssdkv.batch.plugin import LEAST_TEXT

START_S = 420.0
DEADLINE_S = 600.0
KEYS = ("key-a", "key-b", "key-c")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SEATS = 8
NOTHING: Mapping[str, object] = {}
UNDER_SIEGE = 10 * MAX_LINE + 512 * LEAST_TEXT + 128 * MIB
"""Bytes that a server may take for requests of batches, however fast they come: objects are ten
times as large as the lines under way, of which there are 16 MiB; one prompt at a time is tokenized,
with up to 512 bytes for a token of one byte; and the engine's heaps grow once, by what its longest
steps take."""

pytestmark = pytest.mark.timeout(1800)


class Server:
    """A `vllm serve` that can be killed and started again on the same directories."""

    def __init__(self, model: Path, device: dict[str, Any], root: Path) -> None:
        self.root = root
        self._process: Program | None = None
        self._options: object = None
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._model = model
        self._ssdkv = {"devices": [device], "dram_gib": 0.1}

    def _command(self, batch: Mapping[str, object], more: Mapping[str, object]) -> list[str]:
        transfer = {
            "kv_connector": "SSDKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                **self._ssdkv,
                "batch": {"directory": str(self.root / "jobs"), **batch},
            },
        }
        options = {
            "host": "127.0.0.1",
            "port": self._port,
            "served-model-name": "tiny",
            "dtype": "float32",
            "max-model-len": 4096,
            "max-num-seqs": SEATS,
            "block-size": 32,
            "shutdown-timeout": 300,
            "kv-cache-memory-bytes": 64 << 20,
            "chat-template": TEMPLATE,
            "kv-transfer-config": json.dumps(transfer),
            **more,
        }
        command = [str(Path(sys.executable).parent / "vllm"), "serve", str(self._model)]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        return [*command, "--enforce-eager", "--api-key", *KEYS]

    def start(self, batch: Mapping[str, object] = NOTHING, **more: object) -> None:
        """Returns when it serves. ``batch`` are more of our options, ``more`` of vLLM's."""
        log = self.root / "serve.log"
        self._options = (dict(batch), more)
        variables = {
            **os.environ,
            "VLLM_PLUGINS": "ssdkv,ssdkv_batch",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        command = self._command(batch, {name.replace("_", "-"): more[name] for name in more})
        self._process = Program(command, variables, self.root, log)
        deadline = time.monotonic() + START_S
        while not self._is_healthy():
            assert self._process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def restart(self, batch: Mapping[str, object] = NOTHING, **more: object) -> None:
        """Kill -9, and start with these options, unless it has them."""
        if self._options != (dict(batch), more):
            self.kill()
            self.start(batch, **more)

    @property
    def session(self) -> int:
        """The session of its processes."""
        assert self._process is not None
        return self._process.pid

    def kill_engine(self) -> None:
        """Kill -9 of what computes; the server ends by itself."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                name = (process / "comm").read_text()
                if os.getsid(int(process.name)) == self.session and name.startswith("VLLM::Engine"):
                    os.kill(int(process.name), signal.SIGKILL)
        assert self._process is not None
        self._process.wait(DEADLINE_S)
        self.kill()

    def kill(self) -> None:
        """Kill -9, engine and all."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(DEADLINE_S)

    def client(self, key: str = KEYS[0]) -> openai.OpenAI:
        return openai.OpenAI(
            api_key=key, base_url=f"{self.url}/v1", max_retries=0, timeout=DEADLINE_S
        )

    def metrics(self) -> list[str]:
        """Lines of the page of metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            page: bytes = answer.read()
        return page.decode().splitlines()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric now; see :func:`total`."""
        return total(self.metrics(), name, **labels)


def total(metrics: list[str], name: str, **labels: str) -> float:
    """Sum of a metric on a page, over the labels that are not given."""
    found = [
        float(line.rpartition(" ")[2])
        for line in metrics
        if line.partition("{")[0].partition(" ")[0] == f"vllm:{name}"
        and all(f'{label}="{value}"' in line for label, value in labels.items())
    ]
    assert found, name
    return sum(found)


@pytest.fixture(scope="module")
def server(
    models: dict[str, Path],
    devices: Callable[..., list[dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    (device,) = devices(1)
    made = Server(models["llama"], device, tmp_path_factory.mktemp("server"))
    made.start()
    yield made
    made.kill()


def words(source: random.Random, count: int) -> str:
    return " ".join(
        source.choice(("cache", "model", "small", "seen", "keep")) for _ in range(count)
    )


def bodies(prefixes: int, questions: int, max_tokens: int, seed: int) -> dict[str, dict[str, Any]]:
    """Requests by custom_id; `questions` for each of `prefixes` contexts, shuffled."""
    source = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    for prefix in range(prefixes):
        context = f"{prefix} {words(source, 100)}"
        for question in range(questions):
            found[f"p{prefix}-q{question}"] = {
                "model": "tiny",
                "temperature": 0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "messages": [
                    {"role": "system", "content": context},
                    {"role": "user", "content": f"{question} {words(source, 5)}"},
                ],
            }
    names = list(found)
    source.shuffle(names)
    return {name: found[name] for name in names}


def submit(client: openai.OpenAI, requests: dict[str, dict[str, Any]]) -> Batch:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name, body in requests.items()
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = client.files.create(file=("batch.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


def wait(client: openai.OpenAI, batch: Batch, until: Callable[[Batch], bool]) -> Batch:
    deadline = time.monotonic() + DEADLINE_S
    while not until(batch):
        assert time.monotonic() < deadline, batch
        assert batch.status not in ("failed", "expired"), batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def completed(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


def ended(batch: Batch) -> bool:
    return batch.status == "completed"


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def check_answers(
    client: openai.OpenAI, batch: Batch, requests: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Every request has one answer, the one that a direct call gets."""
    lines = lines_of(client, batch.output_file_id)
    assert sorted(line["custom_id"] for line in lines) == sorted(requests)
    assert (batch.error_file_id is None) == (batch.status == "completed"), batch
    for line in lines:
        body = dict(requests[line["custom_id"]])
        ignore_eos = body.pop("ignore_eos")
        direct = client.chat.completions.create(**body, extra_body={"ignore_eos": ignore_eos})
        (choice,) = line["response"]["body"]["choices"]
        assert choice["message"]["content"] == direct.choices[0].message.content
    return lines


def test_a_batch_gets_the_answers_of_direct_calls(server: Server) -> None:
    client = server.client()
    requests = bodies(prefixes=6, questions=10, max_tokens=6, seed=1)
    batch = wait(client, submit(client, requests), lambda b: b.status == "completed")
    lines = check_answers(client, batch, requests)
    assert all(line["response"]["body"]["object"] == "chat.completion" for line in lines)
    assert batch.usage is not None
    assert batch.usage.output_tokens == 60 * 6
    prompt = sum(line["response"]["body"]["usage"]["prompt_tokens"] for line in lines)
    assert batch.usage.input_tokens == prompt
    # At most the requests that run together compute a prefix again.
    again = SEATS // 2 * 6
    assert batch.model_extra is not None
    share = batch.model_extra["ordering"]["shared_prefix_share"]
    assert share > 0.75
    assert batch.usage.input_tokens_details.cached_tokens > 0.7 * prompt * (60 - again) / 60
    assert server.metric("ssdkv_batch_requests_total") >= 60
    assert server.metric("ssdkv_batch_saved_tokens_total") > 0
    # The connector sees the same requests.
    assert server.metric("ssdkv_slots_stored_total") > 0


def test_keys_lists_and_errors(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").files.list()
    client, other = server.client(), server.client("key-b")
    mine = [client.files.create(file=(f"{i}", b"x\n"), purpose="batch").id for i in range(5)]
    assert [file.id for file in client.files.list(limit=2)][: len(mine)] == mine[::-1]
    assert list(other.files.list()) == []
    assert client.files.content(mine[0]).content == b"x\n"
    with pytest.raises(openai.NotFoundError):
        other.files.content(mine[0])
    for file in mine:
        assert client.files.delete(file).deleted
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(
            input_file_id=mine[0], endpoint="/v1/embeddings", completion_window="24h"
        )
    assert refused.value.param == "endpoint", "this model has no embeddings"
    bad = {"model": "tiny", "messages": "none"}
    unknown = {"model": "other", "messages": [{"role": "user", "content": "x"}]}
    long = {"model": "tiny", "messages": [{"role": "user", "content": "x " * 5000}]}
    requests = {"bad": bad, "unknown": unknown, "long": long}
    batch = wait(client, submit(client, requests), lambda b: b.status == "completed")
    errors = {line["custom_id"]: line["response"] for line in lines_of(client, batch.error_file_id)}
    assert {name: response["status_code"] for name, response in errors.items()} == {
        "bad": 400,
        "unknown": 404,
        "long": 400,
    }
    for response in errors.values():
        assert response["body"]["error"]["message"]


def test_completions_are_batched_too(server: Server) -> None:
    client = server.client()
    prompt = list(range(100, 164))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = client.files.create(file=("f", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    batch = wait(client, batch, lambda b: b.status == "completed")
    (answer,) = lines_of(client, batch.output_file_id)
    direct = client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0)
    assert answer["response"]["body"]["choices"][0]["text"] == direct.choices[0].text


def test_a_batch_is_cancelled_in_the_middle_and_others_are_served_meanwhile(server: Server) -> None:
    client = server.client()
    # Minutes of work, so that it cannot end before it is cancelled.
    requests = bodies(prefixes=20, questions=100, max_tokens=64, seed=2)
    batch = wait(client, submit(client, requests), lambda b: completed(b) >= 4)
    online = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=4
    )
    assert online.usage is not None
    assert online.usage.completion_tokens >= 1
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = wait(client, batch, lambda b: b.status == "cancelled")
    good = lines_of(client, batch.output_file_id)
    rest = lines_of(client, batch.error_file_id)
    assert len(good) == completed(batch) >= 4
    assert len(rest) > len(good)
    assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
    assert sorted(line["custom_id"] for line in good + rest) == sorted(requests)
    # What was under way was aborted in the engine, too.
    deadline = time.monotonic() + DEADLINE_S
    while server.metric("num_requests_running") > 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.rounds
@pytest.mark.timeout(7200)
def test_kills_of_a_server(server: Server, soak_rounds: int) -> None:
    """After one kill a batch goes on; two, with nothing but its requests under way, end it.

    Requests that were under way at a death wait for minutes, so only `make soak` waits for the end
    of the first batch. tests/batch/test_kill.py kills the same runner more often.
    """
    client = server.client()
    if soak_rounds >= 10:
        requests = bodies(prefixes=20, questions=3, max_tokens=16, seed=4)
        batch = wait(client, submit(client, requests), lambda b: completed(b) >= len(requests) // 2)
        server.kill()
        server.start()
        batch = wait(client, batch, ended)
        assert completed(batch) == len(requests)
        check_answers(client, batch, requests)
    # The batch has more tokens than any machine makes until the second kill, and its long answers
    # do not end together: some are under way whenever a process dies. Long prompts come first.
    source = random.Random(4)
    short = [(words(source, 20), 4 + i) for i in range(2 * SEATS)]
    long = [("go", 2000 + 50 * (i % 40)) for i in range(400)]
    requests = {
        str(i): {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        for i, (prompt, tokens) in enumerate(short + long)
    }
    sent = [{**body, "ignore_eos": True} for body in requests.values()]
    batch = begin(client, completions(sent))
    batch = wait(client, batch, lambda b: completed(b) >= len(short))
    for kill in (server.kill, server.kill_engine):
        deadline = time.monotonic() + DEADLINE_S
        while not server.metric("ssdkv_batch_requests_running"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        before = completed(client.batches.retrieve(batch.id))
        kill()
        server.start()
        batch = client.batches.retrieve(batch.id)
        assert completed(batch) >= before, "no finished answer is lost"
    batch = wait(client, batch, lambda b: b.status == "failed")
    answers = lines_of(client, batch.output_file_id)
    rest = lines_of(client, batch.error_file_id)
    assert sorted(line["custom_id"] for line in answers + rest) == sorted(requests)
    assert {line["error"]["code"] for line in rest} == {"server_died"}
    assert len(answers) == completed(batch)
    found = {line["custom_id"]: line["response"]["body"]["choices"] for line in answers}
    for name in map(str, range(len(short))):
        body = requests[name]
        direct = client.completions.create(**body, extra_body={"ignore_eos": True})
        assert found[name][0]["text"] == direct.choices[0].text


def test_a_server_that_drains_calls_no_request_failed(server: Server) -> None:
    client = server.client()
    requests = bodies(prefixes=4, questions=10, max_tokens=64, seed=5)
    body = {"model": "tiny", "prompt": "a long answer", "max_tokens": 2500}
    with ThreadPoolExecutor(1) as pool:
        # What the engine has to end takes longer than a request is tried with errors.
        long = pool.submit(client.completions.create, **body, extra_body={"ignore_eos": True})
        batch = wait(client, submit(client, requests), lambda b: completed(b) >= 4)
        server.stop()
        long.exception(DEADLINE_S)
    assert "is about to; the next start" in (server.root / "serve.log").read_text()
    server.start()
    batch = client.batches.retrieve(batch.id)
    assert 4 <= completed(batch) < len(requests)
    batch = wait(client, batch, lambda b: b.status == "completed")
    assert completed(batch) == len(requests)


def completions(requests: list[dict[str, Any]]) -> list[bytes]:
    """Lines of a file."""
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(requests)
    ]
    return [json.dumps(line).encode() + b"\n" for line in lines]


def begin(client: openai.OpenAI, lines: list[bytes]) -> Batch:
    file = client.files.create(file=("f", b"".join(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def test_users_find_kv_beside_batches(server: Server) -> None:
    """Four seats of contexts of 3,500 tokens would be all of it: 64 MiB are 16,384 tokens."""
    client = server.client()
    source = random.Random(8)

    def body(max_tokens: int) -> dict[str, Any]:
        prompt = [source.randrange(100, 500) for _ in range(3400)]
        return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}

    # Many more than run while the user's two requests do, on any machine.
    batch = begin(client, completions([{**body(100), "ignore_eos": True} for _ in range(40)]))
    batch = wait(client, batch, lambda b: completed(b) >= 1)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            steps: list[float] = []
            """Numbers of steps after which the engine said that a request waits."""
            asked = pool.submit(client.completions.create, **body(4))
            while not asked.done():
                page = server.metrics()
                if total(page, "num_requests_waiting_by_reason", reason="capacity"):
                    steps.append(total(page, "iteration_tokens_total_count"))
                assert server.metric("ssdkv_batch_requests_running") <= 2
                time.sleep(0.05)
            assert asked.result().usage is not None
            # It may wait while the prompts of the batch's two are computed, of two steps each, but
            # for no answer of theirs, of 100 steps.
            assert not steps or steps[-1] - steps[0] <= 8
    assert completed(client.batches.retrieve(batch.id)) < 40, "batches ran beside them"
    client.batches.cancel(batch.id)
    batch = wait(client, batch, lambda b: b.status == "cancelled")
    errors = {line["error"]["code"] for line in lines_of(client, batch.error_file_id)}
    assert errors == {"batch_cancelled"}


@pytest.mark.rounds
@pytest.mark.timeout(7200)
def test_keys_that_mean_no_good_cost_others_nothing(server: Server, batch_seconds: float) -> None:
    """With the longest files there may be in `make soak`, for ten minutes."""
    client = server.client(KEYS[2])
    wait(client, begin(client, completions([{"model": "tiny", "prompt": "hello"}])), ended)
    scale = 16 if batch_seconds >= 60 else 2
    siege = Siege(server.url, KEYS, server.session, 1, scale)
    seen = siege.run(batch_seconds)
    first, most, last = (held / MIB for held in (seen.memory[0], max(seen.memory), seen.memory[-1]))
    told = (
        f"/health {len(seen.latency)} times: {median(seen.latency):.3f} s, {max(seen.latency):.2f} "
        f"s at most; MiB at first, at most, at last: {first:.0f}, {most:.0f}, {last:.0f}; "
        f"{len(seen.honest)} honest batches, {max(seen.honest):.1f} s at most; {dict(seen.done)}"
    )
    print(told)
    # Ten minutes reached 1.55 s: docs/performance.md has the aim, and why not.
    is_long = batch_seconds >= 60
    assert max(seen.latency if is_long else seen.own) < (2.0 if is_long else 1.0), told
    assert most < first + UNDER_SIEGE / MIB, told
    assert len(seen.honest) >= 1
    assert sum(seen.done.values()) > batch_seconds / 3


# On a fast machine 223 requests of a batch ended before the request of the user. Why is open:
# docs/not-there.md.
@pytest.mark.soak
def test_users_go_first_where_batches_take_all_seats(server: Server) -> None:
    """Batches have the lowest priority: with more of their requests in vLLM's queue than there are
    seats, one of a user gets the next seat."""
    server.restart({"concurrency": 8 * SEATS}, scheduling_policy="priority")
    client = server.client()

    def ask() -> None:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=4
        )

    ask()  # the first one waits for what the server has to load for it, not for a seat
    # Long answers: seats become free at times that are far apart, compared with calls over HTTP.
    requests = bodies(prefixes=16, questions=SEATS, max_tokens=128, seed=6)
    for _ in range(2):  # what is computed, and then what is stored
        batch = wait(client, submit(client, requests), lambda b: completed(b) >= 1)
        assert server.metric("num_requests_waiting") > 4 * SEATS
        before = server.metric("request_success_total")
        ask()
        others = server.metric("request_success_total") - before - 1
        assert others < 4 * SEATS, "it waited for all that were there before it"
        client.batches.cancel(batch.id)
        wait(client, batch, lambda b: b.status == "cancelled")


def test_embeddings_are_batched_too(server: Server) -> None:
    server.restart(runner="pooling", convert="embed")
    client = server.client()
    texts = {f"t{i}": f"{i} {words(random.Random(i), 20)}" for i in range(12)}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "tiny", "input": text},
        }
        for name, text in texts.items()
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("f", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    batch = wait(client, batch, lambda b: b.status == "completed")
    answers = lines_of(client, batch.output_file_id)
    assert sorted(answer["custom_id"] for answer in answers) == sorted(texts)
    for answer in answers:
        direct = client.embeddings.create(model="tiny", input=texts[answer["custom_id"]])
        (found,) = answer["response"]["body"]["data"]
        assert found["embedding"] == pytest.approx(direct.data[0].embedding, abs=1e-5)
