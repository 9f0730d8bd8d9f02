"""Bytes of KV: what a ``config.json`` says, against what vLLM's layers keep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.connector.kinds import configuration
from tests.profiling.simulation.families import FAMILIES, caches_of, layers_of, make, one_rank
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.model_layout import kv_layout
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, find_model, stored_bytes


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of configurations, while this process is a rank that may have experts."""
    path = tmp_path_factory.mktemp("families")
    with one_rank(path, configuration(make(path, "qwen3-moe"))):
        yield path


def per_token(spec: KVCacheSpec) -> float:
    """Bytes of one token, without padding of blocks to those of other layers."""
    return spec.real_page_size_bytes / spec.block_size if isinstance(spec, AttentionSpec) else 0


def state(spec: KVCacheSpec) -> int:
    """Bytes of a state, without padding."""
    if not isinstance(spec, MambaSpec):
        return 0
    bare = MambaSpec(block_size=spec.block_size, shapes=spec.shapes, dtypes=spec.dtypes)
    return int(bare.page_size_bytes)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_vllms_layers(directory: Path, family: str) -> None:
    path = make(directory, family)
    vllm_config = configuration(path, dtype="bfloat16")
    layers = layers_of(vllm_config)
    config = {**json.loads((path / "config.json").read_text()), "dtype": "bfloat16"}
    shape = ModelShape.of(config, name=family)
    kept = list(layers.values())
    assert shape.kv_bytes_per_token() == sum(map(per_token, kept))
    assert shape.state_bytes() == sum(map(state, kept))
    assert shape.attention_layers() == sum(isinstance(spec, AttentionSpec) for spec in kept)
    bound = vllm_config.model_config.model_arch_config.derived_max_model_len_and_key
    if shape.positions is not None:
        assert shape.positions.tokens == bound[0]
    windows = {layer.window for layer in shape.layers if layer.kind == "sliding"}
    assert windows == {s.sliding_window for s in kept if isinstance(s, SlidingWindowSpec)}


@pytest.mark.parametrize("family", ["llama", "falcon", "deepseek", "qwen3-moe"])
def test_a_slot_holds_the_bytes_of_its_block(directory: Path, family: str) -> None:
    """The engine's own layout, of models whose layers are alike."""
    path = make(directory, family)
    config = configuration(path)
    found = caches_of(config, layers_of(config))
    layout = kv_layout(SSDKVConfig.from_extra_config({}), config, found)
    shape = ModelShape.read(path / "config.json")
    geometry = layout.geometry
    # vLLM was told float32.
    assert geometry.layers * geometry.payload_bytes == (
        layout.block_tokens * shape.kv_bytes_per_token("float32")
    )


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
        ("gemma3", {"full_attention": {"rope_type": "linear", "factor": 8.0}}),
    ],
)
def test_a_model_is_as_long_as_vllm_takes_it(
    directory: Path, tmp_path: Path, family: str, rope: dict[str, Any]
) -> None:
    config = json.loads((make(directory, family) / "config.json").read_text())
    own = {"rope_theta": 10_000.0}
    if family == "gemma3":
        given = {kind: {**own, "rope_type": "default"} for kind in set(config["layer_types"])}
        config["rope_parameters"] = {**given, **{kind: {**own, **of} for kind, of in rope.items()}}
    else:
        config["rope_parameters"] = {**own, **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.read(tmp_path / "config.json")
    assert shape.positions is not None
    found = configuration(tmp_path, max_model_len=None).model_config.max_model_len
    assert shape.positions.tokens == found


def test_kv_of_eight_bits(directory: Path) -> None:
    path = make(directory, "llama")
    config = configuration(path, dtype="bfloat16", kv_cache_dtype="fp8")
    shape = ModelShape.read(path / "config.json")
    kept = layers_of(config).values()
    assert sum(map(per_token, kept)) == shape.kv_bytes_per_token("fp8")
    assert shape.kv_bytes_per_token("fp8") == shape.kv_bytes_per_token("bfloat16") / 2


def test_latent_layers_keep_one_vector_for_all_heads(directory: Path) -> None:
    path = make(directory, "deepseek-v3")
    kept = layers_of(configuration(path))
    assert {type(spec) for spec in kept.values()} == {MLAAttentionSpec}
    shape = ModelShape.read(path / "config.json")
    assert shape.kv_bytes_per_token("bfloat16") == 4 * (512 + 64) * 2
    assert FullAttentionSpec not in map(type, kept.values())


@pytest.mark.parametrize(
    ("name", "per_token_bytes", "billions"),
    [
        ("opt-13b", 819_200, 12.9),
        ("opt-30b", 1_376_256, 30.0),
        ("gpt-3", 4_718_592, 175),
        ("llama-3.1-8b", 128 * 1024, 8.03),
        ("llama-3.1-70b", 320 * 1024, 70.6),
        ("qwen2.5-32b", 256 * 1024, 32.8),
        ("mixtral-8x7b", 128 * 1024, 46.7),
        # Counts that the authors publish, of text: Gemma 3 and Llama 4 have vision beside it.
        ("qwen3-32b", 256 * 1024, 32.8),
        ("qwen3-30b-a3b", 96 * 1024, 30.5),
        ("qwen3-235b-a22b", 188 * 1024, 235),
        ("gpt-oss-20b", 48 * 1024, 20.9),
        ("gpt-oss-120b", 72 * 1024, 116.8),
        ("llama-4-scout", 192 * 1024, 108),
        ("deepseek-v3", 61 * 576 * 2, 671),
        ("gemma-3-27b", 62 * 8192, 27.0),
        ("gemma-4-31b", 50 * 16_384 + 10 * 8192, 30.7),
        ("gemma-4-26b-a4b", 25 * 8192 + 5 * 4096, 25.2),
        ("glm-4.5", 368 * 1024, 354),
        ("glm-4.5-air", 184 * 1024, 106.4),
    ],
)
def test_known_models(name: str, per_token_bytes: int, billions: float) -> None:
    model = find_model(name)
    assert model.kv_bytes_per_token() == per_token_bytes
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert model.active <= model.parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-oss-20b", 3.6),
        ("gpt-oss-120b", 5.1),
        ("deepseek-v3", 36.6),
        ("gemma-4-26b-a4b", 3.8),
        ("glm-4.5", 32),
    ],
)
def test_active_parameters_are_those_that_authors_publish(name: str, billions: float) -> None:
    """The embedding does not count: a token takes a row of it."""
    model = find_model(name)
    active = model.active - model.weights.ends + model.weights.head
    assert active / 1e9 == pytest.approx(billions, rel=0.025)


