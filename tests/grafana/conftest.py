"""Prometheus, and a server for it to scrape."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.conftest import disk_directory
from tests.faults import set_faults
from tests.kit.forks import Program
from tests.kit.server import Running, free_port, server
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.grafana.board import Panel
from vllm_ssdkv.grafana.prometheus import Prometheus, PrometheusError
from vllm_ssdkv.grafana.render import Period, ask
from vllm_ssdkv.profiling.recall import recall

GRAFANA = Path(__file__).parents[2] / "grafana"
PATIENCE_S = 300.0
SCRAPE_S = 1.0
MAX_LEN = 4096
LENGTH = 1536
"""Tokens of a prompt."""
CROWD = 12
"""More requests of ``MAX_LEN`` than the store has slots for."""
BATCH_CAPACITY = 4 * MIB
LOOKS_BACK = {"5m": "15s", "10m": "15s", "30m": "1m", "1h": "15s"}
"""What the rules look back at here, instead of what is committed. The day of the hit rate stays:
:func:`history`."""


def wait_for(what: str, holds: Callable[[], bool], between: Callable[[], object] = object) -> None:
    """Until it holds; ``between`` is called before each further look."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited for: {what}"
        between()
        time.sleep(0.2)


def program(name: str) -> str:
    """A program of Prometheus, or skip."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: install the Debian package prometheus, or run scripts/setup.sh")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    """Path of promtool."""
    return program("promtool")


@dataclass(frozen=True)
class Server:
    """A `vllm serve` with sparse attention and the Batch API, on two directories.

    Its faults can be switched.

    Attributes:
        jobs: Directory of the batches.
    """

    running: Running
    devices: list[Path]
    control: Path
    jobs: Path

    @property
    def url(self) -> str:
        return self.running.url

    def faults(self, *rules: dict[str, Any]) -> None:
        """Have exactly these faults from now on."""
        set_faults(self.control, *rules)

    def ask(self, seed: int) -> str:
        """The answer to a prompt that ``seed`` chooses."""
        answer = self.client().completions.create(**_completion(seed))
        return str(answer.choices[0].text)

    def crowd(self, seeds: Iterable[int]) -> None:
        """Prompts almost as long as the model allows, all at once; returns when all are answered.

        Each wants the slots of a whole context.
        """
        bodies = [
            {**_completion(seed, MAX_LEN - 128), "max_tokens": 64, "extra_body": {"min_tokens": 64}}
            for seed in seeds
        ]
        with ThreadPoolExecutor(len(bodies)) as pool:
            for _ in pool.map(lambda body: self.client().completions.create(**body), bodies):
                pass

    def choosing(self, seed: int, own: object) -> dict[str, Any]:
        """The answer to the same prompt with options ``own`` of the request, as JSON."""
        body = {**_completion(seed), "extra_body": _own(own)}
        return self.client().completions.create(**body).model_dump()

    def batch_choosing(self, seed: int, own: Iterable[object]) -> list[dict[str, Any]]:
        """The same as a batch: the answer to each of ``own``."""
        return self.batch_of([{**_completion(seed), **_own(one)} for one in own])[1]

    def batch_of(self, bodies: Sequence[dict[str, Any]]) -> tuple[Batch, list[dict[str, Any]]]:
        """A batch of these requests that has ended, its files deleted, and the answers."""
        batch = self.ended(self.start(self._upload(bodies)))
        assert batch.output_file_id is not None, batch
        text = self.client().files.content(batch.output_file_id).text
        lines = {line["custom_id"]: line for line in map(json.loads, text.splitlines())}
        self.forget(batch)
        return batch, [lines[str(i)]["response"]["body"] for i in range(len(bodies))]

    def answer_to(self, body: dict[str, Any]) -> str:
        """The answer to one request, asked by itself."""
        return str(self.client().completions.create(**body).choices[0].text)

    def batch(self, seeds: Iterable[int]) -> Batch:
        """The same prompts as a batch, and a request that must fail; returns when it has ended."""
        return self.ended(self.start(self.upload(seeds)))

    def upload(self, seeds: Iterable[int]) -> str:
        """A file of prompts and a request that must fail: its id."""
        return self._upload([*map(_completion, seeds), {**_completion(0), "model": "another"}])

    def _upload(self, bodies: Iterable[dict[str, Any]]) -> str:
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
            for i, body in enumerate(bodies)
        ]
        text = "\n".join(map(json.dumps, lines))
        file = self.client().files.create(file=("batch.jsonl", text.encode()), purpose="batch")
        return file.id

    def start(self, file: str) -> Batch:
        """A batch of these requests."""
        return self.client().batches.create(
            input_file_id=file, endpoint="/v1/completions", completion_window="24h"
        )

    def ended(self, batch: Batch) -> Batch:
        """The batch when it has ended."""
        client = self.client()
        wait_for(
            "the batch to end",
            lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "expired"),
        )
        return client.batches.retrieve(batch.id)

    def forget(self, batch: Batch) -> None:
        """Delete the files of a batch that has ended."""
        for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            if file is not None:
                self.client().files.delete(file)

    def reader(self) -> int:
        """The process that has the input of batches read."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                command = (process / "cmdline").read_bytes()
                ours = os.getsid(int(process.name)) == self.running.session
                if ours and b"vllm_ssdkv.batch.validator" in command:
                    return int(process.name)
        raise AssertionError("nobody reads the input of batches")

    def client(self) -> openai.OpenAI:
        """OpenAI's own client of this server."""
        return openai.OpenAI(
            api_key="none", base_url=f"{self.url}/v1", max_retries=0, timeout=PATIENCE_S
        )


