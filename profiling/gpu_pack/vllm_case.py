"""One case of the stage ``vllm`` in a process of its own.

    python -P -m vllm_ssdkv.profiling.gpu_pack.vllm_case CASE DEVICE MODEL FOLDER

Writes JSON objects, one per line, to a file in the folder: what was imported, then the answers of
an engine, or the error that stopped it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.connector.names import CONNECTOR
from vllm_ssdkv.profiling.gpu_pack import vllm_ops

RESULT: Final = "result.jsonl"

BLOCK: Final = 32
WINDOW: Final = 64
CHUNK: Final = 128
ANSWER: Final = 16
LENGTHS: Final = (700, 300, 129, 20)
"""Tokens of the prompts. The longest has many times the KV cache of page mode."""

_CACHE_TOKENS: Final = {"stock": 4096, "reuse": 4096, "page": WINDOW + CHUNK + 3 * BLOCK}


def prompts(vocabulary: int) -> list[list[int]]:
    """Token ids, the same in every process."""
    draw = random.Random(7)
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in LENGTHS]


def full_hits() -> list[int]:
    """Tokens of the prompts that a store which holds all of them serves."""
    return [(length - 1) // BLOCK * BLOCK for length in LENGTHS]


def options(case: str, folder: Path) -> dict[str, Any]:
    """The connector's options."""
    return {
        "mode": case,
        "verify_hits": 0,
        "devices": [{"path": str(folder), "capacity": "64MiB"}],
        "state_dir": str(folder),
        "dram_gib": "64MiB" if case == "reuse" else "8MiB",
        "io": {"staging": "4MiB"},
        **({"load": "always"} if case == "reuse" else {"hbm_window_tokens": WINDOW}),
    }


def settings(case: str, device: str, model: Path, folder: Path) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``: native forms and Triton in place of compiled operators."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    token_bytes = config["num_hidden_layers"] * config["num_key_value_heads"] * 2
    token_bytes *= config["head_dim"] * 4
    chosen: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": len(LENGTHS),
        "block_size": BLOCK,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": _CACHE_TOKENS[case] * token_bytes,
        "distributed_executor_backend": "uni",
        "compilation_config": {"custom_ops": ["none"]},
    }
    if case != "stock":
        chosen["kv_transfer_config"] = {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_extra_config": options(case, folder),
        }
    if device == "cuda":
        native = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
        chosen["kernel_config"] = {"ir_op_priority": native}
        chosen["attention_backend"] = "CUSTOM" if case == "page" else "TRITON_ATTN"
    return chosen


def import_vllm(device: str) -> dict[str, Any]:
    """Import what makes engines, with stand-ins where there are no compiled parts."""
    begin = time.perf_counter()
    compiled = vllm_ops.is_compiled()
    registered = [] if compiled else vllm_ops.stand_in(device)
    if not compiled:
        # V2 maps host memory into the device with a compiled operator.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from vllm import LLM, ModelRegistry  # noqa: F401
    from vllm.platforms import current_platform

    if not compiled:
        # Known by its name alone, a model is looked at in another process, without stand-ins.
        from vllm.model_executor.models.llama import LlamaForCausalLM

        ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    if current_platform.device_type != device:
        raise BenchError(f"vLLM has chosen the platform {current_platform.device_type!r}")
    return {
        "vllm": metadata.version("vllm"),
        "compiled parts": "as installed" if compiled else "none",
        "stand-ins": ", ".join(registered) or "none",
        "platform": current_platform.device_type,
        "import": time.perf_counter() - begin,
    }


def answers(case: str, device: str, model: Path, folder: Path) -> dict[str, Any]:
    """Answers of an engine to the same prompts, twice, and how many tokens it did not compute."""
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(**settings(case, device, model, folder))
    found: dict[str, Any] = {"start": time.perf_counter() - begin}
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(vocabulary)]
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True, detokenize=False)
    for name in ("first", "again"):
        begin = time.perf_counter()
        given = llm.generate(asked, greedy, use_tqdm=False)
        found[f"{name} time"] = time.perf_counter() - begin
        found[name] = [list(one.outputs[0].token_ids) for one in given]
        found[f"{name} cached"] = [int(one.num_cached_tokens or 0) for one in given]
    llm.llm_engine.engine_core.shutdown()
    return found


def main() -> None:
    """Entry point of the process; status 1 if something stopped it, which is told of."""
    case, device, model, folder = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)
    status = 0
    with (Path(folder) / RESULT).open("w", encoding="utf-8") as told:

        def tell(found: dict[str, Any]) -> None:
            told.write(json.dumps(found) + "\n")
            told.flush()

        try:
            tell(import_vllm(device))
            tell(answers(case, device, Path(model), Path(folder)))
        except BaseException as error:  # noqa: BLE001 - vLLM may fail in any way, and is told of
            traceback.print_exc()
            tell({"error": f"{type(error).__name__}: {error}"})
            status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of a failed engine would hold the process


if __name__ == "__main__":
    main()