@pytest.mark.parametrize(
    ("quantization", "of_layers"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            4.5,
        ),
    ],
)
def test_bytes_of_quantised_weights(quantization: dict[str, Any], of_layers: float) -> None:
    shape = ModelShape.of({**GOOD, "quantization_config": quantization}, name="small")
    layers = 2 * (64 * 16 * 2 * (4 + 4) + 3 * 64 * 256)
    assert shape.weight_bytes() == round(layers * of_layers / 8) + 2 * 2 * 512 * 64
    assert shape.weights.layer_bytes == layers * of_layers / 8


def test_experts_in_four_bits_are_most_of_gpt_oss() -> None:
    """The authors publish checkpoints of 60.8 and 12.8 GiB."""
    for name, gib in (("gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)):
        assert find_model(name).weight_bytes() / 2**30 == pytest.approx(gib, rel=0.005)


def test_bytes_of_files_go_before_what_is_reckoned(tmp_path: Path) -> None:
    assert stored_bytes(tmp_path) is None
    (tmp_path / "a.safetensors").write_bytes(bytes(300))
    assert stored_bytes(tmp_path) == 300
    shape = ModelShape.of(GOOD, name="given", stored=1_000_000)
    assert shape.weight_bytes() == 1_000_000
    with pytest.raises(ConfigError, match=r"weights: got 10 bytes; embeddings alone have 131,072"):
        ModelShape.of(GOOD, name="given", stored=10)


def test_layers_that_no_field_names_follow_their_family() -> None:
    """As transformers fills them in: configurations of Gemma 3 and Llama 4 have no layer_types."""
    gemma = [layer.kind for layer in find_model("gemma-3-27b").layers]
    assert gemma[:7] == [*["sliding"] * 5, "full", "sliding"]
    llama = [layer.kind for layer in find_model("llama-4-scout").layers]
    assert llama[:5] == [*["chunked"] * 3, "full", "chunked"]
    named = {**GOOD, "model_type": "llama4_text", "attention_chunk_size": 8}
    named |= {"no_rope_layers": [0, 1], "intermediate_size_mlp": 64}
    assert [one.kind for one in ModelShape.of(named, name="m").layers] == ["full", "chunked"]


def test_windows_bound_what_is_read() -> None:
    config = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size": 512,
        "dtype": "bfloat16",
    }
    shape = ModelShape.of(config, name="windows")
    one = 2 * 4 * 16 * 2
    assert shape.kv_bytes_per_token() == 2 * one
    assert shape.kv_bytes(60) == 60 * 2 * one
    assert shape.kv_bytes(1000) == (100 + 1000) * one
    assert shape.x_bytes_per_token() == 2 * 64 * 2


GOOD: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 0}, "hidden_size: got 0; a whole number above 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers: got '4'"),
        ({"num_attention_heads": True}, "num_attention_heads: got True"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"dtype": "int3"}, "dtype: got 'int3'; one of float32"),
        ({"layer_types": ["full_attention"]}, "layer_types: got ['full_attention']; a list with 2"),
        ({"layer_types": ["odd", "odd"]}, "layer_types: got 'odd'; one of full_attention"),
        ({"layer_types": ["linear_attention"] * 2}, "states of its layers are not described"),
        ({"mamba_d_state": 4}, "mamba_d_state: layers with a state, and no layer_types"),
        ({"model_type": "odd"}, "model_type: got 'odd', which is not understood; one of "),
        ({"num_attention_heads": None}, "num_attention_heads: missing"),
        ({"quantization_config": {"quant_method": "odd"}}, "bytes of weights are known for awq, "),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: got {'quant_m"),
        ({"index_topk": 64}, "index_topk: caches of indexers are not described"),
    ],
)
def test_wrong_configurations_name_file_and_field(change: dict[str, Any], text: str) -> None:
    ModelShape.of(GOOD, name="good")
    with pytest.raises(ConfigError) as caught:
        ModelShape.of({**GOOD, **change}, name="bad", where="a/config.json")
    assert str(caught.value).startswith("a/config.json: ")
    assert text in str(caught.value)


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="cannot read"):
        ModelShape.read(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        ModelShape.read(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="got list; give an object"):
        ModelShape.read(path)
    with pytest.raises(ConfigError, match="MODEL: 'gpt-9' is no directory"):
        find_model("gpt-9")
    with pytest.raises(ConfigError, match="dtype 'int3' is not known"):
        find_model("gpt-3").kv_bytes_per_token("int3")