def _completion(seed: int, length: int = LENGTH) -> dict[str, Any]:
    """Body of a request whose answer is far back in its prompt."""
    question = recall.ask("single", length, seed)
    return {
        "model": str(recall.MODEL_DIR),
        "prompt": list(question.prompt),
        "max_tokens": len(question.answer),
        "temperature": 0,
    }


def _own(options: object) -> dict[str, Any]:
    """What a request's body has beside OpenAI's fields."""
    return {"kv_transfer_params": {"ssdkv": options}, "return_token_ids": True}


def with_shared_prefixes(prefixes: int, each: int) -> list[dict[str, Any]]:
    """Bodies of requests, shuffled: ``each`` with the same context, all but the word before the
    question."""
    bodies = []
    for seed in range(prefixes):
        body = _completion(100 + seed)
        prompt = body["prompt"]
        last = len(prompt) - 1 - prompt[::-1].index(recall.SYMBOLS["?"])
        for word in recall.FILLER[:each]:
            bodies.append({**body, "prompt": [*prompt[: last - 1], word, *prompt[last:]]})
    random.Random(prefixes).shuffle(bodies)
    return bodies


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A directory on a disk."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-test-", dir=disk_directory()) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def serving(scratch: Path) -> Iterator[Server]:
    """See :class:`Server`."""
    program("prometheus")  # before anything slow
    control = scratch / "faults.json"
    control.write_text("[]")
    devices = [scratch / "ssd0", scratch / "ssd1"]
    # Endurance for what the panels need, but not for a crowd.
    limits = {"capacity": "32MiB", "tbw": "32MiB", "daily_write_budget": "1TiB", "weight": 1}
    options = {
        "mode": "page",
        "devices": [{"path": str(path), **limits} for path in devices],
        "dram_gib": "8MiB",
        "hbm_window_tokens": 128,
        "selector": "bounds",
        # DRAM holds less than one prompt, so that SSDs are read in every round, and the page cache
        # less than one query chooses in all layers, so that the next layer's must be read ahead.
        "sparse": {"budget": 0.5, "exact_below": 0, "page_cache": "1MiB", "summaries": "1MiB"},
        "io": {"staging": "4MiB", "fault_file": str(control), "deadline": 30.0},
        "batch": {"directory": str(scratch / "jobs"), "capacity": BATCH_CAPACITY},
    }
    transfer = {
        "kv_connector": "SSDKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(recall.MODEL_DIR)]
    command += ["--enforce-eager", "--max-model-len", str(MAX_LEN), "--block-size", "32"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    variables = {
        **os.environ,
        "XDG_CACHE_HOME": str(scratch),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_PLUGINS": "ssdkv,ssdkv_batch",
    }
    with server(command, variables, scratch, scratch / "serve.log", Program) as running:
        yield Server(running, devices, control, scratch / "jobs")


def history(instance: str) -> str:
    """A server that for a day, until 40 minutes ago, had 80 % of what it was asked for.

    As OpenMetrics text.
    """
    now = int(time.time())
    times = range(now - 24 * 3600, now - 2400, 300)
    lines = []
    shares = {
        "external_prefix_cache_hits": 0.8,
        "external_prefix_cache_queries": 1.0,
        "ssdkv_hit_tokens_computed": 0.0,
    }
    for name, share in shares.items():
        metric = f"vllm:{name}"
        labels = f'{{job="vllm",instance="{instance}",engine="0"}}'
        lines.append(f"# TYPE {metric} counter")
        lines += [f"{metric}_total{labels} {i * share * 1000} {at}" for i, at in enumerate(times)]
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def prometheus(serving: Server, scratch: Path) -> Iterator[str]:
    """URL of a Prometheus with the committed rules, which scrapes the server.

    Its rules have no ``for`` and look back at seconds: promtool tests those that are committed. It
    has the server's :func:`history`.
    """
    (scratch / "alerts.yml").write_text(quick_rules())
    instance = serving.url.removeprefix("http://")
    (scratch / "history").write_text(history(instance))
    backfill = [program("promtool"), "tsdb", "create-blocks-from", "openmetrics"]
    backfill += [str(scratch / "history"), str(scratch / "tsdb")]
    done = subprocess.run(backfill, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with scraping(scratch, {"vllm": instance}) as url:
        yield url


def quick_rules() -> str:
    """The committed rules, without ``for``, looking back at seconds."""
    rules = (GRAFANA / "alerts.yml").read_text()
    rules = re.sub(r"^ +for: .*\n", "", rules, flags=re.MULTILINE)
    for committed, here in LOOKS_BACK.items():
        assert f"[{committed}]" in rules
        rules = rules.replace(f"[{committed}]", f"[{here}]")
    return rules


@contextlib.contextmanager
def scraping(scratch: Path, jobs: Mapping[str, str]) -> Iterator[str]:
    """URL of a Prometheus that has the rules of ``scratch`` and scrapes a target for each job."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S:g}s", "evaluation_interval": f"{SCRAPE_S:g}s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]}
            for job, target in jobs.items()
        ],
    }
    (scratch / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    log = scratch / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={scratch / 'prometheus.yml'}",
                f"--storage.tsdb.path={scratch / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"

    def scrapes() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(PrometheusError):
            up = Prometheus(url).get("query", query="up")["result"]
            return [sample["value"][1] for sample in up] == ["1"] * len(jobs)
        return False

    try:
        wait_for("Prometheus to scrape", scrapes)
        yield url
    finally:
        process.kill()
        process.wait(30)


def without_data(server: Prometheus, panel: Panel, period: Period) -> bool:
    """Check whether one of its queries has none."""
    return any(
        not ask(server, dataclasses.replace(panel, queries=(query,)), period)
        for query in panel.queries
    )


class Alerts:
    """The alerts that fire."""

    def __init__(self, server: Prometheus) -> None:
        self._server = server

    def firing(self) -> dict[str, dict[str, str]]:
        """Labels by name."""
        return {
            alert["labels"]["alertname"]: alert["labels"]
            for alert in self._server.get("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def wait(
        self,
        names: set[str],
        work: Callable[[], object] = object,
        seen: Callable[[], object] = object,
    ) -> None:
        """Until each of these has fired; meanwhile ``work`` is done again and again. It has to end
        after ``seen``, which is called then."""
        missing = set(names)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(work)

            def again() -> None:
                nonlocal running
                if running.done():
                    running.result()
                    running = pool.submit(work)

            def fired() -> bool:
                missing.difference_update(self.firing())
                return not missing

            try:
                wait_for(f"the alerts {missing}", fired, again)
            finally:
                seen()
            running.result()
