"""Identity of chunks: an engine finds those of its weights and images, and none before a reset."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import LoRAConfig, ModelConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.config import OffloadingParallelConfig

from tests.e2e.models import make_llama
from tests.secondary_tier.rig import (
    BLOCK_TOKENS,
    Engine,
    engine_settings,
    key_of,
    request_of,
    running,
)
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.config.secondary_tier import tier_options
from vllm_ssdkv.secondary_tier.identity import weights_digest

Devices = Callable[[int], list[Path]]

KEYS = [key_of(number) for number in range(6)]
ALL = set(range(6))


def fill(engine: Engine, keys: list[OffloadKey] = KEYS) -> None:
    context = engine.begin()
    engine.store(keys, context)
    engine.settle()
    engine.end(context)


def test_other_weights_find_nothing(tmp_path: Path, tmp_devices: Devices) -> None:
    devices = tmp_devices(1)
    model = make_llama(tmp_path / "llama", layers=1, seed=1)
    settings = engine_settings(model)
    with running(settings, devices) as engine:
        fill(engine)
    file = model / "model.safetensors"
    old = file.read_bytes()
    file.write_bytes(old[:-4] + bytes([old[-4] ^ 1]) + old[-3:])
    with running(settings, devices, weights=1) as engine:
        assert engine.stored(KEYS) == set()
        fill(engine)
        assert engine.stored(KEYS) == ALL
    file.write_bytes(old)
    with running(settings, devices) as engine:
        context = engine.begin()
        assert engine.looked_up(KEYS, context) == KEYS


def test_a_name_stands_for_the_weights(settings: VllmConfig, tmp_devices: Devices) -> None:
    devices = tmp_devices(1)
    with running(settings, devices, weights_id="first") as engine:
        fill(engine)
    with running(settings, devices, weights_id="second") as engine:
        assert engine.stored(KEYS) == set()
    with running(settings, devices) as engine:
        assert engine.stored(KEYS) == set()
    with running(settings, devices, weights_id="first") as engine:
        assert engine.stored(KEYS) == ALL


def with_load_format(settings: VllmConfig, name: str) -> VllmConfig:
    changed = copy(settings)
    changed.load_config = copy(settings.load_config)
    changed.load_config.load_format = name
    return changed


def test_weights_that_no_file_tells_of_need_a_name(
    settings: VllmConfig, tmp_devices: Devices
) -> None:
    devices, dummy = tmp_devices(1), with_load_format(settings, "dummy")
    with pytest.raises(UnsupportedError, match=r"--load-format dummy.*weights_id"):
        Engine(dummy, devices)
    gone = copy(settings)
    gone.model_config = copy(settings.model_config)
    gone.model_config.model = str(devices[0])
    with pytest.raises(UnsupportedError, match=r"no weight files of .*weights_id"):
        Engine(gone, devices)
    with running(dummy, devices, weights_id="seed 0") as engine:
        fill(engine)
        assert engine.stored(KEYS) == ALL


def with_model(settings: VllmConfig, **fields: Any) -> VllmConfig:  # noqa: ANN401 - of any field
    changed = copy(settings)
    changed.model_config = copy(settings.model_config)
    for name, value in fields.items():
        setattr(changed.model_config, name, value)
    return changed


def test_settings_that_only_the_model_in_memory_would_show(
    settings: VllmConfig, tmp_path: Path, tmp_devices: Devices
) -> None:
    """LongRoPE has other keys, and remote code computes whatever it wants."""
    arch = copy(settings.model_config.model_arch_config)
    arch.architectures = ["MistralForCausalLM"]
    model = tmp_path / "copy"
    shutil.copytree(settings.model_config.model, model)
    (model / "modeling.py").write_text("SCALE = 2")
    devices = tmp_devices(1)
    with running(settings, devices) as engine:
        fill(engine)
    for changed in (
        {"max_model_len": 128},
        {"original_max_model_len": -1},
        {"dtype": torch.bfloat16},
        {"model_arch_config": arch},
        {"model_impl": "transformers"},
        {"model": str(model), "trust_remote_code": True},
    ):
        with running(with_model(settings, **changed), devices) as engine:
            assert engine.stored(KEYS) == set(), changed
    # What fits the GPU is found out after the model was made.
    auto = with_model(settings, original_max_model_len=-1)
    with running(auto, devices) as engine:
        fill(engine)
    with running(with_model(auto, max_model_len=128), devices) as engine:
        assert engine.stored(KEYS) == ALL
    # Code that nobody trusts does not run, and the files are the same.
    with running(with_model(settings, model=str(model)), devices) as engine:
        assert engine.stored(KEYS) == ALL


def test_weights_from_another_hub_need_a_name(
    settings: VllmConfig, tmp_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tmp_devices(1)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    with pytest.raises(UnsupportedError, match=r"VLLM_USE_MODELSCOPE.*weights_id"):
        weights_digest(tier_options({})[0], with_model(settings, model="nobody/model"))
    with running(settings, devices) as engine:  # a directory is what it is
        fill(engine)
        assert engine.stored(KEYS) == ALL


def test_an_engine_whose_requests_need_all_their_tokens_stores_and_finds_nothing(
    settings: VllmConfig, tmp_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has turned its own prefix caching off there, and offloads all the same."""
    devices = tmp_devices(1)
    with running(settings, devices) as engine:
        fill(engine)
    monkeypatch.setattr(ModelConfig, "is_prefix_caching_supported", False)
    off = copy(settings)
    off.cache_config = copy(settings.cache_config)
    off.cache_config.enable_prefix_caching = False
    with running(off, devices) as engine:
        assert engine.stored(KEYS) == set()
        fill(engine, [key_of(9)])
        assert engine.stored([key_of(9)]) == set()
    monkeypatch.undo()
    with running(off, devices) as engine:  # the user has turned it off
        assert engine.stored([*KEYS, key_of(9)]) == ALL


