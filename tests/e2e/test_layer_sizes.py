"""Reuse mode with a model whose layers have KV of several sizes in one KV cache group (Gemma 4
without vLLM's hybrid KV cache manager): in a slot they lie back to back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import reuse_mode
from tests.kit.engine import Engine
from vllm_ssdkv.cli.main import app as cli

BLOCK = 256
"""Tokens of a block, so that slots are so large that a header is little beside them."""
PROMPTS = prompts((1500, 1025, 640, 300), seed=5)


def test_a_restart_finds_what_layers_of_several_sizes_have_stored(
    models: dict[str, Path], stock: Stock, devices: Callable[..., list[dict[str, Any]]]
) -> None:
    wanted, place = stock.answers("gemma4", PROMPTS), devices(2)
    hits = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
    verified = [hit - BLOCK for hit in hits]
    for cached, verify in ((None, 0), (hits, 0), (verified, 1)):
        with Engine(
            models["gemma4"],
            ssdkv=reuse_mode(place, verify_hits=verify),
            kv_tokens=16384,
            block_size=BLOCK,
            disable_hybrid_kv_cache_manager=True,
            enable_prefix_caching=False,
        ) as engine:
            found = engine.answers(PROMPTS)
            engine.settle()
            engine.assert_nothing_held()
            assert [one.tokens for one in found] == [one.tokens for one in wanted]
            assert [one.cached for one in found] == (cached or [0] * len(PROMPTS))
            sizes = [
                min(tensor.layer_stride, tensor.block_stride)
                for tensor in engine.scheduler.kv_cache_config.kv_cache_tensors
                for _ in tensor.layers
            ]
            assert (len(sizes), len(set(sizes))) == (5, 2)
            slot = engine.scheduler.connector.scheduler.rebalancer.placement.geometry.slot_bytes
            layers = sum(sizes)
            assert layers < slot < 1.02 * layers
            if cached is not None:
                read = engine.ssdkv("bytes_read")
                assert read == slot * sum(hit // BLOCK for hit in hits)
                assert engine.ssdkv("verified_hits", result="same") == (len(hits) if verify else 0)
    for command in ("fsck", "inspect"):
        said = CliRunner().invoke(cli, [command, place[0]["path"]])
        assert said.exit_code == 0, said.output
