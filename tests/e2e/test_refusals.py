"""Refusals at start, with the reason and the way out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.workload import kv_tokens, page_mode, reuse_mode
from tests.kit.engine import Engine
from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.cli.explain.catalog import entry_for

Devices = Callable[..., list[dict[str, str]]]

CHUNK = 256


def refusal(model: Path, ssdkv: dict[str, object], **options: object) -> str:
    """Text of the error that starting this engine ends with."""
    settings = {
        "kv_tokens": 8192,
        "max_num_batched_tokens": CHUNK,
        "max_model_len": 2048,
        **options,
    }
    with pytest.raises(SSDKVError) as caught:
        Engine(model, ssdkv=ssdkv, **settings).close()
    assert entry_for(str(caught.value)), "the catalog has its cure"
    return str(caught.value)


def test_window_smaller_than_a_block(models: dict[str, Path], devices: Devices) -> None:
    text = refusal(models["llama"], page_mode(devices(), window=64), block_size=128)
    assert "hbm_window_tokens (64) is smaller than a block (128 tokens)" in text
    assert "raise it, or lower --block-size" in text


def test_block_that_is_no_whole_number_of_pages(models: dict[str, Path], devices: Devices) -> None:
    text = refusal(models["llama"], page_mode(devices(), page_tokens=128), block_size=32)
    assert "--block-size 32 is not a multiple of page_tokens (128): change one of them" in text


def test_unknown_option(models: dict[str, Path], devices: Devices) -> None:
    text = refusal(models["llama"], page_mode(devices(), hbm_window=256))
    assert "hbm_window" in text
    assert "hbm_window_tokens" in text


def test_directory_that_cannot_be_made(models: dict[str, Path], devices: Devices) -> None:
    (place,) = devices(1)
    missing = Path(place["path"], "not mounted", "kv")
    text = refusal(models["llama"], reuse_mode([{"path": str(missing), "capacity": "16MiB"}]))
    assert str(missing) in text


def test_directory_that_cannot_be_written(models: dict[str, Path], devices: Devices) -> None:
    """A file where the directory should be stands for it: root may write anywhere."""
    (place,) = devices(1)
    file = Path(place["path"], "file")
    file.touch()
    text = refusal(models["llama"], reuse_mode([{"path": str(file), "capacity": "16MiB"}]))
    assert str(file) in text


def test_directory_of_a_model_of_another_shape(models: dict[str, Path], devices: Devices) -> None:
    place = devices(1)
    with Engine(models["llama"], ssdkv=reuse_mode(place), kv_tokens=8192):
        pass
    text = refusal(models["qwen3"], reuse_mode(place))
    # What differs, and what to do.
    assert "layers" in text
    assert place[0]["path"] in text


def test_store_too_small_for_one_request(models: dict[str, Path], devices: Devices) -> None:
    text = refusal(models["llama"], page_mode(devices(1, "16MiB")), max_model_len=8192)
    assert "a request of --max-model-len 8192 needs 257" in text
    assert "raise the capacity" in text
    assert "or lower --max-model-len" in text


def test_dram_too_small(models: dict[str, Path], devices: Devices) -> None:
    text = refusal(models["llama"], page_mode(devices(), dram="4200KiB"))
    assert "dram_gib" in text
    assert "give at least" in text


def test_the_plugin_is_not_loaded(
    models: dict[str, Path], devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM only logs when a plugin fails; then the connector itself must notice."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from vllm_ssdkv.connector.attention_backend import SSDKVCPUBackend

    monkeypatch.setattr(SSDKVCPUBackend, "customize_spec", classmethod(lambda cls, spec: spec))
    monkeypatch.setattr(SSDKVCPUBackend, "get_impl_cls", CPUAttentionBackend.get_impl_cls)
    monkeypatch.setattr(SSDKVCPUBackend, "get_builder_cls", CPUAttentionBackend.get_builder_cls)
    text = refusal(models["llama"], page_mode(devices()))
    assert "page mode needs the attention backend SSDKVCPUBackend" in text
    assert "ssdkv doctor" in text


def test_an_engine_works_after_all_that(models: dict[str, Path], devices: Devices) -> None:
    """Refused engines leave no locks, threads or settings behind in this process."""
    place = devices(1)
    refusal(models["llama"], page_mode(place, window=64), block_size=128)
    with Engine(
        models["llama"],
        ssdkv=page_mode(place),
        kv_tokens=kv_tokens(128, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=2048,
    ) as engine:
        assert len(engine.answers([[5] * 300], 4)[0].tokens) == 4


def test_what_a_user_sees(
    models: dict[str, Path], devices: Devices, capfd: pytest.CaptureFixture[str]
) -> None:
    """With an engine core of its own the reason is in the log, where the error points to."""
    with pytest.raises(RuntimeError, match="root cause above"):
        Engine(
            models["llama"],
            ssdkv=page_mode(devices(1, "16MiB")),
            kv_tokens=kv_tokens(128, CHUNK),
            max_num_batched_tokens=CHUNK,
            in_process=False,
            # One process fewer that imports vLLM.
            distributed_executor_backend="uni",
        ).close()
    shown = "".join(capfd.readouterr())
    assert "a request of --max-model-len 8192 needs 257" in shown
    assert "raise the capacity" in shown
    assert os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") is None
