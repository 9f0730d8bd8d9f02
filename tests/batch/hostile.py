"""Two keys that use the Batch API as badly as they can, and a third that just wants its answers.

What they send comes from a seed. Who watches sees how long `/health` takes and how much memory the
server holds.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MIB = 1 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TIMEOUT_S = 120.0
ENDED = ("completed", "failed", "expired", "cancelled")
REQUESTS = 12
"""Of one batch of the honest key."""


@dataclass(frozen=True)
class Api:
    """The Batch API of a server, with one key."""

    url: str
    key: str

    def call(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> tuple[int, bytes]:
        """Status and body of an answer."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": kind}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:  # noqa: ANN401 - what JSON may be
        status, body = self.call("GET", path)
        assert status == 200, body[:500]
        return json.loads(body)

    def upload(self, content: bytes) -> tuple[int, Any]:
        head = (
            b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B\r\n'
            b'Content-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
        )
        kind = "multipart/form-data; boundary=B"
        status, body = self.call("POST", "/v1/files", head + content + b"\r\n--B--\r\n", kind)
        return status, json.loads(body)

    def batch(self, file_id: str, endpoint: str = CHAT, **more: object) -> tuple[int, Any]:
        asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **more}
        status, body = self.call("POST", "/v1/batches", json.dumps(asked).encode())
        return status, json.loads(body)


