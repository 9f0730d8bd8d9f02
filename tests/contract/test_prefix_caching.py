"""Places where vLLM turns its own prefix caching off: the store serves no hits there, either."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import vllm
from vllm.config import VllmConfig

from tests.connector.kinds import configuration, make
from vllm_ssdkv.connector.compatibility import why_no_prefixes

OFF = "enable_prefix_caching = False"
KNOWN = {
    "config/vllm.py": "the encoder of media runs alone, and there is no KV",
    "engine/arg_utils.py": "RISC-V",
    "model_executor/layers/attention/attention.py": "batch invariance, in a worker",
    "model_executor/layers/attention/mla_attention.py": "batch invariance, in a worker",
    "model_executor/models/config.py": "Unlimited-OCR",
    "platforms/cpu.py": "MLA without AMX",
    "v1/engine/core.py": "attention that is not causal, which is refused",
}
"""Each file that does it, once, and why. Batch invariance is about rounding."""


def test_every_place_is_known() -> None:
    root = Path(vllm.__file__).parent
    counts = {
        str(file.relative_to(root)): text.count(OFF)
        for file in root.rglob("*.py")
        if "benchmarks" not in file.relative_to(root).parts
        if OFF in (text := file.read_text(errors="replace"))
    }
    assert counts == dict.fromkeys(KNOWN, 1)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("latent"), "deepseek")


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_latent_attention_on_a_cpu(
    latent: Path, tiles: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tiles vLLM decides, whatever the user asked for; with them the store is used."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    config = configuration(latent, enable_prefix_caching=asked)
    assert config.cache_config.enable_prefix_caching is (asked and tiles)
    assert ("without AMX" in why_no_prefixes(config)) is not tiles


def test_other_models(tmp_path: Path) -> None:
    config = configuration(make(tmp_path, "llama"), enable_prefix_caching=False)
    assert why_no_prefixes(config) == "", "the user turned it off, for HBM"
    ocr: VllmConfig = copy.deepcopy(config)
    ocr.model_config.hf_config.architectures = ["UnlimitedOCRForCausalLM"]
    ocr.model_config.model_arch_config.architectures = ["UnlimitedOCRForCausalLM"]
    assert "decoded" in why_no_prefixes(ocr)
