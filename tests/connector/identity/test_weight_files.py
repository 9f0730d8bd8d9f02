"""Files that stand for weights: found, and digested by their whole content."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from huggingface_hub import constants

from vllm_ssdkv.connector.identity.weight_files import (
    digest_of_code,
    digest_of_files,
    weight_files,
)

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
        return SimpleNamespace(
            model=str(path),
            revision=None,
            code_revision=None,
            trust_remote_code=True,
            hf_config=SimpleNamespace(auto_map={"AutoModel": "nobody/code--modeling.Model"}),
        )

    speculative = SimpleNamespace(draft_model_config=named(drafter)) if drafter else None
    found = SimpleNamespace(
        model_config=named(model),
        speculative_config=speculative,
        load_config=SimpleNamespace(download_dir=None),
    )
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


def in_cache(cache: Path, name: str, revision: str, file: str, content: str) -> Path:
    """A file of a repository in a cache of huggingface_hub."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    found = repository / "snapshots" / revision / file
    found.parent.mkdir(parents=True, exist_ok=True)
    found.write_text(content)
    return found


def test_weights_are_those_of_the_directory_that_vllm_loads_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "ours"))
    in_cache(tmp_path / "ours", "nobody/model", "1" * 40, "model.safetensors", "old")
    loaded = in_cache(tmp_path / "theirs", "nobody/model", "2" * 40, "model.safetensors", "new")
    assert weight_files("nobody/model", download_dir=str(tmp_path / "theirs")) == [loaded]
    of_hub = config(Path("nobody/model"))
    ours = digest_of_files(of_hub)
    of_hub.load_config.download_dir = str(tmp_path / "theirs")
    assert "" != digest_of_files(of_hub) != ours != ""


def test_code_counts_where_it_is_trusted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    none = digest_of_code(config(model))
    (model / "modeling.py").write_text("SCALE = 1")
    one = digest_of_code(config(model))
    (model / "modeling.py").write_text("SCALE = 2")
    two = digest_of_code(config(model))
    in_cache(tmp_path, "nobody/code", "1" * 40, "parts/layers.py", "SCALE = 1")
    elsewhere = digest_of_code(config(model))
    in_cache(tmp_path, "nobody/code", "1" * 40, "parts/layers.py", "SCALE = 2")
    assert len({none, one, two, elsewhere, digest_of_code(config(model))}) == 5
    untrusted = config(model)
    untrusted.model_config.trust_remote_code = False
    assert digest_of_code(untrusted) == none
