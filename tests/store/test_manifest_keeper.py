"""The manifest that counts while a store is open, whatever lies in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.conftest import PAGED
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest, ManifestDevice
from vllm_ssdkv.store.manifest_keeper import ManifestKeeper


def saved(state: Path) -> Manifest:
    """A new store's, in this directory."""
    manifest = Manifest.create(Fingerprint({"model": "tiny"}), [PAGED])
    manifest.devices = [ManifestDevice(path=str(state), capacity=1, weight=1, files=[""])]
    manifest.numbers = 1
    manifest.save(state)
    return manifest


@pytest.fixture
def counters() -> Counters:
    return Counters()


def keeper(state: Path, manifest: Manifest, counters: Counters) -> ManifestKeeper:
    return ManifestKeeper(state, manifest, lambda: True, counters)


def restored(counters: Counters) -> list[float]:
    return [counters.total("state_files_restored", file=file) for file in (NAME, COPY)]


def test_an_older_one_does_not_count(tmp_path: Path, counters: Counters) -> None:
    manifest = saved(tmp_path)
    older = (tmp_path / NAME).read_bytes()
    manifest.suspended = "of a test"
    manifest.save(tmp_path)
    here = keeper(tmp_path, manifest, counters)
    for name in (NAME, COPY):
        (tmp_path / name).write_bytes(older)
    assert here.look().suspended == "of a test"
    assert restored(counters) == [1, 1]
    assert Manifest.load(tmp_path) == manifest


def test_another_stores_does_not_count(tmp_path: Path, counters: Counters) -> None:
    here = keeper(tmp_path, manifest := saved(tmp_path), counters)
    saved(tmp_path)
    assert here.look().store == manifest.store
    assert restored(counters) == [1, 1]


def test_a_newer_one_counts_from_then_on(tmp_path: Path, counters: Counters) -> None:
    here = keeper(tmp_path, manifest := saved(tmp_path), counters)
    manifest.model = "some/model"
    manifest.save(tmp_path)
    assert here.look().model == "some/model"
    (tmp_path / NAME).unlink()
    assert here.look().model == "some/model"
    assert restored(counters) == [1, 0]


def test_one_that_cannot_be_written_is_known(tmp_path: Path, counters: Counters) -> None:
    here = keeper(tmp_path, saved(tmp_path), counters)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    with pytest.raises(StoreError, match="cannot be written again"):
        here.look()
    (tmp_path / NAME).rmdir()
    here.look()
    assert restored(counters) == [1, 0]