def line(custom_id: str, body: bytes | dict[str, Any], endpoint: str = CHAT) -> bytes:
    """A line of the input, whose body may be anything."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    return b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}\n' % (
        custom_id.encode(),
        endpoint.encode(),
        body,
    )


def message(content: object, **more: object) -> dict[str, Any]:
    """A body with one message."""
    messages = [{"role": "user", "content": content}]
    return {"model": "tiny", "messages": messages, "max_tokens": 8, **more}


class Hostile:
    """Files that no server should have to read."""

    def __init__(self, source: random.Random, properties: dict[str, list[str]], scale: int) -> None:
        """``properties`` are names of fields by endpoint; sizes are up to ``scale`` MiB."""
        self._source = source
        self._properties = properties
        self._scale = scale
        self._kinds = [
            self._blank,
            self._garbage,
            self._many,
            self._bomb,
            self._text,
            self._echo,
            self._greedy,
            self._ids,
            self._mutated,
            self._mutated,
        ]

    def file(self) -> tuple[str, bytes, str]:
        """Its kind, content and endpoint."""
        made = self._source.choice(self._kinds)
        content, endpoint = made()
        return made.__name__, content, endpoint

    def _size(self) -> int:
        return int(self._scale * MIB * self._source.random() ** 3) + 1000

    def _blank(self) -> tuple[bytes, str]:
        blank = self._source.choice([b"\n", b"\r\n", b" ", b"\t\n", b"\0\n"])
        return blank * (2 * self._size() // len(blank)), CHAT

    def _garbage(self) -> tuple[bytes, str]:
        some = self._source.choice([b"x\n", b"[]\n", b"{}\n", b'"\\', b"[" * 99, b'{"a":', b"1,"])
        return some * (self._size() // len(some)), CHAT

    def _many(self) -> tuple[bytes, str]:
        """As many short requests as a file may have, none of which can be served."""
        count = self._source.choice([50, 5000, 50_000])
        body = self._source.choice([b"{}", b'{"model":"other","messages":[]}', b'{"messages":7}'])
        return b"".join(line(f"{i}", body) for i in range(count)), CHAT

    def _bomb(self) -> tuple[bytes, str]:
        items = [b"{}", b"[]", b"1", b'""', b"null", b'{"a":1}', b"[[]]", b'{"role":"user"}']
        items += [b'{"role":"user","content":"x"}', b'{"type":"text","text":"x"}', b"1e9", b'"x"']
        item = self._source.choice(items)
        count = self._source.choice([1000, 100_000, self._size() // len(item)])
        values = b"[" + b",".join([item] * min(count, 15 * MIB // (len(item) + 1))) + b"]"
        places = [
            (b'{"model":"tiny","messages":%b}', CHAT),
            (b'{"model":"tiny","messages":[{"role":"user","content":%b}]}', CHAT),
            (b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"tools":%b}', CHAT),
            (b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"stop":%b}', CHAT),
            (b'{"model":"tiny","prompt":%b}', COMPLETIONS),
            (b'{"model":"tiny","prompt":"x","logit_bias":%b}', COMPLETIONS),
            (b'{"model":%b,"prompt":"x"}', COMPLETIONS),
        ]
        place, endpoint = self._source.choice(places)
        return line("bomb", place % values, endpoint) * self._source.choice([1, 1, 3]), endpoint

    def _text(self) -> tuple[bytes, str]:
        """A prompt that is too long, in one way or another."""
        text = self._source.choice(["x", "x y ", "é", "\U0001f600", "\\n", "/a", " ", "日"])
        count = min(self._size(), 15 * MIB) // len(text.encode())
        content = b'"' + text.encode() * count + b'"'
        more = self._source.choice([b"", b',"truncate_prompt_tokens":9', b',"echo":true'])
        if self._source.random() < 0.5:
            body = b'{"model":"tiny","prompt":%b%b}' % (content, more)
            return line("text", body, COMPLETIONS), COMPLETIONS
        body = b'{"model":"tiny","messages":[{"role":"user","content":%b}]%b}' % (content, more)
        return line("text", body), CHAT

    def _echo(self) -> tuple[bytes, str]:
        """Text that an error may repeat, and search for paths in."""
        text = self._source.choice(["/a", "/a-", "/usr/a", ' File "a", line 1, in x\n', "é"])
        text *= self._source.choice([100, 4000, 100_000])
        content = [{"type": text, "text": "x"}]
        bodies: list[dict[str, Any]] = [
            message("x", model=text),
            {"model": "tiny", "messages": [{"role": text, "content": "x"}]},
            message(content),
            message([{"type": "image_url", "image_url": {"url": text}}]),
            message("x", tool_choice=text),
            message("x", response_format={"type": text}),
            message("x", chat_template=text),
            message("x", cache_salt=text),
            message("x", request_id=text),
            message("x", structured_outputs={"regex": text}),
            message("x", kv_transfer_params={"ssdkv": {"selector": text}}),
            message("x", bad_words=[text]),
            message("x", **{text: text}),
        ]
        chosen = self._source.sample(bodies, 6)
        return b"".join(line(f"{i}", body) for i, body in enumerate(chosen)), CHAT

    def _greedy(self) -> tuple[bytes, str]:
        """As many tokens and as much about each as there may be."""
        more = {"max_tokens": 400, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
        if self._source.random() < 0.5:
            more["prompt_logprobs"] = 20
        if self._source.random() < 0.5:
            more["n"] = self._source.choice([2, 3, 4, 8, 64, 10_000])
        body = message("hello " * self._source.choice([1, 300]), **more)
        count = self._source.choice([1, 4, 30])
        return b"".join(line(f"{i}", body) for i in range(count)), CHAT

    def _ids(self) -> tuple[bytes, str]:
        count = self._source.choice([1, 1000, 900_000])
        number = self._source.choice([0, 5, 100, -1, 10**6, 2**63])
        prompt = [number] * count
        nested = self._source.choice(
            [prompt, [prompt], [[number]] * min(count, 2000), [*prompt, "x"]]
        )
        body = {"model": "tiny", "prompt": nested, "max_tokens": 4}
        return line("ids", body, COMPLETIONS), COMPLETIONS

    def _mutated(self) -> tuple[bytes, str]:
        """Requests that are right but for some fields."""
        endpoint = self._source.choice([CHAT, COMPLETIONS])
        lines = []
        for i in range(self._source.choice([1, 20, 200])):
            body = message("hello") if endpoint == CHAT else {"model": "tiny", "prompt": "hello"}
            body["max_tokens"] = 4
            for name in self._source.sample(self._properties[endpoint], 2):
                body[name] = self._value(3)
            lines.append(line(f"{i}", body, endpoint))
        return b"".join(lines), endpoint

    def _value(self, depth: int) -> object:
        simple: list[object] = [None, True, False, 0, 1, -1, 7, 2**31, 2**63, 0.5, -1e308, "", "x"]
        simple += ["\0", "é" * 300, "\U0001f600" * 300, "/a" * 500, "x" * 20_000, "auto", "none"]
        kind = self._source.randrange(6)
        if kind < 4 or not depth:
            return self._source.choice(simple)
        count = self._source.choice([0, 1, 3, 30])
        if kind == 4:
            return [self._value(depth - 1) for _ in range(count)]
        return {str(self._source.choice(simple))[:99]: self._value(depth - 1) for _ in range(count)}


@dataclass
class Watched:
    """Observations of a server.

    Attributes:
        latency: Seconds that each `/health` took.
        own: Of these, those in which the server computed: no other load of the machine is in them.
        memory: Bytes that belong to no file, of the server and the children that it had at first,
            from first to last. Those that read files have a bound of their own.
        honest: Seconds that each batch of the honest key took.
        done: How often hostile keys did what, and how it was answered.
    """

    latency: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    honest: list[float] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)


class Siege:
    """Everything at once, for a time."""

    def __init__(
        self,
        url: str,
        keys: tuple[str, ...],
        session: int,
        seed: int,
        scale: int,
    ) -> None:
        """The third key is the honest one; ``session`` is that of the server's processes, and the
        number of the one that serves HTTP."""
        self._url = url
        self._hostile = [Api(url, key) for key in keys[:2]]
        self._honest = Api(url, keys[2])
        self._session = session
        self._seed = seed
        self._scale = scale
        self._programs: set[int] = set()
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self.seen = Watched()

    def run(self, seconds: float) -> Watched:
        """Besiege it, and return what was seen."""
        schemas = self._honest.get("/openapi.json")["components"]["schemas"]
        properties = {
            CHAT: sorted(schemas["ChatCompletionRequest"]["properties"]),
            COMPLETIONS: sorted(schemas["CompletionRequest"]["properties"]),
        }
        for names in properties.values():
            names.remove("stream")
        self._programs = programs_of(self._session)
        self.seen.memory.append(memory_of(self._programs))
        works: list[Callable[[], None]] = [self._watch_health, self._watch_memory, self._ask]
        for number, api in enumerate(self._hostile):
            source = random.Random(self._seed + number)
            hostile = Hostile(source, properties, self._scale)
            works += [self._attack(api, source, hostile), self._pester(api, random.Random(number))]
        threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        self._over.wait(seconds)
        self._over.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        if self._errors:
            raise self._errors[0]
        for api in self._hostile:
            self._empty(api)
        return self.seen

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where it is seen
            self._errors.append(error)
            self._over.set()

    # ---- who watches ----

    def _watch_health(self) -> None:
        with watched(self._url, self._session) as found:
            self._over.wait()
        self.seen.latency = [seconds for seconds, _ in found]
        self.seen.own = [own for _, own in found]

    def _watch_memory(self) -> None:
        while not self._over.wait(0.1):
            self.seen.memory.append(memory_of(self._programs))

    # ---- who is honest ----

    def _ask(self) -> None:
        rounds = 0
        while not self._over.is_set() or not self.seen.honest:
            rounds += 1
            begun = time.monotonic()
            content = b"".join(line(f"{i}", message(f"{rounds} {i}")) for i in range(REQUESTS))
            status, file = self._honest.upload(content)
            assert status == 200, file
            status, batch = self._honest.batch(file["id"])
            assert status == 200, batch
            while batch["status"] not in ENDED:
                time.sleep(0.1)
                batch = self._honest.get(f"/v1/batches/{batch['id']}")
            assert batch["status"] == "completed", batch
            assert batch["request_counts"]["completed"] == REQUESTS, batch
            self.seen.honest.append(time.monotonic() - begun)
            for name in (file["id"], batch["output_file_id"]):
                assert self._honest.call("DELETE", f"/v1/files/{name}")[0] == 200

    # ---- who is not ----

    def _attack(self, api: Api, source: random.Random, hostile: Hostile) -> Callable[[], None]:
        def work() -> None:
            while not self._over.is_set():
                kind, content, endpoint = hostile.file()
                status, file = api.upload(content)
                self.seen.done[f"{kind} file {status}"] += 1
                if status == 413:
                    self._empty(api)
                if status != 200:
                    continue
                for _ in range(source.choice([1, 1, 1, 5])):
                    status, batch = api.batch(file["id"], endpoint, metadata={"k" * 64: "é" * 512})
                    self.seen.done[f"{kind} batch {status}"] += 1
                    if status == 200 and source.random() < 0.2:
                        api.call("POST", f"/v1/batches/{batch['id']}/cancel")
                self._over.wait(source.random())

        return work

    @staticmethod
    def _empty(api: Api) -> None:
        """Make room: with its own files nobody is kept out but itself."""
        unended = True
        while unended:
            listed = api.get("/v1/batches?limit=100")["data"]
            unended = [batch["id"] for batch in listed if batch["status"] not in ENDED]
            for identifier in unended:
                api.call("POST", f"/v1/batches/{identifier}/cancel")
            time.sleep(0.1)
        for file in api.get("/v1/files?limit=1000")["data"]:
            api.call("DELETE", f"/v1/files/{file['id']}")

    def _pester(self, api: Api, source: random.Random) -> Callable[[], None]:
        """Lists, and connections that do not end."""

        def work() -> None:
            with contextlib.ExitStack() as slow:
                while not self._over.wait(0.5):
                    status, body = api.call("GET", f"/v1/batches?limit={source.randint(1, 100)}")
                    assert status == 200
                    assert len(body) < 2 * MIB
                    status, body = api.call("GET", "/v1/files")
                    assert status == 200
                    assert len(body) < 2 * MIB
                    if source.random() < 0.05:
                        slow.enter_context(self._slow(api, source))

        return work

    @contextlib.contextmanager
    def _slow(self, api: Api, source: random.Random) -> Iterator[None]:
        """An upload of which a little comes, or a list of batches that nobody takes."""
        address = urlsplit(self._url)
        assert address.hostname is not None
        kind = b"multipart/form-data; boundary=B"
        with socket.create_connection((address.hostname, address.port), TIMEOUT_S) as connection:
            connection.sendall(
                b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
                b"Content-Type: %b\r\nContent-Length: 100000000\r\n\r\n--B\r\n"
                b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
                % (api.key.encode(), kind)
            )
            connection.sendall(b"x" * source.choice([1, 100_000]))
            yield


def programs_of(session: int) -> set[int]:
    """Processes of a session that run a program of their own.

    One that was forked has its parent's command line, and looks as if it had its parent's memory.
    """
    found: dict[int, tuple[int, bytes]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getsid(int(process.name)) == session:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                found[int(process.name)] = (int(fields[1]), (process / "cmdline").read_bytes())
    return {
        number
        for number, (parent, command) in found.items()
        if command and (parent not in found or found[parent][1] != command)
    }


def memory_of(processes: set[int]) -> int:
    """Bytes that belong to no file, of those of these processes that have not ended."""
    held = 0
    for process in processes:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines)
            held += int(status.get("RssAnon", "0 kB").split()[0]) * 1024
    return held


@contextlib.contextmanager
def watched(url: str, process: int) -> Iterator[list[tuple[float, float]]]:
    """Seconds that each `/health` takes while the block lasts, and those of them in which the
    process computed; complete behind it.

    Who asks is a process of its own, which does not wait for what else is done here.
    """
    found: list[tuple[float, float]] = []
    command = [sys.executable, __file__, url, str(process)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as watcher:
        yield found
        told, _ = watcher.communicate(timeout=TIMEOUT_S)
    assert watcher.returncode == 0
    numbers = [float(number) for number in told.split()]
    found += zip(numbers[::2], numbers[1::2], strict=True)


def computed_s(process: int) -> float:
    """Seconds that a process has computed so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(url: str, process: int) -> None:
    """Print how long each `/health` takes, and how long the process computed meanwhile, until the
    standard input ends."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.wait(0.1):
        begun, computed = time.monotonic(), computed_s(process)
        status, _ = Api(url, "").call("GET", "/health")
        assert status == 200
        took = time.monotonic() - begun
        print(f"{took:.4f} {min(took, computed_s(process) - computed):.4f}", flush=True)


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]))
