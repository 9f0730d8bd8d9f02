"""Every refusal, with a model or a setting of its kind: a way out that it names is one."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.connector.kinds import configuration, make
from tests.connector.simulation import drafts_like
from tests.kit.sources import parsed
from tests.test_messages import text_of
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.cli.explain.catalog import entry_for
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector import model_layout as layout
from vllm_ssdkv.connector.attention_backend import SSDKVCPUBackend
from vllm_ssdkv.connector.attention_impl import PagedAttentionImpl
from vllm_ssdkv.connector.compatibility import check_engine
from vllm_ssdkv.connector.obstacle import REUSE, WITHOUT_US

PACKAGE = Path(layout.__file__).parents[1]
PAGE: Mapping[str, object] = {"mode": "page", "hbm_window_tokens": 64}
TO_REUSE: Mapping[str, Any] = {"options": {"mode": "reuse"}}
GONE: Mapping[str, Any] = {"connector": False}


@dataclass(frozen=True)
class Case:
    """An engine that is refused.

    Attributes:
        kind: Of model.
        says: A part of the refusal.
        ways: All ways out that it names, each with what it changes: fields of this class.
        arguments: Of vLLM.
        options: Ours; page mode, if none are given.
        settings: Of the finished configuration, by ``part__name``: what cannot be given here.
        drafts: Method of speculative decoding, and how many.
        layer: What a layer of the model is built with, or the specs of its KV cache.
        connector: Whether the engine has ours.
        text: Of the model's own configuration.
        environment: Variables of the process.
    """

    kind: str
    says: str
    ways: dict[str, Mapping[str, Any]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=lambda: PAGE)
    settings: Mapping[str, object] = field(default_factory=dict)
    drafts: tuple[str, int] | None = None
    layer: Callable[[SSDKVConfig], None] | None = None
    connector: bool = True
    text: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def changed(self, way: str) -> Case:
        changes = dict(self.ways[way])
        for name in ("arguments", "settings"):
            if name in changes:
                changes[name] = {**getattr(self, name), **changes[name]}
        return replace(self, **changes)


def impl(**given: Any) -> Callable[[SSDKVConfig], None]:  # noqa: ANN401 - arguments of vLLM
    """A layer of page mode with these features; of another backend in reuse mode."""

    def build(config: SSDKVConfig) -> None:
        if config.mode == "page":
            layer: dict[str, Any] = {
                "num_heads": 4,
                "head_size": 32,
                "scale": 1.0,
                "num_kv_heads": 2,
            }
            PagedAttentionImpl(**{**layer, **given})

    return build


def cached(
    *specs: KVCacheSpec, together: bool = False, beside: Sequence[KVCacheSpec] = ()
) -> Callable[[SSDKVConfig], None]:
    """A KV cache of these layers: each a group, or all of them one; groups ``beside``."""

    def build(config: SSDKVConfig) -> None:
        layers = [
            SSDKVCPUBackend.customize_spec(spec)
            if config.mode == "page" and not isinstance(spec, MambaSpec)
            else spec
            for spec in specs
        ]
        if together:
            alike = {str(number): spec for number, spec in enumerate(layers)}
            layers = [UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=alike)]
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in (*layers, *beside)]
        layout.attention_spec(cast(Any, SimpleNamespace(kv_cache_groups=groups)))

    return build


def laid_out(spec: FullAttentionSpec) -> Callable[[SSDKVConfig], None]:
    """Slots for layers like this."""

    def build(config: SSDKVConfig) -> None:
        vllm_config, group = get_current_vllm_config(), SimpleNamespace(layer_names=["0"])
        group.kv_cache_spec = SSDKVCPUBackend.customize_spec(spec)
        layout.kv_layout(config, vllm_config, KVCacheConfig(8, [], cast(Any, [group])))

    return build


SHAPE: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)
CHUNKS = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
STATE = MambaSpec(block_size=32, shapes=((3, 4),), dtypes=(torch.float32,))


class Special(FullAttentionSpec):
    """Attention of a kind of its own."""


CPUS = 4
"""CPUs of the machine that engines start on."""
STATES_AT_ENDS = f"{REUSE} and start with --enable-prefix-caching"
REUSE_ALONE: dict[str, Mapping[str, Any]] = {REUSE: TO_REUSE}
NO_WAY: dict[str, Mapping[str, Any]] = {WITHOUT_US: GONE}

CASES = {
    "pipeline": Case(
        "llama",
        "--pipeline-parallel-size must be 1 in mode page",
        {
            "use --tensor-parallel-size": {
                "settings": {"parallel_config__pipeline_parallel_size": 1}
            },
            **REUSE_ALONE,
        },
        settings={"parallel_config__pipeline_parallel_size": 2},
    ),
    "pipeline-by-ray": Case(
        "llama",
        "the older of vLLM's two executors for Ray passes on what the last stage of a pipeline",
        {
            "unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND": {
                "environment": {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1"}
            },
            "use --distributed-executor-backend mp": {
                "settings": {"parallel_config__distributed_executor_backend": "mp"}
            },
        },
        options={},
        settings={
            "parallel_config__pipeline_parallel_size": 2,
            "parallel_config__distributed_executor_backend": "ray",
        },
        environment={"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"},
    ),
    "decode-context": Case(
        "llama",
        "--decode-context-parallel-size must be 1",
        {"leave it out": {"settings": {"parallel_config__decode_context_parallel_size": 1}}},
        settings={"parallel_config__decode_context_parallel_size": 2},
    ),
    "prefill-context": Case(
        "llama",
        "--prefill-context-parallel-size must be 1",
        {"leave it out": {"settings": {"parallel_config__prefill_context_parallel_size": 1}}},
        settings={"parallel_config__prefill_context_parallel_size": 2},
    ),
    "role": Case(
        "llama",
        "an engine in page mode reads what it stores",
        {
            'set kv_role to "kv_both"': {"settings": {"kv_transfer_config__kv_role": "kv_both"}},
            **REUSE_ALONE,
        },
        settings={"kv_transfer_config__kv_role": "kv_producer"},
    ),
    "hashes": Case(
        "llama",
        "--prefix-match-unit 4 is not the size of a block (32)",
        {"leave it out": {"settings": {"cache_config__prefix_match_unit": None}}},
        settings={"cache_config__prefix_match_unit": 4},
    ),
    "pages": Case(
        "llama",
        "--block-size 32 is not a multiple of page_tokens (64)",
        {"change one of them": {"arguments": {"block_size": 64}}},
        options={**PAGE, "page_tokens": 64},
    ),
    "window": Case(
        "llama",
        "hbm_window_tokens (64) is smaller than a block (128 tokens)",
        {
            "raise it": {"options": {**PAGE, "hbm_window_tokens": 128}},
            "lower --block-size": {"arguments": {"block_size": 64}},
        },
        arguments={"block_size": 128},
    ),
    "drafts": Case(
        "llama",
        "drafts by eagle are not served in page mode",
        {'use the method "ngram"': {"drafts": ("ngram", 3)}, REUSE: TO_REUSE},
        drafts=("eagle", 3),
    ),
    "drafts-choose": Case(
        "llama",
        "selector 'bounds' chooses for a token at a time",
        {
            "start without --speculative-config": {"drafts": None},
            'use selector "exact"': {"options": PAGE},
        },
        options={**PAGE, "selector": "bounds"},
        drafts=("ngram", 3),
    ),
    "drafts-window": Case(
        "llama",
        "hbm_window_tokens (32) is less than the tokens of a step with 40 drafts",
        {"raise it": {"options": {**PAGE, "hbm_window_tokens": 64}}},
        options={**PAGE, "hbm_window_tokens": 32},
        drafts=("ngram", 40),
    ),
    "drafts-ahead": Case(
        "llama",
        "page mode has to know how many drafts were right before the next step is planned",
        {
            "start with --no-async-scheduling": {
                "settings": {"scheduler_config__async_scheduling": False}
            },
            REUSE: TO_REUSE,
        },
        settings={"scheduler_config__async_scheduling": True},
        drafts=("ngram", 3),
    ),
    "hash-seeds": Case(
        "llama",
        "--prefix-caching-hash-algo xxhash has another seed in each process",
        {
            "use sha256": {"settings": {"cache_config__prefix_caching_hash_algo": "sha256"}},
            "set the environment variable PYTHONHASHSEED": {"environment": {"PYTHONHASHSEED": "1"}},
        },
        settings={"cache_config__prefix_caching_hash_algo": "xxhash"},
    ),
    "encoder-only": Case(
        "llama",
        "the model attends to all tokens of an input, and keeps no KV",
        NO_WAY,
        options={},
        settings={"model_config__attn_type": "encoder_only"},
    ),
    "latent": Case("deepseek", "the model uses MLA", REUSE_ALONE),
    "images": Case(
        "llama",
        "tokens of an image attend to those behind them",
        {
            "start with --language-model-only": {
                "settings": {"model_config__is_mm_prefix_lm": False}
            },
            REUSE: TO_REUSE,
        },
        settings={"model_config__is_mm_prefix_lm": True},
    ),
    "images-and-heads": Case(
        "gemma4",
        "layers with different heads, which page mode does not serve; nor does reuse mode, since",
        NO_WAY,
        settings={
            "model_config__is_mm_prefix_lm": True,
            "model_config__attn_type": "encoder_only",
        },
    ),
    "looping": Case("looping", "attends to a layer's KV several times in a step", REUSE_ALONE),
    "states": Case("qwen3-next", "the model has layers with a state", REUSE_ALONE),
    "states-uncached": Case(
        "qwen3-next",
        "the model has layers with a state",
        {
            STATES_AT_ENDS: {
                "options": {"mode": "reuse"},
                "arguments": {"enable_prefix_caching": True},
            }
        },
        arguments={"enable_prefix_caching": False},
    ),
    "states-drafts": Case(
        "qwen3-next",
        "the model has layers with a state",
        {
            f"{REUSE} and start without --speculative-config": {
                "options": {"mode": "reuse"},
                "drafts": None,
            }
        },
        drafts=("ngram", 3),
    ),
    "states-in-reuse": Case(
        "qwen3-next",
        "states are kept at the ends of blocks only for vLLM's own prefix caching",
        {
            "start with --enable-prefix-caching": {
                "arguments": {"enable_prefix_caching": True},
            }
        },
        arguments={"enable_prefix_caching": False},
        options={},
    ),
    "drafts-in-reuse": Case(
        "qwen3-next",
        "rejected drafts have changed the states",
        {"start without --speculative-config": {"drafts": None}},
        options={},
        drafts=("ngram", 3),
    ),
    "latent-states": Case(
        "qwen3-next",
        "latent attention (MLA) beside layers with a state",
        NO_WAY,
        options={},
        settings={"model_config__use_mla": True},
    ),
    "mamba": Case("mamba", "the model has layers with a state", NO_WAY),
    "mamba-in-reuse": Case("mamba", "the model has states (Mamba", NO_WAY, options={}),
    "encoder": Case(
        "whisper",
        "the model has an encoder beside its decoder, which page mode does not serve",
        NO_WAY,
    ),
    "encoder-in-reuse": Case(
        "whisper", "an encoder beside its decoder, whose KV belongs to one", NO_WAY, options={}
    ),
    "chunks": Case(
        "llama4",
        "layers that attend to chunks, which page mode does not serve",
        {
            f"{REUSE} and start with --disable-hybrid-kv-cache-manager": {
                "options": {"mode": "reuse"},
                "arguments": {"disable_hybrid_kv_cache_manager": True},
            }
        },
    ),
    "chunks-in-reuse": Case(
        "llama4",
        "the model has layers that attend to chunks",
        {
            "start with --disable-hybrid-kv-cache-manager": {
                "arguments": {"disable_hybrid_kv_cache_manager": True}
            }
        },
        options={},
    ),
    "heads": Case("gemma4", "layers with different heads", REUSE_ALONE),
    "soft-capping": Case(
        "gemma2",
        'selector "bounds" does not know soft-capped logits',
        {'set it to "exact" or "window"': {"options": {**PAGE, "selector": "window"}}}
        | REUSE_ALONE,
        options={**PAGE, "selector": "bounds"},
    ),
    "soft-capping-offload": Case(
        "gemma2",
        'offload.kind: "host" does not compute soft-capped logits',
        {"leave offload out": {"options": PAGE}},
        options={**PAGE, "offload": {"kind": "host"}},
    ),
    "alibi": Case(
        "llama",
        'selector "sparf" does not know ALiBi',
        {'set it to "exact" or "window"': {"options": PAGE}} | REUSE_ALONE,
        options={**PAGE, "selector": "sparf"},
        settings={"model_config__uses_alibi": True},
    ),
    "alibi-order": Case(
        "llama",
        'sparse.token_order "keys" forgets at which position of its block a token stands',
        {
            'set it to "position"': {
                "options": {**PAGE, "selector": "window", "sparse": {"token_order": "position"}}
            },
            'set selector to "exact"': {"options": PAGE},
        },
        options={**PAGE, "selector": "window"},
        settings={"model_config__uses_alibi": True},
    ),
    "shared": Case(
        "gemma2",
        "the model has layers that share KV, which page mode does not serve",
        REUSE_ALONE,
        text={"num_kv_shared_layers": 2},
    ),
    "large-heads": Case("large-heads", "heads have 520 channels, and page mode", REUSE_ALONE),
    "odd-heads": Case("odd-heads", "heads have 20 channels, and page mode", REUSE_ALONE),
    "kv-dtype": Case(
        "llama",
        "--kv-cache-dtype int8_per_token_head is not served in page mode",
        {"leave it out": {"settings": {"cache_config__cache_dtype": "auto"}}, REUSE: TO_REUSE},
        settings={"cache_config__cache_dtype": "int8_per_token_head"},
    ),
    "fp8": Case(
        "llama",
        'selector "codes" does not know KV in fp8',
        {
            'set it to "exact", "window" or "bounds"': {
                "options": {**PAGE, "selector": "bounds", "sparse": {"token_order": "position"}}
            }
        }
        | REUSE_ALONE,
        options={**PAGE, "selector": "codes"},
        settings={"cache_config__cache_dtype": "fp8"},
    ),
    "fp8-order": Case(
        "llama",
        'sparse.token_order "keys" does not know KV in fp8',
        {
            'set it to "position"': {
                "options": {**PAGE, "selector": "window", "sparse": {"token_order": "position"}}
            },
            'set selector to "exact"': {"options": PAGE},
        },
        options={**PAGE, "selector": "window"},
        settings={"cache_config__cache_dtype": "fp8_e5m2"},
    ),
    "fp8-offload": Case(
        "llama",
        'offload.kind: "host" does not compute KV in fp8',
        {"leave offload out": {"options": PAGE}},
        options={**PAGE, "offload": {"kind": "host"}},
        settings={"cache_config__cache_dtype": "fp8"},
    ),
    "dtype": Case(
        "llama",
        "--dtype torch.float64 is not served in page mode",
        {
            "use float32, float16 or bfloat16": {
                "settings": {"model_config__dtype": torch.bfloat16}
            },
            REUSE: TO_REUSE,
        },
        settings={"model_config__dtype": torch.float64},
    ),
    "micro-batches": Case(
        "llama",
        "steps are cut into micro-batches",
        {
            "leave out --enable-dbo and --ubatch-size": {
                "settings": {"parallel_config__enable_dbo": False}
            }
        },
        settings={"parallel_config__enable_dbo": True},
    ),
    "summaries-that-sleep": Case(
        "llama",
        "sparse.hbm_summaries: memory of the GPU loses its content while an engine sleeps",
        {
            "leave out --enable-sleep-mode and --enable-cumem-allocator": {
                "settings": {"model_config__enable_cumem_allocator": False}
            },
            "leave it out": {"options": {**PAGE, "selector": "bounds"}},
        },
        options={**PAGE, "selector": "bounds", "sparse": {"hbm_summaries": "1GiB"}},
        settings={"model_config__enable_cumem_allocator": True},
    ),
    "offload-threads": Case(
        "llama",
        f"offload.threads: {CPUS} threads of each of 2 workers are more than the machine's {CPUS}",
        {
            "lower it": {"options": {**PAGE, "offload": {"threads": CPUS // 2}}},
            "leave it out": {"options": {**PAGE, "offload": {}}},
        },
        options={**PAGE, "offload": {"threads": CPUS}},
        settings={"parallel_config__tensor_parallel_size": 2},
    ),
    "fpga-heads": Case(
        "llama",
        "offload.kind: the model's heads have 32 channels, and the FPGA kernels have 64, 128, 256",
        {
            'set it to "host"': {"options": {**PAGE, "offload": {"kind": "host"}}},
            "leave offload out": {"options": PAGE},
        },
        options={**PAGE, "offload": {"kind": "fpga"}},
    ),
    "layer-soft-cap": Case(
        "llama",
        'selector "codes" does not know soft-capped logits',
        {'set it to "exact" or "window"': {"options": PAGE}} | REUSE_ALONE,
        options={**PAGE, "selector": "codes"},
        layer=impl(logits_soft_cap=30.0),
    ),
    "layer-alibi": Case(
        "llama",
        'offload.kind: "host" does not compute ALiBi',
        {"leave offload out": {"options": PAGE}},
        options={**PAGE, "offload": {"kind": "host"}},
        layer=impl(alibi_slopes=[1.0]),
    ),
    "layer-shared": Case(
        "llama",
        "page mode does not compute KV shared between layers",
        REUSE_ALONE,
        layer=impl(kv_sharing_target_layer_name="other"),
    ),
    "layer-large-heads": Case(
        "llama", "heads have 520 channels", REUSE_ALONE, layer=impl(head_size=520)
    ),
    "layer-heads": Case(
        "llama",
        "the model's heads have 32 channels of K and 64 of V; page mode serves as many of each",
        REUSE_ALONE,
        layer=laid_out(replace(FULL, head_size_v=64)),
    ),
    "layer-encoder": Case(
        "llama",
        "does not compute encoder_only attention, nor does reuse mode",
        NO_WAY,
        layer=impl(attn_type=AttentionType.ENCODER_ONLY),
    ),
    "layer-kind": Case(
        "llama", "cannot serve a layer with Special", REUSE_ALONE, layer=cached(Special(**SHAPE))
    ),
    "layer-not-causal": Case(
        "llama",
        "a layer whose attention is not causal",
        NO_WAY,
        layer=cached(replace(FULL, non_causal=True)),
    ),
    "cache-not-causal": Case(
        "llama",
        "the model's attention is not causal",
        NO_WAY,
        options={},
        layer=cached(replace(FULL, non_causal=True)),
    ),
    "cache-of-heads": Case(
        "llama",
        "layers have KV of several sizes",
        REUSE_ALONE,
        layer=cached(
            FULL, replace(FULL, num_kv_heads=1, head_size=64, head_size_v=64), together=True
        ),
    ),
    "cache-of-sizes": Case(
        "llama",
        "layers have KV of several sizes",
        NO_WAY,
        options={},
        layer=cached(FULL, replace(FULL, num_kv_heads=4), together=True, beside=[WINDOW]),
    ),
    "groups": Case(
        "llama",
        "2 KV cache groups (ChunkedLocalAttentionSpec, SlidingWindowSpec)",
        {
            "start with --disable-hybrid-kv-cache-manager": {
                "layer": cached(FULL, FULL, together=True)
            }
        },
        options={},
        layer=cached(WINDOW, CHUNKS),
    ),
    "groups-of-sizes": Case(
        "llama",
        "2 KV cache groups (FullAttentionSpec, SlidingWindowSpec)",
        NO_WAY,
        options={},
        layer=cached(WINDOW, replace(FULL, head_size=64)),
    ),
    "groups-of-many-sizes": Case(
        "llama",
        "blocks of 1, 256 tokens, 257 of them for the same tokens; SSDKVConnector serves up to 255",
        NO_WAY,
        options={},
        layer=cached(
            replace(WINDOW, num_kv_heads=1, head_size=512, head_size_v=512, block_size=1),
            replace(FULL, num_kv_heads=1, head_size=2, head_size_v=2, block_size=256),
        ),
    ),
    "groups-of-a-kind": Case(
        "llama",
        "2 KV cache groups (SlidingWindowSpec, Special)",
        NO_WAY,
        options={},
        layer=cached(WINDOW, Special(**SHAPE)),
    ),
    "states-alone": Case(
        "llama",
        "only beside layers that attend to everything",
        NO_WAY,
        options={},
        layer=cached(STATE),
    ),
    "cache-of-another-kind": Case(
        "llama",
        "the model's KV cache is KVCacheSpec",
        NO_WAY,
        options={},
        layer=cached(KVCacheSpec(block_size=32)),
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory, made = tmp_path_factory.mktemp("kinds"), {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make(directory, kind)
        return cast(Path, made[kind])

    return get


def start(case: Case, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a start checks of such an engine.

    Raises:
        UnsupportedError: it is refused.
    """
    if not case.connector:
        return
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: CPUS)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    vllm_config = configuration(models(case.kind), **case.arguments)
    for name, value in case.text.items():
        setattr(vllm_config.model_config.hf_text_config, name, value)
    for path, value in case.settings.items():
        part, name = path.split("__")
        set_anyhow(getattr(vllm_config, part), name, value, monkeypatch)
    if case.drafts is not None:
        vllm_config.speculative_config = drafts_like(*case.drafts)
    config = SSDKVConfig.from_extra_config(case.options)
    assert vllm_config.kv_transfer_config is not None
    vllm_config.kv_transfer_config.kv_connector_extra_config = dict(case.options)
    check_engine(config, vllm_config)
    check_layer(case, config, vllm_config)


