"""Two ranks: each has half of the KV heads and its own files; one index serves both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SOAK_ROUNDS
from tests.e2e.stock import Stock
from tests.e2e.workload import LONG, kv_tokens, page_mode, reuse_mode
from tests.kit.engine import MAX_TOKENS, Engine

CHUNK = 256
PROMPTS = LONG[1:5]


def data_files(devices: list[dict[str, str]]) -> set[tuple[str, str]]:
    return {
        (Path(d["path"]).name, file.name)
        for d in devices
        for file in Path(d["path"]).iterdir()
        if file.suffix == ".data"
    }


EVERYTHING = {
    "budget": 1.0,
    "exact_below": 0,
    "channels": 1024,
    "summaries": "12MiB",
    "token_order": "coactivation",
}
"""With all channels and all pages SparF is exact attention."""


# With sparf, too, prompts walk over their contexts exactly: the other is for `make soak`.
EXACT = [pytest.param("page", marks=pytest.mark.soak)] if SOAK_ROUNDS else []


@pytest.mark.parametrize("mode", [*EXACT, "sparf", "reuse"])
def test_two_ranks(
    mode: str,
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
) -> None:
    wanted = [a.tokens for a in stock.answers("llama", PROMPTS)]
    places = devices(2)
    options = page_mode(places, dram="12MiB")
    if mode == "sparf":
        options = page_mode(places, dram="48MiB", selector="sparf", sparse=EVERYTHING)
    elif mode == "reuse":
        options = reuse_mode(places)
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=16384 if mode == "reuse" else 2 * kv_tokens(128, CHUNK),
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        in_process=False,
    ) as engine:
        first = engine.answers(PROMPTS)
        again = engine.answers(PROMPTS)
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        after = engine.answers(PROMPTS)
        assert [a.tokens for a in first] == wanted
        for found in again, after:
            assert [a.tokens for a in found] == wanted
            assert [a.cached for a in found] == [(len(p) - 1) // 32 * 32 for p in PROMPTS]
        assert (engine.ssdkv("context_pages_streamed", tier="ssd") > 0) is (mode != "reuse")
        assert (engine.ssdkv("sparse_pages_selected") > 0) is (mode == "sparf")
        assert engine.ssdkv("sparse_pages_selected") == engine.ssdkv("sparse_pages_in_context")
        assert engine.ssdkv("sparse_rows_exact") == 0
        for name in ("checksum_failures", "header_mismatches", "load_failures"):
            assert engine.ssdkv(name) == 0, name
    assert data_files(places) == {
        (Path(d["path"]).name, f"rank{rank}.data") for d in places for rank in (0, 1)
    }


def test_two_ranks_that_choose(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    tmp_path: Path,
) -> None:
    """Each rank chooses for its own heads; also when a device fails under both. Where the budget is
    everything, that is what stock vLLM answers."""
    asked: list[dict[str, object]] = [
        {"budget": 1},
        {"selector": "exact"},
        {"selector": "window", "budget": 1},
        {"selector": "adaptive", "budget": 1},
    ]
    prompts = LONG[2:6]
    wanted = [a.tokens for a in stock.answers("llama", prompts)]
    places, control = devices(3), tmp_path / "faults.json"
    options = page_mode(
        places,
        window=64,
        dram="36MiB",
        selector="sparf",
        sparse={
            "mass": 1,
            "exact_below": 0,
            "page_cache": "1MiB",
            "summaries": "8MiB",
            "token_order": "keys",
        },
        io={"staging": "4MiB", "fault_file": str(control)},
    )
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=2 * kv_tokens(64, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=4096,
        tensor_parallel_size=2,
        in_process=False,
    ) as engine:
        parameters = [
            engine.sampling(extra_args={"kv_transfer_params": {"ssdkv": one}}) for one in asked
        ]

        def ask() -> list[tuple[int, ...]]:
            texts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            outputs = engine.llm.generate(texts, parameters, use_tqdm=False)
            return [tuple(output.outputs[0].token_ids) for output in outputs]

        assert ask() == wanted
        # Two ranks, four layers, one KV head each.
        assert engine.ssdkv("sparse_selections") == 8 * 3 * (MAX_TOKENS - 1)
        assert engine.ssdkv("sparse_pages_fetched", tier="ssd") > 0
        assert engine.ssdkv("recomputed_requests") == 0
        control.write_text(json.dumps([{"kind": "stall", "device": 1, "seconds": 60.0}]))
        assert ask() == wanted
        assert engine.ssdkv("device_lost", device=places[1]["path"]) > 0
        control.write_text("[]")


def test_two_ranks_whose_contexts_the_host_attends_to(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    tmp_path: Path,
) -> None:
    """Each rank has a device of its own, over an encrypted store with two copies, of which one dies
    under it."""
    prompts = LONG[2:6]
    wanted = [a.tokens for a in stock.answers("llama", prompts)]
    places, control, key = devices(3), tmp_path / "faults.json", tmp_path / "key"
    key.write_text(bytes(range(32)).hex())
    key.chmod(0o600)
    options = page_mode(
        places,
        window=64,
        dram="24MiB",
        replicas=2,
        encryption={"key_file": str(key)},
        offload={"kind": "host", "threads": 1, "share": 1.0},
        io={"staging": "4MiB", "fault_file": str(control)},
    )
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=2 * kv_tokens(64, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=4096,
        tensor_parallel_size=2,
        in_process=False,
    ) as engine:
        assert [a.tokens for a in engine.answers(prompts)] == wanted
        assert engine.ssdkv("offload_in_use") == 2
        assert engine.ssdkv("offload_steps", by="device") > 0
        control.write_text(json.dumps([{"kind": "stall", "device": 1, "seconds": 60.0}]))
        before = engine.ssdkv("offload_tickets")
        assert [a.tokens for a in engine.answers(prompts)] == wanted
        assert engine.ssdkv("device_lost", device=places[1]["path"]) > 0
        control.write_text("[]")
        assert engine.ssdkv("recomputed_requests") == 0
        assert engine.ssdkv("offload_tickets") > before
        assert engine.ssdkv("offload_in_use") == 2
