"""Both manifests are damaged: superblocks that agree are enough to go on, others change nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.opening import Opened, close, fill, found, place
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.manifest import COPY, NAME, VERSIONS, Manifest, sealed
from vllm_ssdkv.store.format.superblock import COPY_OFFSETS
from vllm_ssdkv.store.open import open_index

pytestmark = pytest.mark.usefixtures("small_segments")

Devices = Callable[[int], list[Path]]


def stored(devices: list[Path], opened: Opened, **options: Any) -> dict[int, bytes]:  # noqa: ANN401 - any option
    """Open a store with these options, fill it, close it; its slots and keys."""
    for rank in range(options.get("tp_size", 1)):
        close(opened(place(devices, **options), rank))
    index, _ = open_index(place(devices, **options))
    keys = fill(index, 7)
    assert index.close()
    return keys


def damage(devices: list[Path]) -> None:
    """Of the manifest and all its copies nothing is whole."""
    for path in [devices[0] / NAME, *(device / COPY for device in devices)]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def content(devices: list[Path]) -> dict[Path, bytes]:
    files = [path for device in devices for path in device.iterdir()]
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "options",
    [{}, {"tp_size": 2}, {"encryption": {"key_env": "SSDKV_TEST_KEY"}}],
    ids=["plain", "two ranks", "encrypted"],
)
@pytest.mark.parametrize("lost", ["copy damaged", "copy missing"])
def test_superblocks_that_agree_are_enough(
    tmp_devices: Devices,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    lost: str,
) -> None:
    monkeypatch.setenv("SSDKV_TEST_KEY", "5a" * 32)
    devices = tmp_devices(2)
    keys = stored(devices, opened, **options)
    index, _ = open_index(place(devices, **options))
    newest = max(map(index.epoch, keys))
    assert index.close()
    before = Manifest.load(devices[0])
    assert before is not None
    damage(devices)
    if lost == "copy missing":
        for device in devices:
            (device / COPY).unlink()
    where = place(devices, **options)
    for rank in range(options.get("tp_size", 1)):
        close(opened(where, rank))
    assert where.counters.total("manifest_restores") == 1
    assert f"from the superblocks of store {before.store}" in caplog.text
    index, _ = open_index(where)
    # Nobody knows where the slots lay.
    assert found(index, keys) == set()
    assert index.gauges()["free"] == index.num_slots
    assert index.num_slots == before.numbers
    new = fill(index, 5)
    assert min(map(index.epoch, new)) > newest
    assert index.close()
    after = Manifest.load(devices[0])
    assert after is not None
    assert (after.store, after.key_id) == (before.store, before.key_id)
    assert [d.files for d in after.devices] == [d.files for d in before.devices]
    # From now on it is a store like any other.
    for rank in range(options.get("tp_size", 1)):
        close(opened(place(devices, **options), rank))
    index, _ = open_index(place(devices, **options))
    assert found(index, new) == set(new)
    assert index.close()


def test_sizes_stay_where_no_capacity_is_given(tmp_devices: Devices, opened: Opened) -> None:
    devices = tmp_devices(2)
    stored(devices, opened)
    sizes = [(device / "rank0.data").stat().st_size for device in devices]
    damage(devices)
    close(opened(place(devices, devices=[{"path": d, "weight": 1} for d in devices])))
    after = [(device / "rank0.data").stat().st_size for device in devices]
    assert all(0.9 * old < new <= old for old, new in zip(sizes, after, strict=True))


def test_a_device_that_is_gone_is_left_out(tmp_devices: Devices, opened: Opened) -> None:
    devices = tmp_devices(3)
    stored(devices, opened)
    damage(devices)
    shutil.rmtree(devices[2])
    close(opened(place(devices)))
    assert (devices[2] / "rank0.data").exists()  # made anew
    manifest = Manifest.load(devices[0])
    assert manifest is not None
    assert len(manifest.present()) == 3


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("another store's file", "store is"),
        ("another model", "stored != configured"),
        ("a damaged superblock", "holds no superblock"),
        ("no superblock", "there is no superblock on"),
        ("strict", "fsck --repair"),
        ("another version", f"has format version {VERSIONS[-1] + 1}"),
    ],
)
def test_otherwise_it_is_said_and_nothing_changes(
    tmp_devices: Devices, opened: Opened, case: str, text: str
) -> None:
    devices, others = tmp_devices(2), tmp_devices(2)
    stored(devices, opened)
    stored(others, opened)
    options: dict[str, Any] = {}
    if case == "another version":
        for name in (NAME, COPY):
            path = devices[0] / name
            old, new = (f'"version": {v}'.encode() for v in (VERSIONS[2], VERSIONS[-1] + 1))
            path.write_bytes(sealed(path.read_bytes().replace(old, new)))
    else:
        damage(devices)
    data = devices[1] / "rank0.data"
    if case == "another store's file":
        shutil.copy(others[1] / "rank0.data", data)
    elif case == "another model":
        options["fingerprint"] = Fingerprint({"model": "huge"})
    elif case == "strict":
        options["recover"] = "strict"
    elif case == "a damaged superblock":
        with data.open("r+b") as file:
            for offset in COPY_OFFSETS:
                file.seek(offset + 100)
                file.write(b"?")
    elif case == "no superblock":
        for device in devices:
            (device / "rank0.data").unlink()
    before = content(devices)
    with pytest.raises(FormatError, match=text) as caught:
        opened(place(devices, **options))
    assert str(devices[0] / NAME) in str(caught.value)
    assert content(devices) == before
