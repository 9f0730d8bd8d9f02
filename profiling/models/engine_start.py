"""One engine with a tiny random model: stock vLLM, or ours in one mode, in a forked process."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm_ssdkv.profiling.gpu_pack.stage import end_with_parent
from vllm_ssdkv.profiling.models.tiny_config import make_tiny
from vllm_ssdkv.profiling.rig.engine import ONE_THREAD, Engine, random_prompt

PROMPTS: Final = tuple(
    [token % 512 for token in random_prompt(length, length)] for length in (2500, 700, 129)
)
ANSWER: Final = 12
WINDOW: Final = 128
PAGE_BLOCKS: Final = 24
"""Blocks of 32 tokens in page mode's HBM: less than a third of the longest prompt."""
LIMIT_S: Final = 400.0

_COMMON: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "distributed_executor_backend": "uni",
    "kv_cache_memory_bytes": 64 << 20,
}


def options(mode: str, folder: Path) -> dict[str, Any]:
    """Options of the connector: hits are loaded whatever is faster, and none is verified."""
    device = {"path": str(folder / mode), "capacity": "256MiB", "weight": 1}
    common = {"mode": mode, "devices": [device], "dram_gib": "32MiB", "verify_hits": 0}
    more = {"hbm_window_tokens": WINDOW} if mode == "page" else {"load": "always"}
    return {**common, **more, "io": {"staging": "4MiB"}}


def answers(architecture: str, mode: str, folder: Path) -> dict[str, Any]:
    """Start the engine and ask it twice; ``mode``: empty for stock vLLM."""
    from vllm_ssdkv.profiling.models.random_weights import FORMAT

    make_tiny(architecture, folder / "model")
    told: dict[str, Any] = {}
    settings = {**_COMMON, "load_format": FORMAT, "enable_prefix_caching": mode == "reuse"}
    if mode == "page":
        settings["num_gpu_blocks_override"] = PAGE_BLOCKS
    if mode:
        (folder / mode).mkdir(mode=0o700)
    ours = options(mode, folder) if mode else None
    engine = Engine.small(folder / "model", ours, **settings)
    for name in ("first", "again"):
        outputs = engine.ask_all(PROMPTS, ANSWER)
        told[name] = [list(output.outputs[0].token_ids) for output in outputs]
        told["cached"] = sum(output.num_cached_tokens or 0 for output in outputs)
        if not mode:
            break
        engine.forget()
    engine.close()
    return told


def start(architecture: str, mode: str, folder: Path) -> dict[str, Any]:
    """Fork a process for it. Returns what :func:`answers` does, or ``error``: why there is none."""
    result, log = folder / "result.json", folder / "log"
    result.unlink(missing_ok=True)
    arguments = (architecture, mode, folder, result, log)
    child = multiprocessing.get_context("fork").Process(target=_run, args=arguments)
    child.start()
    child.join(LIMIT_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        return {"error": f"it did not answer in {LIMIT_S:.0f} s"}
    if not result.is_file():
        return {"error": f"its process ended with status {child.exitcode}"}
    told: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return told


def _run(architecture: str, mode: str, folder: Path, result: Path, log: Path) -> None:
    end_with_parent()
    os.environ.update(ONE_THREAD)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        told = answers(architecture, mode, folder)
    except BaseException as error:  # noqa: BLE001 - any is a result, and is written down
        traceback.print_exc()
        told = {"error": f"{type(error).__name__}: {error}"}
    result.write_text(json.dumps(told), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)
