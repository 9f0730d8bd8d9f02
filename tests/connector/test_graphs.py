"""Whole decode steps in CUDA graphs: the start refuses the options that no kernel serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import capturable, servable
from vllm_ssdkv.config.selectors import SELECTORS
from vllm_ssdkv.connector import active_worker, graphs
from vllm_ssdkv.connector.kv_layout import KVLayout, paged_geometry
from vllm_ssdkv.connector.worker.device_decode import Manner
from vllm_ssdkv.connector.worker.page_mode import ContextLayers
from vllm_ssdkv.connector.worker.selector_registry import SelectorGroup

CPU = torch.device("cpu")
SCORERS = ("bounds", "spread", "codes")


def config(selector: str = "exact", **sparse: object) -> SSDKVConfig:
    given = {"mode": "page", "selector": selector, "devices": ["/x"], "sparse": sparse}
    return SSDKVConfig.from_extra_config(given if sparse else given | {"sparse": {}})


def layout(options: SSDKVConfig, dtype: torch.dtype = torch.bfloat16) -> KVLayout:
    geometry = paged_geometry(options, 2, 2, 64, 64, dtype)
    return KVLayout(("a", "b"), 64, 2, 64, dtype, geometry, 1, 8, query_heads=4)


def manner(options: SSDKVConfig) -> Manner | None:
    group = SelectorGroup.of(options, layout(options), CPU)
    return None if group is None else Manner.of(group.selector)


@pytest.mark.parametrize("selector", [name for name in SELECTORS.names() if name != "exact"])
def test_options_promise_what_kernels_choose(selector: str) -> None:
    options = config(selector)
    assert (graphs.config_reason(options) == "") == (manner(options) is not None)


@pytest.mark.parametrize("scorer", [*SCORERS, "sparf"])
def test_adaptive_choices_are_promised_by_their_scorers(scorer: str) -> None:
    options = config("adaptive", scorer=scorer)
    assert (graphs.config_reason(options) == "") == (scorer in SCORERS)
    assert (manner(options) is not None) == (scorer in SCORERS)


@pytest.mark.parametrize("selector", ["window", "bounds", "adaptive"])
def test_requests_may_ask_for_what_a_graph_takes(selector: str) -> None:
    options = config(selector)
    own = manner(options)
    assert own is not None
    for name in servable(options):
        if name == "exact" or SELECTORS.is_guest(name):
            continue
        asked = manner(options.model_copy(update={"selector": name}))
        assert (asked is not None and own.takes(asked)) == (name in capturable(options)), name


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (config("bounds", reuse_steps=4), "sparse.reuse_steps"),
        (config("bounds", dense_layers=1), "sparse.dense_layers"),
        (config("spread", estimate_rest=True), "sparse.estimate_rest"),
        (config("sparf"), "the selector sparf"),
        (config("exact").model_copy(update={"offload": object()}), "(offload)"),
        (config("exact").model_copy(update={"nodes": ["a:1"]}), "(nodes)"),
    ],
)
def test_what_happens_between_layers_is_named(options: SSDKVConfig, reason: str) -> None:
    assert reason in graphs.config_reason(options)
    assert graphs.piecewise_reason(options, layout(config()), ContextLayers((0, 1))) != ""


def test_what_the_model_has_is_named() -> None:
    options, both = config(), ContextLayers((0, 1))
    assert graphs.piecewise_reason(options, layout(options), both) == ""
    for layers, dtype, reason in (
        (ContextLayers((0, 1), plain=False), torch.bfloat16, "sinks"),
        (both, torch.float8_e4m3fn, "8 bits"),
        (ContextLayers((1,)), torch.bfloat16, "window alone"),
    ):
        assert reason in graphs.piecewise_reason(options, layout(options, dtype), layers)


def engine(frames: int, *, sleeps: bool = False) -> tuple[Any, Any]:
    """Configuration of vLLM and worker, with the attributes that the decision reads."""
    options = config()
    impl = SimpleNamespace(softmax=SimpleNamespace(is_plain=True, sinks=None))
    layer = SimpleNamespace(impl=impl, sliding_window=None)
    whole = SimpleNamespace(has_full_cudagraphs=lambda: True)
    vllm = SimpleNamespace(
        model_config=SimpleNamespace(enable_cumem_allocator=sleeps, max_model_len=640),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
        compilation_config=SimpleNamespace(
            static_forward_context={"a": layer, "b": layer}, cudagraph_mode=whole
        ),
    )
    made = {"config": options, "layout": layout(options), "least_frames": frames}
    return vllm, SimpleNamespace(**made, least_chosen=0)


def test_running_contexts_must_fit_into_dram() -> None:
    assert graphs.engine_reason(*engine(33)) == ""
    assert "32 blocks of contexts, and running requests can have 33" in graphs.engine_reason(
        *engine(32)
    )
    vllm, worker = engine(20)
    worker.least_chosen = 32
    assert "20 blocks of contexts, and the pages chosen from 32, and" in graphs.engine_reason(
        vllm, worker
    )
    worker.least_chosen = 33
    assert graphs.engine_reason(vllm, worker) == ""
    assert "--enable-sleep-mode" in graphs.engine_reason(*engine(33, sleeps=True))


def test_what_vllm_would_capture_all_the_same_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm, worker = engine(32)
    cache = torch.zeros((8, 64 * 2 * 2 * 64), dtype=torch.bfloat16)
    worker.page_mode = SimpleNamespace(flat=lambda cache: cache, layout=worker.layout)
    with pytest.raises(UnsupportedError, match=r"running requests can have 33.*PIECEWISE"):
        graphs.attach(vllm, worker, [cache])
    worker.least_frames = 33
    apart = torch.zeros((8, 2 * cache.shape[1]))[:, : cache.shape[1]]
    with pytest.raises(UnsupportedError, match="further apart"):
        graphs.attach(vllm, worker, [cache, apart])
    monkeypatch.setattr(torch.cuda, "Event", object)
    monkeypatch.setattr(
        "vllm_ssdkv.connector.worker.device_decode.DeviceDecode",
        lambda *_: torch.zeros(1 << 60),  # more than there is
    )
    with pytest.raises(UnsupportedError, match=r"no room on cpu for the tables of 3 rows of 11"):
        graphs.attach(vllm, worker, [cache])


def test_reasons_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert active_worker.worker() is None
    with caplog.at_level("INFO"):
        graphs.tell("it rains")
        graphs.tell("it rains")
    assert caplog.text.count("do not hold attention (mode PIECEWISE): it rains") == 1
