"""The small files that a start reads, damaged: it goes on, says so once, or names the way out."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.conftest import disk_directory
from tests.store.filled_store import FilledStore
from vllm_ssdkv.base.errors import FormatError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.store.devices.wear import NAME as WEAR
from vllm_ssdkv.store.devices.wear import WearLedger
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, RECORD_BYTES
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS
from vllm_ssdkv.store.maintenance.catalog import inspect_store
from vllm_ssdkv.store.maintenance.offline_store import find_store
from vllm_ssdkv.store.open import JOURNAL

SLOTS = (0, 1, 2, 5)

FILES = ("manifest", "copy", "copy on the other device", "journal", "wear", "superblock")


def make() -> Iterator[FilledStore]:
    """A store of two devices, its state on the first."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-small-", dir=disk_directory()) as root:
        devices = tuple(Path(root, name) for name in ("ssd0", "ssd1"))
        for device in devices:
            device.mkdir()
        store = FilledStore(devices, devices[0], SLOTS, ranks=1, options={"state_dir": None})
        store.fill()
        wear = WearLedger(store.state, names(store), Counters())
        wear.add(0, 12345)
        wear.close()
        yield store


@pytest.fixture(scope="module")
def original() -> Iterator[FilledStore]:
    """Every example leaves it as it was."""
    yield from make()


@pytest.fixture
def store() -> Iterator[FilledStore]:
    yield from make()


def names(store: FilledStore) -> list[str]:
    manifest = Manifest.load(store.state)
    assert manifest is not None
    return [device.files[0] for device in manifest.devices]


class Kept:
    """Small files of a store, put back afterwards; of data files what is before the first slot."""

    def __init__(self, store: FilledStore) -> None:
        places = {*store.devices, store.state}
        small = [file for place in places for file in place.iterdir() if file.suffix != ".data"]
        self.content = {file: file.read_bytes() for file in small}
        self.heads = {store.data(d, 0): self._head(store.data(d, 0)) for d in (0, 1)}
        self.places = places

    @staticmethod
    def _head(file: Path) -> bytes:
        with file.open("rb") as data:
            return data.read(1 << 20)

    def put_back(self) -> None:
        for place in self.places:
            for file in place.iterdir():
                if file.suffix != ".data" and file not in self.content:
                    file.unlink()
        for file, content in self.content.items():
            file.write_bytes(content)
        for file, head in self.heads.items():
            with file.open("r+b") as data:
                data.write(head)


def locate(store: FilledStore, what: str, which: int) -> tuple[Path, int, int]:
    """File, and where the damage may be: offset and length."""
    if what == "superblock":
        return store.data(which % 2, 0), COPY_OFFSETS[which // 2 % 2], BLOCK_BYTES
    path = {
        "manifest": store.state / NAME,
        "copy": store.state / COPY,
        "copy on the other device": store.devices[1] / COPY,
        "journal": store.state / JOURNAL,
        "wear": store.state / WEAR,
    }[what]
    return path, 0, path.stat().st_size


def spoil(store: FilledStore, what: str, which: int, how: str, position: int) -> int:
    """Damage it; the offset in the file."""
    path, begin, length = locate(store, what, which)
    at = begin + position * length // (1 << 20)
    data = bytearray(path.read_bytes()) if what != "superblock" else bytearray()
    with path.open("r+b") as file:
        file.seek(at)
        if how == "flip":
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << which % 8]))
        elif what == "superblock":
            file.write(bytes(begin + length - at))
        elif how == "cut":
            file.truncate(at)
        else:
            file.write(b"\xff" * (len(data) - at))
    return at


