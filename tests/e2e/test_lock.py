"""Two engines on one directory: the second refuses, the first notices nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens, page_mode
from tests.kit.engine import Engine

CHUNK = 256
SECOND = """
import json, sys
from vllm import LLM
if __name__ == "__main__":
    LLM(
        sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        block_size=32,
        max_model_len=2048,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=64 << 20,
        kv_transfer_config={
            "kv_connector": "SSDKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": json.loads(sys.argv[2]),
        },
    )
"""


def test_the_second_engine_refuses(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    tmp_path: Path,
) -> None:
    import json

    batch = prompts((1500, 700), seed=31)
    wanted = [a.tokens for a in stock.answers("llama", batch)]
    options = page_mode(devices())
    script = tmp_path / "second.py"
    script.write_text(SECOND)
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=2 * kv_tokens(128, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=2048,
    ) as engine:
        assert [a.tokens for a in engine.answers(batch)] == wanted
        second = subprocess.run(
            [sys.executable, "-P", str(script), str(models["llama"]), json.dumps(options)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
        assert second.returncode != 0
        said = second.stdout + second.stderr
        (line, *_) = [line for line in said.splitlines() if "StoreLockedError: " in line]
        first_device = options["devices"][0]["path"]  # type: ignore[index]  # as page_mode made it
        assert first_device in line
        assert str(os.getpid()) in line
        assert [a.tokens for a in engine.answers(batch)] == wanted
        for name in ("checksum_failures", "header_mismatches", "slots_dropped"):
            assert engine.ssdkv(name) == 0
