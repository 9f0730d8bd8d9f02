"""Any options together, under requests that come, go and are preempted at random, with faults, and
a restart after damage: tokens stay those of stock vLLM, and nothing is left over.

Selectors have a budget of everything, so that they choose, fetch and attend to page by page without
changing a token.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.conftest import SOAK_ROUNDS
from tests.e2e.bench import flip_bit
from tests.e2e.drafters import draft_model, eagle
from tests.e2e.stock import Stock
from tests.e2e.turmoil import ANSWER, PROMPTS, Turmoil
from tests.e2e.workload import kv_tokens
from tests.faults import set_faults
from tests.kit.engine import Engine
from tests.kit.waiting import until
from tests.store.unhurried import open_unhurried_engines
from vllm_ssdkv.base.errors import ConfigError, StoreFailedError, UnsupportedError
from vllm_ssdkv.store.cache.frames import FrameState

ACTIONS = 50
SELECTORS = ("exact", "bounds", "spread", "codes", "sparf", "adaptive", "swarm", "window")
Devices = Callable[..., list[dict[str, Any]]]


def sparse_options(source: random.Random, selector: str) -> dict[str, object]:
    """Which lose nothing."""
    options: dict[str, object] = {
        "budget": 1,
        "mass": 1,
        "exact_below": source.choice([0, 500]),
        "dense_layers": source.choice([0, 0, 1, 4]),
        "reuse_steps": source.choice([1, 1, 3]),
        "page_policy": source.choice(["lru", "frequency", "decay"]),
        "prefetch": source.choice([True, False]),
        "sink_tokens": source.choice([0, 16, 100]),
    }
    if source.random() < 0.3:
        options["hbm_pages"] = source.choice(["1MiB", "8MiB"])
    if selector == "swarm":
        options["cluster_score"] = source.choice(["members", "medoid"])
        options["cluster_size"] = source.choice([1, 8])
    if selector in {"adaptive", "swarm"}:
        options["scorer"] = source.choice(["bounds", "spread", "codes", "sparf"])
    if selector == "sparf":
        options["granularity"] = source.choice(["page", "token"])
    return options


def drawn(source: random.Random, places: list[dict[str, Any]], control: Path) -> dict[str, object]:
    """Options of a connector."""
    mode = source.choice(["page", "page", "reuse"])
    options: dict[str, object] = {
        "mode": mode,
        "devices": places,
        "dram_gib": source.choice(["12MiB", "18MiB", "32MiB", "96MiB"]),
        "replicas": source.choice([1, 2]) if len(places) > 1 else 1,
        "io": {
            "staging": "4MiB",
            "deadline": 2.0,
            "fault_file": str(control),
            "engine": source.choice(["auto", "uring", "threads"]),
            "queue_depth": source.choice([1, 4, 16]),
            "scrub_rate": source.choice([None, None, "4MiB"]),
        },
    }
    if source.random() < 0.25:
        options["encryption"] = {"key_env": "SSDKV_TEST_KEY"}
    if source.random() < 0.2:
        options["trim"] = True
    if mode == "reuse":
        options["load"] = source.choice(["always", "auto"])
        options["admission"] = source.choice(["all", "all", "second_use"])
        return options
    options["hbm_window_tokens"] = source.choice([64, 96, 128, 256])
    options["page_tokens"] = source.choice([16, 16, 32])
    selector = options["selector"] = source.choice(SELECTORS)
    if selector != "exact":
        options["sparse"] = sparse_options(source, selector)
    if source.random() < 0.5:
        options["offload"] = {"threads": 1, "share": source.choice(["auto", 0.5, 1.0])}
    return options


def change(source: random.Random, options: dict[str, object], places: list[dict[str, Any]]) -> str:
    """Between two lives, what may change without losing the store, or loses a part of it."""
    what = source.choice(["nothing", "order", "bits", "journal", "manifest", "file", "memory"])
    files = [Path(place["path"], "rank0.data") for place in places]
    state = Path(places[0]["path"])
    if what == "order":
        source.shuffle(places)
        options["state_dir"] = str(state)
    elif what == "bits":
        file = source.choice(files)
        for _ in range(40):
            flip_bit(file, source.randrange(file.stat().st_size), source.randrange(8))
    elif what == "journal":
        journal = state / "journal"
        os.truncate(journal, source.randrange(journal.stat().st_size + 1))
    elif what == "manifest":
        (state / "store.json").unlink()
    elif what == "file":
        source.choice(files).unlink()
    elif what == "memory":
        options["dram_gib"] = "48MiB"
    return what


@pytest.mark.rounds
@pytest.mark.timeout(7200)
def test_any_options(
    models: dict[str, Path],
    stock: Stock,
    devices: Devices,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    soak_rounds: int,
) -> None:
    open_unhurried_engines(monkeypatch)
    monkeypatch.setenv("SSDKV_TEST_KEY", "ab" * 32)
    wanted = {
        name: [answer.tokens for answer in stock.answers(name, PROMPTS, ANSWER)]
        for name in ("llama", "gemma3", "gpt_oss")
    }
    drafters = [
        draft_model(models["llama"], tmp_path / "draft"),
        eagle(models["llama"], tmp_path / "head"),
    ]
    first = random.SystemRandom().randrange(1 << 30) if SOAK_ROUNDS else 0
    for seed in range(first, first + soak_rounds):
        control = tmp_path / f"faults{seed}.json"
        live_twice(seed, models, devices, control, wanted, drafters)


def live_twice(
    seed: int,
    models: dict[str, Path],
    devices: Devices,
    control: Path,
    wanted: dict[str, list[tuple[int, ...]]],
    drafters: list[dict[str, Any]],
) -> None:
    """Engines with the options of one draw follow each other on one store."""
    source = random.Random(seed)
    count = source.choice([1, 2, 3, 4])
    places = devices(count, source.choice(["24MiB", "64MiB"]))
    options = drawn(source, places, control)
    window = options.get("hbm_window_tokens", 96)
    assert isinstance(window, int)
    block = 32
    if options["mode"] == "page":
        page = options["page_tokens"]
        assert isinstance(page, int)
        block = source.choice([size for size in (16, 32, 64, 128) if page <= size <= window])
    chunk = source.choice([128, 256])
    settings: dict[str, Any] = {
        "block_size": block,
        "kv_tokens": source.choice([1, 2, 3]) * kv_tokens(window, chunk, block)
        if options["mode"] == "page"
        else 2400,
        "max_num_batched_tokens": chunk,
        "max_model_len": 2048,
        "max_num_seqs": source.choice([1, 3, 5, 8]),
        "async_scheduling": source.choice([True, False]),
        "scheduling_policy": source.choice(["fcfs", "priority"]),
    }
    model = source.choice(["llama", "llama", "gemma3", "gpt_oss"])
    if options["mode"] == "reuse" and model == "llama" and source.random() < 0.5:
        settings["speculative_config"] = source.choice(drafters)
        settings["kv_tokens"] *= 2  # for the drafter's layers
    print(f"seed {seed}: {model} {json.dumps(options)} {settings}")
    faults = source.choice([0, 0, 1, 1, 1])
    likely = {"add": 5, "step": 8, "abort": 1, "preempt": 2, "fault": faults}
    likely |= {"reset": 0.3, "settle": 0.5}
    asks: list[dict[str, object] | None] = [None]
    if options.get("selector", "exact") != "exact":
        asks += [None, {"selector": "exact"}, {"selector": "window", "budget": 1}]
    for life in range(2):
        set_faults(control)
        if life:
            print("  then", change(source, options, places))
        try:
            engine = Engine(models[model], ssdkv=options, **settings)
        except (ConfigError, UnsupportedError) as error:
            print(f"  refused: {error}")
            return
        with engine:
            turmoil = Turmoil(engine, source, wanted[model], likely, asks, control, len(places))
            try:
                turmoil.run(ACTIONS)
            except StoreFailedError as error:
                if "out of use" not in str(error):  # page mode needs a device that works
                    raise
                print(f"  gave up: {error}")
                continue
            frames = get_kv_transfer_group().worker.store.frames
            dirty = (FrameState.HELD, FrameState.WRITING)
            until(lambda: frames.count(*dirty) == 0, "the end of writes that hung")  # noqa: B023
            frames.audit()
            engine.assert_nothing_held()
            assert engine.scheduler.connector.scheduler.requests == {}
