"""Pipelines in mode reuse: each stage has its own layers and files; one index serves all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT, reuse_mode
from tests.kit.engine import Engine
from tests.kit.forks import environment
from tests.kit.waiting import until
from vllm_ssdkv.store.format.journal_record import JOURNAL, RECORD_BYTES
from vllm_ssdkv.store.format.manifest import Manifest

BLOCK = 32


def children(process: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def staged(model: Path, layers: str, ssdkv: dict[str, object], **settings: object) -> Engine:
    """An engine whose two stages have so many layers."""
    with environment(VLLM_PP_LAYER_PARTITION=layers):
        return Engine(
            model,
            ssdkv=ssdkv,
            kv_tokens=16384,
            enable_prefix_caching=False,
            pipeline_parallel_size=2,
            in_process=False,
            # Where it compiles nothing, vLLM's CPU worker starts no pipeline.
            enforce_eager=False,
            compilation_config={"mode": 3, "backend": "eager"},
            **settings,
        )


def kill(engine: Engine) -> None:
    """Kill all its processes."""
    core = engine.llm.llm_engine.engine_core.resources.engine_manager.processes[0]
    for process in (*children(core.pid), core.pid):
        os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("tensor", [1, 2])
def test_two_uneven_stages(
    tensor: int,
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
) -> None:
    """Tokens are those of stock vLLM with hits, and after the engine was killed. Each stage
    compares the last block of each hit in its own layers."""
    wanted = [a.tokens for a in stock.answers("llama", SHORT)]
    places = devices(2)
    state = Path(places[0]["path"])
    found = [(len(prompt) - 1) // BLOCK for prompt in SHORT]
    hits = [max(0, blocks - 1) * BLOCK for blocks in found]
    compared = 2 * tensor * sum(map(bool, found))

    def started() -> Engine:
        options = reuse_mode(places, verify_hits=1, io={"deadline": 300.0})  # no drive is given up
        return staged(models["llama"], "3,1", options, tensor_parallel_size=tensor)

    with started() as engine:
        first, again = engine.answers(SHORT), engine.answers(SHORT)
        assert [a.tokens for a in first] == [a.tokens for a in again] == wanted
        assert [a.cached for a in again] == hits
        assert engine.ssdkv("verified_hits", result="same") == compared
        # A block is in the journal when every rank of every stage has written it.
        blocks = sum(len(prompt) // BLOCK for prompt in SHORT)
        until(lambda: (state / JOURNAL).stat().st_size >= blocks * RECORD_BYTES, seconds=300.0)
        kill(engine)
    manifest = Manifest.load(state)
    assert manifest is not None
    assert [one.layers for one in manifest.geometries] == [3] * tensor + [1] * tensor
    with started() as engine:
        after = engine.answers(SHORT)
        assert [a.tokens for a in after] == wanted
        assert [a.cached for a in after] == hits
        assert engine.ssdkv("verified_hits", result="same") == compared
        for name in ("checksum_failures", "header_mismatches", "load_failures"):
            assert engine.ssdkv(name) == 0, name


@pytest.mark.parametrize(
    "settings", [{}, {"disable_hybrid_kv_cache_manager": True}], ids=["groups", "sizes"]
)
def test_stages_of_other_kinds_of_layers(
    settings: dict[str, Any],
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
) -> None:
    """The first stage has no layer with full attention: it lacks layers of a KV cache group, or its
    layers have one size and those of the second stage two."""
    wanted = [a.tokens for a in stock.answers("gemma4", SHORT)]
    block = 32 if settings else 64
    hits = [(len(prompt) - 1) // block * block for prompt in SHORT]
    with staged(models["gemma4"], "2,3", reuse_mode(devices(2)), **settings) as engine:

        def hit() -> bool:
            found = engine.answers(SHORT)
            assert [one.tokens for one in found] == wanted
            return [one.cached for one in found] == hits

        assert not hit()
        until(hit)  # as soon as all of it is written
        for kind in ("checksum_failures", "header_mismatches", "load_failures"):
            assert engine.ssdkv(kind) == 0, kind
