"""Slots and fingerprints of a model: what of the options changes them."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.kv_layout import KVLayout, joined_geometry, layer_offsets
from vllm_ssdkv.connector.model_layout import directory_name, fingerprint, kv_layout
from vllm_ssdkv.connector.startup import with_hits_to_verify
from vllm_ssdkv.connector.worker.block_comparison import element_type

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before vLLM 0.33
    from vllm.v1.core import kv_cache_utils as planning

ENGINE: Any = SimpleNamespace(
    parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    speculative_config=None,
    model_config=SimpleNamespace(
        model="m", revision=None, dtype=torch.float16, get_num_attention_heads=lambda _: 4
    ),
    cache_config=SimpleNamespace(cache_dtype="auto"),
)


def caches(block: int, dtype: torch.dtype) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=128, dtype=dtype)
    return KVCacheConfig(8, [], [KVCacheGroupSpec(["a", "b", "c"], spec)])


def config(selector: str = "sparf", **sparse: object) -> SSDKVConfig:
    return SSDKVConfig.from_extra_config({"mode": "page", "selector": selector, "sparse": sparse})


def layout(made: SSDKVConfig, block: int = 128, dtype: torch.dtype = torch.float16) -> KVLayout:
    return kv_layout(made, ENGINE, caches(block, dtype))


@pytest.mark.parametrize(
    ("selector", "dtype", "pages"),
    [
        # 128 tokens of 2 heads: 16 pages of KV a layer, half of that in the type of K.
        ("sparf", torch.float16, (1, 8, 0)),
        ("adaptive", torch.bfloat16, (4, 0, 2)),
        ("bounds", torch.float16, (3, 0, 0)),
        ("spread", torch.float16, (3, 0, 0)),
        ("codes", torch.float16, (4, 0, 2)),
        ("exact", torch.float16, (0, 0, 0)),
    ],
)
def test_slots_hold_channels_as_the_options_say(
    selector: str, dtype: torch.dtype, pages: tuple[int, int, int]
) -> None:
    shape = layout(config(selector), dtype=dtype).geometry
    assert (shape.summary_pages, shape.channel_pages, shape.scaled_from) == pages
    records = {"spread": "spread", "codes": "codes_2", "adaptive": "codes_2"}
    assert shape.record == records.get(selector, "bounds")


def test_a_store_of_one_kind_of_summaries_is_not_one_of_the_other() -> None:
    names = {}
    for selector in ("sparf", "bounds", "spread", "codes"):
        made = config(selector)
        found = fingerprint(made, ENGINE, layout(made), caches(128, torch.float16))
        names[selector] = found.fields.get("summaries")
    assert names == {
        "sparf": "channels",
        "bounds": None,
        "spread": "spread",
        "codes": "codes of 2 bits",
    }
    made = config("spread", estimate_rest=True)
    shape = layout(made)
    assert shape.geometry.record == "spread_with_values"
    found = fingerprint(made, ENGINE, shape, caches(128, torch.float16))
    assert found.fields["summaries"] == "spread, sums of V"


def draft(method: str, *, kv: bool) -> Any:  # noqa: ANN401 - of vLLM
    """vLLM's configuration of a drafter."""
    return SimpleNamespace(method=method, uses_draft_kv_cache=lambda: kv)


def test_a_drafters_layers_are_part_of_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    made, kept = config("bounds"), caches(128, torch.float16)
    drafters = [None, draft("eagle", kv=True), draft("draft_model", kv=True)]
    digests = []
    for drafter in [*drafters, draft("ngram", kv=False)]:
        monkeypatch.setattr(ENGINE, "speculative_config", drafter)
        digests.append(fingerprint(made, ENGINE, layout(made), kept).digest)
    assert len(set(digests)) == len(drafters)
    assert digests[-1] == digests[0], "n-grams have no KV of their own"


