"""Prometheus, and a server for it to scrape."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.conftest import disk_directory
from tests.serving import free_port, server
from vllm_ssdkv.cli import recall
from vllm_ssdkv.grafana.prometheus import Prometheus, PrometheusError

GRAFANA = Path(__file__).parents[2] / "grafana"
PATIENCE_S = 300.0
SCRAPE_S = 1.0
MAX_LEN = 4096
LENGTH = 1536
"""Tokens of a prompt."""


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
    """

    url: str
    devices: list[Path]
    control: Path

    def faults(self, *rules: dict[str, Any]) -> None:
        """Have exactly these faults from now on."""
        fresh = self.control.with_suffix(".new")
        fresh.write_text(json.dumps(rules))
        fresh.rename(self.control)

    def ask(self, seed: int) -> str:
        """The answer to a prompt that ``seed`` chooses."""
        answer = self._client().completions.create(**_completion(seed))
        return str(answer.choices[0].text)

    def batch(self, seeds: Iterable[int]) -> Batch:
        """The same prompts as a batch, and a request that must fail; returns when it has ended."""
        bodies = [*map(_completion, seeds), {**_completion(0), "model": "another"}]
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
            for i, body in enumerate(bodies)
        ]
        client = self._client()
        text = "\n".join(map(json.dumps, lines))
        file = client.files.create(file=("batch.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_for(
            "the batch to end",
            lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "expired"),
        )
        return client.batches.retrieve(batch.id)

    def _client(self) -> openai.OpenAI:
        return openai.OpenAI(
            api_key="none", base_url=f"{self.url}/v1", max_retries=0, timeout=PATIENCE_S
        )


def _completion(seed: int) -> dict[str, Any]:
    """Body of a request whose answer is far back in its prompt."""
    question = recall.ask("single", LENGTH, seed)
    return {
        "model": str(recall.MODEL_DIR),
        "prompt": list(question.prompt),
        "max_tokens": len(question.answer),
        "temperature": 0,
    }


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
    limits = {"capacity": "64MiB", "tbw": "1TiB", "daily_write_budget": "1TiB", "weight": 1}
    options = {
        "mode": "page",
        "devices": [{"path": str(path), **limits} for path in devices],
        "dram_gib": "8MiB",
        "hbm_window_tokens": 128,
        "selector": "bounds",
        # DRAM holds less than one prompt, so that SSDs are read in every round.
        "sparse": {"budget": 0.25, "exact_below": 0, "page_cache": "1MiB"},
        "io": {"staging": "4MiB", "fault_file": str(control), "deadline": 30.0},
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
    with server(command, variables, scratch, scratch / "serve.log") as url:
        yield Server(url, devices, control)


@pytest.fixture(scope="module")
def prometheus(serving: Server, scratch: Path) -> Iterator[str]:
    """URL of a Prometheus with the committed rules, which scrapes the server.

    Its rules have no ``for``: promtool tests those.
    """
    rules = (GRAFANA / "alerts.yml").read_text().splitlines()
    immediate = [line for line in rules if not line.strip().startswith("for:")]
    assert len(immediate) < len(rules)
    (scratch / "alerts.yml").write_text("\n".join(immediate))
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S:g}s", "evaluation_interval": f"{SCRAPE_S:g}s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {
                "job_name": "vllm",
                "static_configs": [{"targets": [serving.url.removeprefix("http://")]}],
            }
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
            return [sample["value"][1] for sample in up] == ["1"]
        return False

    try:
        wait_for("Prometheus to scrape", scrapes)
        yield url
    finally:
        process.kill()
        process.wait(30)
