"""Refusals at start, each with a way out."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.connector.simulation import drafts_like, engine_config
from tests.e2e.models import make_llama
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.cli.explain.catalog import entry_for
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector import attention_impl, obstacle
from vllm_ssdkv.connector.attention_backend import _tiered
from vllm_ssdkv.connector.attention_impl import PagedAttentionImpl, _is_given
from vllm_ssdkv.connector.compatibility import check_engine
from vllm_ssdkv.connector.model_layout import attention_spec
from vllm_ssdkv.connector.obstacle import TIER
from vllm_ssdkv.connector.x_settings import why_x_does_not_pay, x_shape
from vllm_ssdkv.fpga_offload.description import HEAD_SIZES

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
PAGE = SSDKVConfig.from_extra_config({"mode": "page", "hbm_window_tokens": 64})


def refusal(config: VllmConfig, **changes: object) -> str:
    config = copy.deepcopy(config)
    for path, value in changes.items():
        part, name = path.split("__")
        setattr(getattr(config, part), name, value)
    with pytest.raises(UnsupportedError) as caught:
        check_engine(PAGE, config)
    return str(caught.value)


def test_engines_that_only_store_or_cut_steps(configs: dict[str, VllmConfig]) -> None:
    check_engine(PAGE, configs["page"])
    assert "kv_both" in refusal(configs["page"], kv_transfer_config__kv_role="kv_producer")
    config = copy.deepcopy(configs["reuse"])
    for role in "kv_producer", "kv_consumer":
        config.kv_transfer_config.kv_role = role
        check_engine(SSDKVConfig(), config)
    assert "--enable-dbo" in refusal(configs["page"], parallel_config__enable_dbo=True)


@pytest.mark.parametrize(("way", "given"), [("nodes", ("unix:///node",)), ("tier", "one")])
def test_pipelines_have_a_store_of_their_own(
    configs: dict[str, VllmConfig], way: str, given: object
) -> None:
    config = copy.deepcopy(configs["reuse"])
    config.parallel_config.pipeline_parallel_size = 2
    check_engine(SSDKVConfig(), config)
    with pytest.raises(UnsupportedError, match=f"with the option {way}: .* or leave {way} out"):
        check_engine(SSDKVConfig().model_copy(update={way: given}), config)


def test_hashes_of_parts_of_blocks(configs: dict[str, VllmConfig]) -> None:
    """Keys are hashes of blocks, by their numbers."""
    text = refusal(configs["page"], cache_config__prefix_match_unit=4)
    assert "--prefix-match-unit 4 is not the size of a block (16)" in text


@pytest.mark.parametrize(
    ("method", "drafts", "options", "wanted"),
    [
        ("eagle", 3, {}, 'drafts by eagle are not served in page mode: use the method "ngram"'),
        ("ngram_gpu", 3, {}, "drafts by ngram_gpu are not served"),
        ("ngram", 3, {"selector": "bounds"}, "selector 'bounds' chooses for a token at a time"),
        ("ngram", 16, {"hbm_window_tokens": 16}, "with 16 drafts: raise it"),
    ],
)
def test_drafts_that_page_mode_does_not_serve(
    configs: dict[str, VllmConfig],
    method: str,
    drafts: int,
    options: dict[str, object],
    wanted: str,
) -> None:
    config = copy.deepcopy(configs["page"])
    config.speculative_config = drafts_like("ngram")
    check_engine(PAGE, config)
    config.speculative_config = drafts_like(method, drafts)
    page = SSDKVConfig.from_extra_config({"mode": "page", **options})
    with pytest.raises(UnsupportedError) as caught:
        check_engine(page, config)
    assert wanted in str(caught.value)
    check_engine(SSDKVConfig.from_extra_config({}), config)


def test_summaries_in_memory_that_sleep_takes(configs: dict[str, VllmConfig]) -> None:
    config = copy.deepcopy(configs["page"])
    config.model_config.enable_cumem_allocator = True
    options = {"mode": "page", "selector": "bounds", "hbm_window_tokens": 64}
    check_engine(SSDKVConfig.from_extra_config(options), config)
    held = {**options, "sparse": {"hbm_summaries": "1GiB"}}
    with pytest.raises(UnsupportedError, match=r"hbm_summaries: memory .* --enable-sleep-mode"):
        check_engine(SSDKVConfig.from_extra_config(held), config)
    config.model_config.enable_cumem_allocator = False
    check_engine(SSDKVConfig.from_extra_config(held), config)


WITH_X = {"mode": "page", "hbm_window_tokens": 64, "offload": {"x_share": 0.5}}


@pytest.fixture(scope="module")
def mha(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """An engine whose model has a KV head for each query head."""
    model = make_llama(tmp_path_factory.mktemp("mha") / "llama", layers=1, heads=4, kv_heads=4)
    config = engine_config(model, "page")
    config.model_config.enforce_eager = True
    return config


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("parallel_config.tensor_parallel_size", 2, "use --tensor-parallel-size 1, or set offload"),
        ("model_config.enforce_eager", False, "start with --enforce-eager, or set offload.x_share"),
        ("lora_config", SimpleNamespace(), "leave --enable-lora out, or set offload.x_share to 0"),
        ("speculative_config", drafts_like("ngram"), "start without --speculative-config, or set"),
    ],
)
def test_engines_whose_contexts_cannot_be_x(
    mha: VllmConfig, path: str, value: object, wanted: str
) -> None:
    config, with_x = copy.deepcopy(mha), SSDKVConfig.from_extra_config(WITH_X)
    check_engine(with_x, config)
    *parts, name = path.split(".")
    target: Any = config
    for part in parts:
        target = getattr(target, part)
    setattr(target, name, value)
    with pytest.raises(UnsupportedError) as caught:
        check_engine(with_x, config)
    assert wanted in str(caught.value)
    assert entry_for(str(caught.value)), "the catalog has its cure"
    without = {**WITH_X, "offload": {}}
    check_engine(SSDKVConfig.from_extra_config(without), config)


def test_selectors_beside_x_are_refused(mha: VllmConfig) -> None:
    with_x = SSDKVConfig.from_extra_config({**WITH_X, "selector": "bounds"})
    with pytest.raises(UnsupportedError, match=r'use selector "exact", or set offload\.x_share'):
        check_engine(with_x, mha)


def test_models_whose_x_saves_nothing_start_without(
    configs: dict[str, VllmConfig], mha: VllmConfig
) -> None:
    with_x = SSDKVConfig.from_extra_config(WITH_X)
    check_engine(with_x, configs["page"])
    assert x_shape(with_x, configs["page"]) is None
    assert "has 256 numbers in a layer, its K and V 256" in why_x_does_not_pay(configs["page"])
    assert x_shape(with_x, mha) is not None


def test_models_that_an_fpga_does_not_serve(configs: dict[str, VllmConfig]) -> None:
    config = copy.deepcopy(configs["page"])
    offload = {"kind": "fpga"}
    page = SSDKVConfig.from_extra_config({"mode": "page", "offload": offload})
    config.model_config.dtype = torch.float32
    size = config.model_config.get_head_size()
    with pytest.raises(UnsupportedError) as caught:
        check_engine(page, config)
    text = str(caught.value)
    assert (f"offload.kind: the model's heads have {size} channels" in text) == (
        size not in HEAD_SIZES
    )
    if size in HEAD_SIZES:
        assert "computes in float32, the FPGA kernels in float16 and bfloat16" in text
    assert 'set it to "host", or leave offload out' in text
    host = SSDKVConfig.from_extra_config({"mode": "page", "offload": {}})
    check_engine(host, config)


def groups(spec: object) -> Any:  # noqa: ANN401 - a KVCacheConfig
    return cast(Any, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]))


def test_layers_that_are_not_alike() -> None:
    same = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": SPEC, "b": SPEC})
    assert attention_spec(groups(same)) == SPEC
    wide = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"a": SPEC, "b": replace(SPEC, num_kv_heads=4)}
    )
    assert attention_spec(groups(wide)) == SPEC, "the only group"
    with pytest.raises(UnsupportedError, match="several sizes"):
        attention_spec(several(wide, SPEC))


def several(*specs: object) -> Any:  # noqa: ANN401 - a KVCacheConfig
    return cast(
        Any, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s in specs])
    )


def test_groups_whose_blocks_are_not_alike() -> None:
    shape: Any = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    window = SlidingWindowSpec(**shape, sliding_window=64)
    assert attention_spec(several(window, SPEC, window)) == window

    class Special(FullAttentionSpec):
        pass

    flag = "start with --disable-hybrid-kv-cache-manager"
    for other, way in (
        (replace(SPEC, block_size=32), flag),
        (replace(SPEC, head_size=16), "leave --kv-transfer-config out"),
        (Special(**shape), "leave --kv-transfer-config out"),
    ):
        with pytest.raises(UnsupportedError, match=f": {way}$") as caught:
            attention_spec(several(window, other))
        assert "2 KV cache groups" in str(caught.value)
        assert entry_for(str(caught.value)), "the catalog has its cure"
    with pytest.raises(UnsupportedError, match="is SimpleNamespace") as caught:
        attention_spec(several(SPEC, SimpleNamespace()))
    assert entry_for(str(caught.value)), "the catalog has its cure"


def test_layers_with_a_state() -> None:
    size = SPEC.page_size_bytes
    state = MambaSpec(
        block_size=SPEC.block_size,
        shapes=((3, 4),),
        dtypes=(torch.float32,),
        page_size_padded=size,
        mamba_cache_mode="align",
    )
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=64
    )
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    assert attention_spec(several(state, SPEC)) == SPEC
    assert attention_spec(several(state, window, SPEC, state)) == window
    for specs, wanted in (
        ([state], "only beside layers that attend to everything"),
        ([state, window], "only beside layers that attend to everything"),
        ([replace(state, mamba_cache_mode="none"), SPEC], "--enable-prefix-caching"),
        ([replace(state, num_speculative_blocks=3), SPEC], "without --speculative-config"),
        ([replace(state, page_size_padded=2 * size), SPEC], "2 KV cache groups"),
        ([state, latent], "2 KV cache groups (MLAAttentionSpec, MambaSpec)"),
        ([replace(state, block_size=64), SPEC], "2 KV cache groups"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            attention_spec(several(*specs))
        assert wanted in str(caught.value)
        assert entry_for(str(caught.value)), "the catalog has its cure"


def test_attention_that_is_not_causal() -> None:
    with pytest.raises(UnsupportedError, match="not causal"):
        attention_spec(groups(replace(SPEC, non_causal=True)))


def test_specs_that_are_derived_from_full_attention() -> None:
    class Special(FullAttentionSpec):
        pass

    assert _tiered(SPEC, PAGE).block_size == 16
    with pytest.raises(UnsupportedError, match="Special"):
        _tiered(Special(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32), PAGE)


def test_attention_that_is_not_causal_in_page_mode() -> None:
    with pytest.raises(UnsupportedError, match="not causal"):
        _tiered(replace(SPEC, non_causal=True), PAGE)


def test_layers_of_equal_bytes_that_are_not_alike() -> None:
    """Page mode looks into blocks."""
    specs = [SPEC, replace(SPEC, num_kv_heads=1, head_size=16, head_size_v=16)]
    assert specs[0].page_size_bytes == specs[1].page_size_bytes
    both = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs=dict(zip("ab", specs, strict=True))
    )
    assert attention_spec(groups(both)) == SPEC
    tiered = {name: _tiered(spec, PAGE) for name, spec in both.kv_cache_specs.items()}
    with pytest.raises(UnsupportedError, match="several sizes"):
        attention_spec(groups(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=tiered)))


def test_a_sliding_window_larger_than_that_in_hbm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_impl, "page_config", lambda: PAGE)
    PagedAttentionImpl(4, 8, 1.0, 2, sliding_window=64)
    with pytest.raises(UnsupportedError, match=r"of 65 tokens, .* is 64: set it to 80 or more"):
        PagedAttentionImpl(4, 8, 1.0, 2, sliding_window=65)


def test_models_whose_attention_page_mode_does_not_compute(
    configs: dict[str, VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refusal(configs["page"], model_config__is_mm_prefix_lm=True)
    assert '--language-model-only, or use mode "reuse"' in text
    model = type(configs["page"].model_config)
    monkeypatch.setattr(model, "architectures", ["IQuestLoopCoderForCausalLM"])
    assert "IQuestLoopCoderForCausalLM attends to a layer's KV several" in refusal(configs["page"])


def test_a_tensor_is_a_feature_whatever_it_holds() -> None:
    assert _is_given(torch.zeros(4))
    assert not _is_given(None)
    assert not _is_given("")


def test_vllms_own_offloading_is_a_way_out_where_there_is_any(
    configs: dict[str, VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = {"parallel_config__pipeline_parallel_size": 2}
    assert TIER not in refusal(configs["page"], **pipeline)  # vLLM's CPU build has none
    monkeypatch.setattr(obstacle, "vllm_offloads", lambda: True)
    assert f'use mode "reuse", or {TIER}' in refusal(configs["page"], **pipeline)
    groups: Any = [
        SimpleNamespace(kv_cache_spec=spec) for spec in (SPEC, replace(SPEC, block_size=32))
    ]
    with pytest.raises(UnsupportedError, match=re.escape(TIER)):
        attention_spec(SimpleNamespace(kv_cache_groups=groups))