def test_naming_the_models_own_dtype_is_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    made, kept = config("bounds"), caches(128, torch.float16)
    digests = {}
    for name in ("auto", "float16", "fp8"):
        monkeypatch.setattr(ENGINE.cache_config, "cache_dtype", name)
        digests[name] = fingerprint(made, ENGINE, layout(made), kept).digest
    assert digests["auto"] == digests["float16"] != digests["fp8"]


def test_a_default_directory_is_named_by_what_the_weight_files_hold(tmp_path: Path) -> None:
    one, other, bare = tmp_path / "one", tmp_path / "other", tmp_path / "bare"
    for folder, weights in ((one, b"1" * 100), (other, b"2" * 100)):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
    bare.mkdir()
    moved, linked = tmp_path / "moved", tmp_path / "linked"
    shutil.copytree(one, moved)
    linked.symlink_to(one)
    names = [directory_name(str(path), None) for path in (one, moved, linked, other, bare)]
    assert names[0] == names[1] == names[2]
    assert len(set(names)) == 3
    assert directory_name("org/model", "v2") == "org/model@v2"


def mixed(windows: list[int | None], layers: list[int]) -> KVCacheConfig:
    """Groups of so many layers each, with full attention or a sliding window."""
    shape: Any = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
    groups = []
    for number, (window, count) in enumerate(zip(windows, layers, strict=True)):
        full = FullAttentionSpec(**shape)
        spec = full if window is None else SlidingWindowSpec(**shape, sliding_window=window)
        names = [f"{number}.{layer}" for layer in range(count)]
        groups.append(KVCacheGroupSpec(names, spec))
    return KVCacheConfig(8, [], groups)


def test_groups_lie_over_each_other() -> None:
    reuse = SSDKVConfig.from_extra_config({})
    found = kv_layout(reuse, ENGINE, mixed([64, 64, None], [2, 1, 3]))
    assert found.layer_names == ("2.0", "2.1", "2.2")
    assert found.overlaid == (("0.0", "0.1"), ("1.0",))
    assert found.chain_layers == found.layer_names
    assert found.geometry == kv_layout(reuse, ENGINE, mixed([None], [3])).geometry


@pytest.mark.parametrize("chain", [0, 1, 3])
def test_a_stage_of_a_pipeline_compares_its_own_layers_of_the_chain(chain: int) -> None:
    found = kv_layout(SSDKVConfig.from_extra_config({}), ENGINE, mixed([64, None], [2, chain]))
    assert found.chain_layers == tuple(f"1.{layer}" for layer in range(chain))
    assert len(found.layer_names) == max(2, chain)