def set_anyhow(part: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a field, or a property of the class for the rest of the test."""
    try:
        setattr(part, name, value)
    except AttributeError:
        monkeypatch.setattr(type(part), name, value)


def check_layer(case: Case, config: SSDKVConfig, vllm_config: VllmConfig) -> None:
    if case.layer is not None:
        with set_current_vllm_config(vllm_config):
            case.layer(config)


def refusal(case: Case, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> str:
    with pytest.raises(UnsupportedError) as caught:
        start(case, models, monkeypatch)
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_each_way_out_that_a_refusal_names_is_one(
    name: str, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if not case.environment.keys() <= envs.environment_variables.keys() | os.environ.keys():
        pytest.skip("this vLLM has no such variable")
    text = refusal(case, models, monkeypatch)
    assert text.count(case.says) == 1, "the reason, once"
    assert entry_for(text), "the catalog has its cure"
    (line,) = text.splitlines()[-1:]
    assert len(text.splitlines()) <= 2, "one problem"
    assert line.rpartition(": ")[2].split(", or ") == list(case.ways)
    for way in case.ways:
        with monkeypatch.context() as here:
            start(case.changed(way), models, here)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_name_of_the_models_own_type_is_auto(
    dtype: str, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"cache_config__cache_dtype": dtype}
    layer = impl(kv_cache_dtype=dtype)
    case = Case("llama", "", {}, {"dtype": dtype}, settings=settings, layer=layer)
    start(case, models, monkeypatch)
    other = replace(case, arguments={"dtype": "float32"})
    assert f"--kv-cache-dtype {dtype} is not" in refusal(other, models, monkeypatch)
    alone = replace(other, settings={})
    assert f"does not compute --kv-cache-dtype {dtype}" in refusal(alone, models, monkeypatch)


def test_several_problems_are_told_at_once(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {**CASES["kv-dtype"].settings, **CASES["micro-batches"].settings}
    text = refusal(Case("llama", "", {}, settings=both), models, monkeypatch)
    assert len(text.splitlines()) == 3


def test_without_a_way_out_the_ways_out_of_others_are_not_named(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {**CASES["kv-dtype"].settings, **CASES["micro-batches"].settings}
    text = refusal(Case("mamba", "", {}, settings=both), models, monkeypatch)
    assert len(text.splitlines()) == 2
    assert text.endswith(WITHOUT_US)


def test_no_refusal_is_forgotten() -> None:
    """Each obstacle in the code is one of a case."""
    told = [case.says for case in CASES.values()]
    found = []
    for name in ("compatibility", "scheduler/speculation", "model_layout"):
        path = PACKAGE / "connector" / f"{name}.py"
        for node in ast.walk(parsed(path)):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id in {"Obstacle", "refusal_of_layer"} and node.args:
                found.append((f"{name}:{node.lineno}", text_of(node.args[0])))
    assert len(found) > 20
    for where, text in found:
        parts = [part for part in re.split("…", text) if len(part) > 8]
        assert not parts or any(part in says or says in part for part in parts for says in told), (
            where,
            text,
        )