def test_hashes_with_a_seed_of_one_process_are_refused(
    settings: VllmConfig, tmp_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded = copy(settings)
    seeded.cache_config = copy(settings.cache_config)
    seeded.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UnsupportedError, match=r"algo xxhash has another seed.*: use sha256, or"):
        Engine(seeded, tmp_devices(1))
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    Engine(seeded, tmp_devices(1)).close()


def test_data_parallel_engines_have_directories_of_their_own(
    settings: VllmConfig, tmp_devices: Devices
) -> None:
    """Each replica of a dense model is told that it is the only one, but by its index."""
    devices = tmp_devices(1)

    def parallel(index: int) -> dict[str, Any]:
        return {"parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, index, 1, None, False)}

    with (
        running(settings, devices, config=parallel(0)) as first,
        running(settings, devices, config=parallel(1)) as second,
    ):
        fill(first)
        assert second.stored(KEYS) == set()
        fill(second, KEYS[:2])
    with running(settings, devices, config=parallel(1)) as second:
        assert second.stored(KEYS) == {0, 1}


def test_after_a_reset_nothing_older_is_found_and_nothing_newer_later(
    settings: VllmConfig, tmp_devices: Devices
) -> None:
    devices = tmp_devices(1)
    newer = [key_of(number) for number in range(100, 106)]
    with running(settings, devices) as engine:
        fill(engine)
        runs = engine.begin()
        engine.reset()
        engine.weights = 1
        assert engine.stored(KEYS) == set()
        engine.store(KEYS[:2], runs)  # of both weights: it began before
        engine.settle()
        assert engine.stored(KEYS) == set()
        fill(engine, newer)
        assert engine.stored(newer) == ALL
        engine.reset()
        assert engine.stored(newer) == set()
    with running(settings, devices) as engine:
        assert engine.stored(newer) == set()
        assert engine.looked_up(KEYS, engine.begin()) == KEYS


@pytest.mark.parametrize("options", [{"on_reset": "same_weights"}, {"weights_id": "mine"}])
def test_a_promise_keeps_the_identity_at_a_reset(
    settings: VllmConfig, tmp_devices: Devices, options: dict[str, str]
) -> None:
    devices = tmp_devices(1)
    with running(settings, devices, **options) as engine:
        fill(engine, KEYS[:3])
        engine.reset()
        fill(engine, KEYS[3:])
        assert engine.stored(KEYS) == ALL
    with running(settings, devices, **options) as engine:
        assert engine.looked_up(KEYS, engine.begin()) == KEYS


@contextmanager
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """Warnings of this package so far, within; it may not propagate them."""
    log = logging.getLogger("vllm_ssdkv")
    caplog.set_level(logging.WARNING, log.name)
    log.addHandler(caplog.handler)
    yield lambda: " ".join(record.getMessage() for record in caplog.records)
    log.removeHandler(caplog.handler)


def test_an_engine_with_adapters_says_that_none_is_served(
    settings: VllmConfig, tmp_devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    adapting = copy(settings)
    adapting.lora_config = LoRAConfig()
    with heard(caplog) as log:
        with running(settings, tmp_devices(1)):
            assert "--enable-lora" not in log()
        with running(adapting, tmp_devices(1)) as engine:
            assert "an adapter (--enable-lora) are neither stored nor found" in log()
            fill(engine)
            context = engine.begin(lora=LoRARequest("french", 1, "/adapters/french"))
            assert engine.stored(KEYS, context) == set()
            engine.store([key_of(9)], context)
            engine.settle()
            assert engine.stored([key_of(9)]) == set()


def test_options_of_a_request_are_refused(
    settings: VllmConfig, tmp_devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    with heard(caplog) as log, running(settings, tmp_devices(1)) as engine:
        counters = engine.own.counters
        retaining = request_of("retaining")
        retaining.kv_transfer_params = {"ssdkv": {"retain": "1h"}}
        other = request_of("other")
        other.kv_transfer_params = {"kv_load_tiers": []}
        other.kv_hints = KvHintsEnvelope("0.1", "m", [KvHintAction("1", "kv.other", "1.0", {})])
        for request in (other, retaining):
            assert "a tier retains no blocks" not in log()
            engine.arrive(request)
        assert counters.total("sparse_requests_refused") == 1
        said = log()
        assert "a tier retains no blocks" in said
        hinting = request_of("hinting")
        hinting.kv_hints = KvHintsEnvelope("0.1", "m", [KvHintAction("1", "kv.retain", "1.0", {})])
        engine.arrive(hinting)
        assert counters.total("sparse_requests_refused") == 2
        assert log() == said  # once


def image(name: str, value: float, offset: int) -> MultiModalFeatureSpec:
    """An image that the client calls ``name``, in place of 4 tokens."""
    pixels = MultiModalFieldElem(torch.full((1, 2), value), MultiModalBatchedField())
    return MultiModalFeatureSpec(
        MultiModalKwargsItem({"pixels": pixels}), "image", name, PlaceholderRange(offset, 4)
    )


def with_image(engine: Engine, *images: MultiModalFeatureSpec) -> ReqContext:
    context = engine.begin(mm_features=list(images))
    for position, key in enumerate(KEYS):
        context.set_offload_key_position(key, (position + 1) * BLOCK_TOKENS)
    return context


def test_an_image_is_known_by_its_content(settings: VllmConfig, tmp_devices: Devices) -> None:
    """vLLM's keys have the client's name of it: of another image with this name no chunk from the
    image on is found, in this process or after a restart."""
    devices, offset = tmp_devices(1), 2 * BLOCK_TOKENS + 3
    with running(settings, devices) as engine:
        context = with_image(engine, image("cat", 1.0, offset))
        engine.store(KEYS, context)
        engine.settle()
        assert engine.stored(KEYS, context) == ALL
        assert engine.stored(KEYS) == {0, 1}  # without an image
    with running(settings, devices) as engine:
        other = with_image(engine, image("cat", 2.0, offset))
        assert engine.stored(KEYS, other) == {0, 1}
        # From now on the name stands for two images: nobody knows which one the GPU has seen.
        assert engine.stored(KEYS, with_image(engine, image("cat", 1.0, offset))) == {0, 1}
        same = with_image(engine, image("tom", 1.0, offset))
        assert engine.stored(KEYS, same) == ALL
        assert engine.stored(KEYS, with_image(engine, image("tom", 1.0, offset + 1))) == {0, 1}


def test_an_image_that_is_not_seen_hides_what_follows(
    settings: VllmConfig, tmp_devices: Devices
) -> None:
    unseen = image("cat", 1.0, BLOCK_TOKENS)
    unseen.data = None
    with running(settings, tmp_devices(1)) as engine:
        context = with_image(engine, unseen)
        engine.store(KEYS, context)
        engine.settle()
        assert engine.stored(KEYS, context) == {0}
        assert engine.stored(KEYS) == {0}


@pytest.mark.parametrize("what", ["embeddings", "resumable", "unknown"])
def test_requests_whose_tokens_say_too_little_are_left_alone(
    settings: VllmConfig, tmp_devices: Devices, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    more: dict[str, Any] = {
        "embeddings": {"prompt_embeds": torch.zeros(3, 4)},
        "resumable": {"resumable": True},
        "unknown": {},
    }[what]
    with running(settings, tmp_devices(1)) as engine:
        fill(engine)
        logging.getLogger("vllm_ssdkv").addHandler(caplog.handler)
        if what == "unknown":  # as another tier's requests are, which come from elsewhere
            context = ReqContext("of another machine")
            engine.manager.on_new_request(context)
            engine.manager.on_new_request(ReqContext("of another one"))
        else:
            context = engine.arrive(request_of("one", **more))
        assert engine.stored(KEYS, context) == set()
        logging.getLogger("vllm_ssdkv").removeHandler(caplog.handler)
        engine.store([key_of(9)], context)
        engine.settle()
        assert engine.stored([key_of(9)]) == set()
        stats = engine.tier.get_stats()
        assert stats is not None
        assert stats.data["data"]["vllm:ssdkv_stores_skipped"]["unknown",] == 1
    told = {id(r) for r in caplog.records if "cannot see a request" in r.getMessage()}
    assert len(told) == (what == "unknown")