def test_stages_without_kv_and_blocks_too_large_for_a_slot_are_refused() -> None:
    reuse = SSDKVConfig.from_extra_config({})
    for kept in (mixed([], []), mixed([64, None], [0, 0])):
        with pytest.raises(UnsupportedError, match=r"no layer with KV: .* VLLM_PP_LAYER_PARTITION"):
            kv_layout(reuse, ENGINE, kept)
    for encryption in ({}, {"encryption": {"key_file": "key"}}):
        made = SSDKVConfig.from_extra_config(encryption)
        with pytest.raises(UnsupportedError, match=r"slot of .* exceeds .* lower --block-size"):
            kv_layout(made, ENGINE, mixed([None], [2**31 // 4096]))


def test_groups_are_part_of_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE, "device_config", SimpleNamespace(device_type="cuda"), raising=False)
    monkeypatch.setattr(ENGINE, "attention_config", SimpleNamespace(backend=None), raising=False)
    reuse, digests = SSDKVConfig.from_extra_config({}), set()
    for windows, layers in (
        ([64, None], [2, 2]),
        ([None, 64], [2, 2]),
        ([32, None], [2, 2]),
        ([64, None], [1, 2]),
        ([None], [2]),
    ):
        kept = mixed(windows, layers)
        made = fingerprint(reuse, ENGINE, kv_layout(reuse, ENGINE, kept), kept)
        assert ("groups" in made.fields) is (len(windows) > 1)
        digests.add(made.digest)
    assert len(digests) == 5


def test_blocks_of_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of ours is the scheduler's. Where all are alike, stores stay what they were."""
    monkeypatch.setattr(ENGINE, "device_config", SimpleNamespace(device_type="cuda"), raising=False)
    monkeypatch.setattr(ENGINE, "attention_config", SimpleNamespace(backend=None), raising=False)
    reuse, texts = SSDKVConfig.from_extra_config({}), []
    for tokens, heads in (((16, 16), 2), ((32, 16), 1), ((16, 32), 2)):
        kept = mixed([64, None], [2, 2])
        for group, size in zip(kept.kv_cache_groups, tokens, strict=True):
            changed: Any = {"block_size": size, "num_kv_heads": heads * max(tokens) // size}
            group.kv_cache_spec = replace(group.kv_cache_spec, **changed)
        found = kv_layout(reuse, ENGINE, kept)
        assert (found.block_tokens, found.chain_tokens) == (max(tokens), tokens[1])
        made = fingerprint(reuse, ENGINE, found, kept)
        texts.append(str(made.fields["groups"]))
    assert "blocks of" not in texts[0]
    assert [re.findall(r"blocks of (\d+)", text) for text in texts[1:]] == [
        ["32", "16"],
        ["16", "32"],
    ]
    alike, kept = kv_layout(reuse, ENGINE, mixed([64, None], [2, 2])), mixed([64, None], [2, 2])
    digest = fingerprint(reuse, ENGINE, alike, kept).digest.hex()
    assert digest == "b98aa3bb890f4cd6e4e1b8deb3e2fdbf", (
        "as before there were blocks of several sizes"
    )


@pytest.mark.parametrize("windows", [[64, None], [None, 64]])
@pytest.mark.parametrize("full_is_fp8", [True, False])
def test_blocks_of_the_chain_are_compared_in_their_own_dtype(
    windows: list[int | None], full_is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps some layers in the model's dtype beside others in fp8, of twice the tokens."""
    monkeypatch.setattr(ENGINE.cache_config, "cache_dtype", "fp8")
    kept = mixed(windows, [2, 2])
    for group, window in zip(kept.kv_cache_groups, windows, strict=True):
        if (window is None) is full_is_fp8:
            fp8: Any = {"block_size": 32, "dtype": torch.uint8}
            group.kv_cache_spec = replace(group.kv_cache_spec, **fp8)
    found = kv_layout(SSDKVConfig.from_extra_config({}), ENGINE, kept)
    own, tokens = (torch.float8_e4m3fn, 32) if full_is_fp8 else (torch.float16, 16)
    assert (element_type(found), found.chain_tokens) == (own, tokens)


@pytest.mark.parametrize("block", [32, 512, 1024 + 512])
def test_blocks_of_too_many_channels_to_a_page_are_refused(block: int) -> None:
    """The smallest blocks with 4 of 128 channels to a page of 16 tokens are named, and serve."""
    text = (
        f"--block-size of at least 1024 tokens, of a number of pages that divides 256, not {block}"
    )
    with pytest.raises(UnsupportedError, match=text):
        layout(config(channel_pages="ssd"), block)
    layout(config("bounds", channel_pages="ssd"), block)
    layout(config(channel_pages="ssd"), 1024)


def hybrid(*layers: int, **state: object) -> KVCacheConfig:
    """A group of layers with full attention behind groups of layers with a state, so many each."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16)
    settings: Any = {"shapes": ((3, 4), (2, 8)), "dtypes": (torch.float16, torch.float32), **state}
    kept = MambaSpec(
        block_size=16,
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode="align",
        **settings,
    )
    groups = [
        KVCacheGroupSpec([f"{number}.{layer}" for layer in range(count)], kept)
        for number, count in enumerate(layers[:-1])
    ]
    groups.append(KVCacheGroupSpec([f"kv.{layer}" for layer in range(layers[-1])], full))
    return KVCacheConfig(8, [], groups)


def test_a_slot_holds_a_state_or_kv() -> None:
    reuse = SSDKVConfig.from_extra_config({})
    found = kv_layout(reuse, ENGINE, hybrid(3, 2, 2))
    assert found.has_states
    assert found.layer_names == ("0.0", "0.1", "0.2")
    assert found.overlaid == (("1.0", "1.1"), ("kv.0", "kv.1"))
    assert (found.block_tokens, found.kv_heads, found.dtype) == (16, 2, torch.float16)
    assert found.geometry == kv_layout(reuse, ENGINE, mixed([None], [3])).geometry
    assert not kv_layout(reuse, ENGINE, mixed([None, 64], [3, 3])).has_states


def test_states_are_part_of_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE, "device_config", SimpleNamespace(device_type="cuda"), raising=False)
    monkeypatch.setattr(ENGINE, "attention_config", SimpleNamespace(backend=None), raising=False)
    reuse, digests = SSDKVConfig.from_extra_config({}), set()
    made = [
        mixed([64, None], [2, 2]),
        hybrid(2, 2),
        hybrid(2, 2, shapes=((4, 3), (2, 8))),
        hybrid(2, 2, dtypes=(torch.float16, torch.float16)),
        hybrid(2, 2, mamba_type=MambaAttentionBackendEnum.GDN_ATTN),
    ]
    for kept in made:
        digests.add(fingerprint(reuse, ENGINE, kv_layout(reuse, ENGINE, kept), kept).digest)
    assert len(digests) == len(made)


LATENT, INDEXER = 64 * 576 * 2, 64 * 132
"""Bytes of a block of 64 tokens in a layer of DeepSeek V3.2: of the latent, and of its indexer."""


def indexed(name: str, order: str = "kv", layers: int = 61) -> KVCacheConfig:
    """What vLLM's workers get for layers of a latent and an indexer, in a layout of this name."""
    shape: Any = {"block_size": 64, "num_kv_heads": 1}
    of = {
        "k": MLAAttentionSpec(**shape, head_size=132, dtype=torch.uint8),
        "v": MLAAttentionSpec(**shape, head_size=576, dtype=torch.bfloat16),
    }
    specs: Any = {f"{layer}.{kind}": of[kind] for layer in range(layers) for kind in order}
    engine = VllmConfig()
    engine.cache_config.kv_cache_layout = name
    groups = planning.get_kv_cache_groups(engine, specs)
    return planning.get_kv_cache_config_from_groups(engine, groups, 1 << 26)


def test_layers_of_several_sizes_lie_back_to_back() -> None:
    """The scheduler, which has the spec of one layer, finds the same as a worker."""
    reuse, found = SSDKVConfig.from_extra_config({}), []
    for kept in map(indexed, ("LBHNC", "BLHNC")):
        found.append(kv_layout(reuse, ENGINE, kept))
        found.append(kv_layout(reuse, ENGINE, generate_scheduler_kv_cache_config([kept])))
    worker = found[0]
    assert worker.layer_bytes == (INDEXER, LATENT) * 61
    assert len({(one.layer_names, one.layer_bytes, one.geometry) for one in found}) == 1
    offsets, shape = layer_offsets(worker.geometry, worker.layer_bytes), worker.geometry
    assert offsets[:3] == [shape.header_bytes + done for done in (0, INDEXER, INDEXER + LATENT)]
    assert offsets[-1] + LATENT <= shape.slot_bytes < 1.02 * sum(worker.layer_bytes)
    assert element_type(worker) == torch.bfloat16
    assert all(with_hits_to_verify(reuse, one).verify_hits for one in found)


def test_the_order_of_layers_of_several_sizes_is_part_of_what_is_stored() -> None:
    reuse, texts = SSDKVConfig.from_extra_config({}), set()
    for order in ("kv", "vk"):
        kept = indexed("LBHNC", order, layers=3)
        for side in (kept, generate_scheduler_kv_cache_config([kept])):
            made = fingerprint(reuse, ENGINE, kv_layout(reuse, ENGINE, side), side)
            texts.add(made.fields["page_bytes"])
    assert len(texts) == 2
    assert all("3 layers of 8448" in str(text) for text in texts)


def test_stages_with_other_sizes_of_layers_store_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage has layers of one size, the second of two; the scheduler knows the first."""
    reuse, both = SSDKVConfig.from_extra_config({}), indexed("LBHNC", layers=3)
    (group,) = both.kv_cache_groups
    of_group: Any = group.kv_cache_spec
    every = of_group.kv_cache_specs
    stages = [{n: s for n, s in every.items() if (n == "0.v") is first} for first in (True, False)]
    engine, facts = VllmConfig(), {"original_max_model_len": 64, "max_model_len": 64}
    facts["supports_kv_cache_grouping"] = False
    monkeypatch.setattr(engine, "model_config", SimpleNamespace(**facts))
    engine.cache_config.kv_cache_layout = "LBHNC"
    planned = [engine, stages, [1 << 26] * 2]
    if hasattr(planning, "get_global_kv_cache_groups"):  # vLLM 0.33 makes the groups apart
        planned.append(planning.get_global_kv_cache_groups(engine, stages))
    sides = planning.get_kv_cache_configs(*planned)
    monkeypatch.setattr(ENGINE.parallel_config, "pipeline_parallel_size", 2)
    model = {
        "get_total_num_hidden_layers": lambda: 3,
        "get_num_kv_heads": lambda _: 1,
        "get_head_size": lambda: 576,
    }
    for name, value in model.items():
        monkeypatch.setattr(ENGINE.model_config, name, value, raising=False)
    layouts = [kv_layout(reuse, ENGINE, side) for side in sides]
    assert [one.layer_bytes for one in layouts] == [(), (INDEXER, INDEXER, LATENT, INDEXER, LATENT)]
    sides.append(generate_scheduler_kv_cache_config(sides))
    layouts.append(kv_layout(reuse, ENGINE, sides[-1]))
    made = [
        fingerprint(reuse, ENGINE, shape, side) for shape, side in zip(layouts, sides, strict=True)
    ]
    assert made[0].fields == made[1].fields == made[2].fields
    assert (made[0].fields["layers"], made[0].fields["head_size"]) == (3, 576)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,2")
    assert fingerprint(reuse, ENGINE, layouts[0], sides[0]) != made[0]


@pytest.mark.parametrize("sizes", [[100], [4096, 1], [73728, 8448] * 61, [1 << 20] * 9 + [5000]])
def test_a_slot_of_joined_layers_is_as_large_as_they_are(sizes: list[int]) -> None:
    for encrypted in (False, True):
        shape = replace(joined_geometry(sizes), encrypted=encrypted)
        unused = shape.slot_bytes - shape.header_bytes - sum(sizes)
        assert 0 <= unused < max(4096, sum(sizes) // 128)
        assert shape.header_bytes <= 8192


@pytest.mark.parametrize(
    ("options", "replicas", "shared"),
    [
        ({}, 4, True),
        ({}, 2, False),
        ({}, 1, False),
        ({"nodes": ["unix:///run/node.sock"]}, 4, False),
    ],
)
def test_ranks_with_identical_kv_store_it_once(
    options: dict[str, object], replicas: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a store of the engine's own. A store of a copy for each rank is another one."""
    monkeypatch.setattr(ENGINE.parallel_config, "tensor_parallel_size", 4)
    made, kept = SSDKVConfig.from_extra_config(options), mixed([None], [2])
    kept.kv_tp_replicas = replicas
    found = kv_layout(made, ENGINE, kept)
    assert (found.ranks, found.sharers) == ((1, 4) if shared else (4, 1))
    assert fingerprint(made, ENGINE, found, kept).fields["tp_size"] == found.ranks
