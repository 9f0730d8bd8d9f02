"""Files that stand for weights: found, and digested by their whole content."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from vllm_ssdkv.connector.identity.weight_files import digest_of_files, weight_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    rng = np.random.default_rng(7)
    for number in (1, 2):
        (root / f"part-{number}.safetensors").write_bytes(rng.bytes(300_000))
    (root / "config.json").write_text("{}")
    return root


def config(model: Path, drafter: Path | None = None) -> VllmConfig:
    def named(path: Path) -> SimpleNamespace:
        return SimpleNamespace(model=str(path), revision=None)

    speculative = SimpleNamespace(draft_model_config=named(drafter)) if drafter else None
    found = SimpleNamespace(model_config=named(model), speculative_config=speculative)
    return cast("VllmConfig", found)


def test_weights_are_found_and_nothing_else(model: Path) -> None:
    assert [f.name for f in weight_files(str(model))] == [
        "part-1.safetensors",
        "part-2.safetensors",
    ]
    assert weight_files(str(model / "part-1.safetensors")) == [model / "part-1.safetensors"]
    assert weight_files("nobody/has-this-model") == []


@pytest.mark.parametrize("at", [0, 65_536, 150_000, 299_999])
def test_every_byte_counts(model: Path, at: int) -> None:
    before = digest_of_files(config(model))
    with (model / "part-2.safetensors").open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    assert digest_of_files(config(model)) != before


def test_a_copy_is_the_same(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)
    assert digest_of_files(config(copy)) == digest_of_files(config(model)) != ""


def test_a_drafter_counts(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "drafter"
    shutil.copytree(model, copy)
    both = digest_of_files(config(model, copy))
    assert both != digest_of_files(config(model))
    assert digest_of_files(config(model, tmp_path / "missing")) == ""
