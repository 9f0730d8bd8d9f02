"""The examples of classes that a user brings: what they do, and where they may be named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.workload import kv_tokens, page_mode
from tests.kit.engine import Engine
from tests.sparse.contexts import Contexts, contexts
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import RequestOptions
from vllm_ssdkv.config.selectors import SELECTORS
from vllm_ssdkv.config.sparse import SparseConfig
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR, ask
from vllm_ssdkv.sparse.protocol import Budget, page_budget
from vllm_ssdkv.sparse.selector_parts import SelectorParts

GUESTS = Path(__file__).parents[2] / "examples" / "guests"
SELECTOR = "passages:PassageSelector"
ENGINE = "traced_engine:TracedEngine"
TIER = "folder_tier:FolderTier"
WINDOW, CHUNK, BLOCK = 64, 512, 16


@pytest.fixture(scope="module", autouse=True)
def found() -> Iterator[None]:
    """Guests are importable here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(GUESTS)
        yield


def options(**more: object) -> SSDKVConfig:
    given = {"mode": "page", "selector": SELECTOR, "sparse": {"scorer": "bounds"}}
    return SSDKVConfig.from_extra_config(given | more)


@given(problem=contexts(), share=st.floats(0.05, 1))
@settings(max_examples=30, deadline=None)
def test_passages_keep_the_laws_of_selectors(problem: Contexts, share: float) -> None:
    budget, kernels = Budget(share=share), CpuScoringKernels(1)
    size = problem.layout.head_size
    parts = SelectorParts(SparseConfig(scorer="bounds"), budget, size, "bounds", lambda: kernels)
    selector = SELECTORS.resolve(SELECTOR).of(parts)
    chosen = selector.select(problem.query, problem.summaries, problem.scale, problem.window_lse())
    most = np.repeat(page_budget(budget, problem.summaries), problem.layout.kv_heads)
    assert np.diff(chosen.begin).tolist() == most.tolist()
    for begin, end in zip(chosen.begin[:-1], chosen.begin[1:], strict=True):
        assert (np.diff(chosen.pages[begin:end]) > 0).all()
        if end > begin:
            assert chosen.pages[begin] == 0, "the sink"
    assert ((chosen.mass >= 0) & (chosen.mass <= 1)).all()


def test_a_guest_is_scored_by_the_scorer_and_has_its_version_in_what_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = options()
    assert (config.selector, config.scorer) == (SELECTOR, "bounds")
    assert options(sparse={"scorer": "spread"}).scorer == "spread"
    before = config.choice
    monkeypatch.setattr(sys.modules["passages"].PassageSelector, "version", 2)
    assert config.choice != before


@pytest.mark.parametrize("group", ["selector", "engine", "tier"])
def test_what_cannot_be_imported_is_refused_with_the_option_and_the_remedy(group: str) -> None:
    given: dict[str, Any] = {"selector": "nowhere:Class", "mode": "page"}
    name = "selector"
    if group == "engine":
        given, name = {"io": {"engine": "nowhere:Class"}}, "io.engine"
    elif group == "tier":
        given, name = {"tier": "nowhere:Class"}, "tier"
    with pytest.raises(ConfigError) as caught:
        SSDKVConfig.from_extra_config(given)
    last = str(caught.value).splitlines()[-1]
    assert last.startswith(f'  {name}: got "nowhere:Class"; nowhere:Class cannot be imported (')
    assert "PYTHONPATH" in last
    assert '"uring"' in last or '"bounds"' in last or group == "tier"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mode": "page"}, 'tier: needs mode "reuse"'),
        ({"nodes": ["unix:///a"]}, "tier: the nodes keep the blocks"),
        ({"devices": [{"path": "/a", "capacity": "1GiB"}]}, "devices: has no meaning"),
        ({"io": {"engine": "uring"}}, "io.engine: has no meaning"),
        ({"on_reset": "forget"}, "on_reset: a tier of your own"),
        ({"replicas": 2}, "replicas: a tier of your own"),
        ({"tier": "folder_tier:Nothing"}, 'tier: got "folder_tier:Nothing"; the module'),
        ({"tier": "torch_device:TorchDevice"}, "has no method __init__(name, block_bytes)"),
        ({"tier": "folder"}, 'tier: got "folder"; allowed: module:Class of your own'),
    ],
)
def test_a_tier_refuses_options_of_drives_and_what_is_none(
    given: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SSDKVConfig.from_extra_config({"tier": TIER, **given})
    assert text in str(caught.value)


def test_a_request_brings_no_code() -> None:
    """Not even the class that the engine itself has, and nothing is imported for it."""
    for place in (SELECTOR, "this:That"):
        with pytest.raises(ConfigError, match="named in the engine's configuration only"):
            RequestOptions.of({"selector": place}, options())
    with pytest.raises(ConfigError, match="tier"):
        RequestOptions.of({"tier": "this:That"}, options())
    assert "this" not in sys.modules


def test_a_request_may_name_a_guest_that_is_registered() -> None:
    code = f"""
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import RequestOptions, servable
from vllm_ssdkv.config.selectors import SELECTORS
SELECTORS.register("passages", "{SELECTOR}")
config = SSDKVConfig.from_extra_config({{"mode": "page", "selector": "adaptive"}})
assert servable(config)[-1] == "passages"
asked = RequestOptions.of({{"selector": "passages"}}, config).applied(config)
assert asked.selector == "passages" and asked.scorer == "codes" and asked.choice != config.choice
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(GUESTS)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.engine
def test_an_engine_answers_with_both(
    tmp_devices: Callable[[int], list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.csv"
    monkeypatch.setenv("SSDKV_TRACE", str(trace))
    sparse = {"scorer": "bounds", "exact_below": 0, "page_cache": "1MiB", "summaries": "3MiB"}
    engine = Engine(
        MODEL_DIR,
        ssdkv=page_mode(
            [{"path": str(path), "capacity": "256MiB"} for path in tmp_devices(1)],
            window=WINDOW,
            dram="12MiB",
            selector=SELECTOR,
            sparse=sparse,
            io={"staging": "4MiB", "engine": ENGINE},
        ),
        kv_tokens=8 * kv_tokens(WINDOW, CHUNK, BLOCK),
        dtype="bfloat16",
        block_size=BLOCK,
        max_num_batched_tokens=CHUNK,
        max_model_len=4096,
    )
    try:
        question = ask("single", 3000, 1)
        engine.add("own", list(question.prompt), len(question.answer))
        assert engine.run()["own"] == question.answer
        assert 0 < engine.ssdkv("sparse_pages_selected") < engine.ssdkv("sparse_pages_in_context")
        (output,) = engine.llm.generate(
            [{"prompt_token_ids": list(question.prompt)}],
            Engine.sampling(
                len(question.answer),
                extra_args={"kv_transfer_params": {"ssdkv": {"selector": SELECTOR}}},
            ),
            use_tqdm=False,
        )
        told = json.dumps(output.kv_transfer_params)
        assert '"selector": "exact"' in told
        assert "named in the engine's configuration only" in told
        engine.settle()
    finally:
        engine.close()
    lines = [line.split(",") for line in trace.read_text().splitlines()]
    assert {line[1] for line in lines} == {"read", "write"}
    assert all(int(line[2]) > 0 and int(line[3]) % 4096 == 0 for line in lines)