@given(
    what=st.sampled_from(FILES),
    which=st.integers(0, 31),
    how=st.sampled_from(("flip", "flip", "cut", "garbage")),
    position=st.integers(0, (1 << 20) - 1),
)
def test_one_of_them_is_damaged_and_the_store_starts(
    original: FilledStore, what: str, which: int, how: str, position: int
) -> None:
    """All that is stored is found, but for blocks whose records in the journal are damaged."""
    kept = Kept(original)
    try:
        at = spoil(original, what, which, how, position)
        served = original.served()
        lost = 0
        if what == "journal" and at >= HEADER_BYTES:
            lost = 1 if how == "flip" else len(SLOTS) - (at - HEADER_BYTES) // RECORD_BYTES
        assert served <= set(SLOTS)
        assert len(served) >= len(SLOTS) - lost
        counters = Counters()
        wear = WearLedger(original.state, names(original), counters)
        assert (wear.written(0), counters.total("wear_file_errors")) in ((12345, 0), (0, 1))
        assert wear.written(0) or what == "wear"
        wear.close()
        assert original.served() == served, "once more, with what the start has mended"
    finally:
        kept.put_back()


# ---- when what is essential is gone, with its copies ----


def flip_all(store: FilledStore, *files: Path) -> None:
    for file in files:
        with file.open("r+b") as data:
            data.seek(60)
            data.write(b"\xa5\xa5")


def test_all_manifests_are_damaged(store: FilledStore, caplog: pytest.LogCaptureFixture) -> None:
    """Superblocks say whose the files are; a strict start names the file and the cure works."""
    flip_all(store, store.state / NAME, store.state / COPY, store.devices[1] / COPY)
    strict = replace(store, options=store.options | {"recover": "strict"})
    with pytest.raises(FormatError, match=f"{store.state / NAME} is damaged.*ssdkv fsck --repair"):
        strict.served()
    assert store.served() == set()
    assert caplog.text.count("made anew, as is its copy, from the superblocks") == 1
    store.fill()
    assert strict.served() == set(SLOTS)


def test_both_superblocks_are_damaged(store: FilledStore) -> None:
    for offset in COPY_OFFSETS:
        with store.data(1, 0).open("r+b") as data:
            data.seek(offset + 80)
            data.write(b"\xa5" * 8)
    with pytest.raises(FormatError, match=f"{store.data(1, 0)} .*`ssdkv fsck --repair"):
        store.served()
    command = ["fsck", "--repair", *map(str, store.devices)]
    assert CliRunner().invoke(app, command).exit_code == 1
    assert store.served() == set(SLOTS)


def test_the_journal_and_all_copies_of_the_manifest_are_damaged(store: FilledStore) -> None:
    """``store.json`` is whole: nothing is lost."""
    flip_all(store, store.state / JOURNAL, store.state / COPY, store.devices[1] / COPY)
    assert store.served() == set(SLOTS)
    assert (store.devices[1] / COPY).read_bytes() == (store.state / NAME).read_bytes()


def test_what_is_no_file_is_refused_by_name(store: FilledStore) -> None:
    """Not even a pipe holds anybody up."""
    for name in (NAME, JOURNAL):
        path = store.state / name
        kept = path.read_bytes()
        for make, remove in ((Path.mkdir, Path.rmdir), (os.mkfifo, Path.unlink)):
            path.unlink()
            make(path)
            try:
                with pytest.raises(StoreError, match=str(path)):
                    store.served()
                with pytest.raises(StoreError, match=str(path)):
                    inspect_store(find_store([store.state]))
            finally:
                remove(path)
                path.write_bytes(kept)
    path = store.state / WEAR
    path.unlink()
    path.mkdir()
    counters = Counters()
    wear = WearLedger(store.state, ["a"], counters)
    assert counters.total("wear_file_errors") == 1
    wear.close()
    path.rmdir()


def test_a_damaged_file_is_said_once(store: FilledStore, caplog: pytest.LogCaptureFixture) -> None:
    flip_all(store, store.state / NAME, store.devices[1] / COPY)
    with store.data(0, 0).open("r+b") as data:
        data.seek(100)
        data.write(b"\xa5")
    with caplog.at_level(logging.WARNING):
        store.served()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(set(said)) == 2, said
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert store.served() == set(SLOTS)
    assert not caplog.records
