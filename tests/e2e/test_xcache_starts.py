"""Engines whose contexts may be X: other numbers, a share that is measured, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.models import make_llama, prompts
from tests.e2e.xcache import PROMPTS, comparing, start
from tests.faults import set_faults
from vllm_ssdkv.base.errors import UnsupportedError


@pytest.fixture(scope="module")
def mha(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("mha") / "llama", layers=3, heads=4, kv_heads=4)


MOST_ROUNDS = 50
"""Rates are told twice a second while requests run."""

Devices = Callable[..., list[dict[str, str]]]


def test_projected_k_and_v_are_those_of_the_model_in_16_bit(mha: Path, devices: Devices) -> None:
    with start(mha, devices(1), "bfloat16") as engine, comparing() as compared:
        engine.answers(prompts((200,), 3), 40)
    assert compared.blocks > 50
    assert compared.worst <= 2e-2


def test_the_share_follows_what_is_measured(mha: Path, devices: Devices) -> None:
    with start(mha, devices(2), share="auto") as engine:
        wanted = engine.answers(PROMPTS, 60)
        assert engine.ssdkv("x_cache_requests") == 0  # nothing is known yet
        admission = engine.scheduler.connector.scheduler.policy.x_admission
        for _ in range(MOST_ROUNDS):
            if admission.rates is not None:
                break
            assert engine.answers(PROMPTS, 60)
        assert admission.rates is not None
        assert min(admission.rates.storage, admission.rates.link, admission.rates.flops) > 0
        engine.settle()
        assert engine.ssdkv("x_cache_share") == admission.share
        others = prompts([len(prompt) for prompt in PROMPTS], 6)
        assert [a.cached for a in engine.answers(others, 4)] == [0] * len(others)
        assert [a.tokens for a in engine.answers(PROMPTS, 60)] == [a.tokens for a in wanted]
        engine.settle()
        engine.assert_nothing_held()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_encrypted_drives_that_fail_change_no_token(
    mha: Path, devices: Devices, tmp_path: Path, share: float
) -> None:
    """Rows whose X or K and V cannot be read are computed again."""
    key, faults = tmp_path / "key", tmp_path / "faults.json"
    key.write_text(bytes(range(32)).hex())
    key.chmod(0o600)
    set_faults(faults)
    options: dict[str, Any] = {
        "encryption": {"key_file": str(key)},
        "io": {"staging": "4MiB", "fault_file": str(faults)},
        "dram": "11MiB",
    }
    with start(mha, devices(3), share=share, **options) as engine:
        wanted = engine.answers(PROMPTS, 40)
        for number, prompt in enumerate(PROMPTS):
            engine.add(str(number), prompt)
        found = engine.run(
            lambda step: set_faults(faults, {"kind": "eio", "device": 1}) if step == 30 else None
        )
        assert engine.ssdkv("recomputed_requests", cause="context") > 0
        assert [found[str(n)] for n in range(len(PROMPTS))] == [a.tokens for a in wanted]
        engine.settle()
        engine.assert_nothing_held()


def test_compiled_models_are_refused(mha: Path, devices: Devices) -> None:
    with pytest.raises(UnsupportedError, match=r"x_share.*enforce-eager"):
        start(mha, devices(1), enforce_eager=False)


def test_models_with_grouped_queries_do_without(
    models: dict[str, Path], devices: Devices, log: list[str]
) -> None:
    with start(models["llama"], devices(1)) as engine:
        engine.answers(prompts((200,), 3), 4)
        assert engine.ssdkv("x_cache_requests") == 0
    assert any("offload.x_share has no effect: the model's X" in line for line in log)
