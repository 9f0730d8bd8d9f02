"""Claiming a data file: ours, new, somebody else's, or damaged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_ssdkv.base.errors import DeviceError, FingerprintMismatchError, FormatError
from vllm_ssdkv.store.devices.data_device import OpenDevice, open_device
from vllm_ssdkv.store.devices.data_file import claim, read_superblock, write_superblock
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES, SlotGeometry
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS, Superblock

STORE = UUID(int=1)
GEOMETRY = SlotGeometry("paged", 2, 2, 1, 8192)
MODEL = Fingerprint({"model": "tiny"})


@pytest.fixture
def device(tmp_path: Path) -> Iterator[OpenDevice]:
    opened = open_device(
        tmp_path / "ssd",
        index=1,
        rank=0,
        nbytes=SUPERBLOCK_BYTES + 4 * GEOMETRY.slot_bytes,
        direct="auto",
        lock_timeout_s=0,
    )
    yield opened
    opened.close()


def take(
    device: OpenDevice,
    known: str = "",
    *,
    store: UUID = STORE,
    rank: int = 0,
    fingerprint: Fingerprint = MODEL,
    geometry: SlotGeometry = GEOMETRY,
    renamed: Callable[[str], None] = lambda _: None,
    elsewhere: Container[str] = (),
) -> str:
    return claim(
        device,
        store=store,
        known=known,
        rank=rank,
        geometry=geometry,
        fingerprint=fingerprint,
        key_id=bytes(16),
        renamed=renamed,
        elsewhere=elsewhere,
    )


def superblock(device: OpenDevice) -> Superblock:
    found = read_superblock(device)
    assert found is not None
    return found


def test_a_new_file_gets_a_name_and_keeps_it(device: OpenDevice) -> None:
    assert read_superblock(device) is None
    name = take(device)
    first = superblock(device)
    assert str(first.device) == name
    assert (first.store, first.rank, first.unit_bytes) == (STORE, 0, GEOMETRY.unit_bytes)
    assert take(device, name) == name
    assert superblock(device).epoch > first.epoch
    # Killed after the superblock was written, before the manifest was saved.
    assert take(device, "") == name


def test_a_file_that_should_be_there_is_replaced_and_said(
    device: OpenDevice, caplog: pytest.LogCaptureFixture
) -> None:
    lost = str(UUID(int=77))
    told: list[str] = []

    def renamed(name: str) -> None:
        assert read_superblock(device) is None, "the manifest must know it before the file does"
        told.append(name)

    name = take(device, lost, renamed=renamed)
    assert told == [name] != [lost]
    assert f"{device.path} is missing or empty" in caplog.text


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"store": UUID(int=2)}, FormatError, "store"),
        ({"known": str(UUID(int=3))}, FormatError, "device"),
        ({"rank": 1}, FormatError, "rank"),
        ({"geometry": SlotGeometry("paged", 4, 2, 1, 8192)}, FormatError, "unit_bytes"),
        ({"fingerprint": Fingerprint({"model": "huge"})}, FingerprintMismatchError, "huge"),
    ],
)
def test_what_belongs_to_somebody_else_is_refused_untouched(
    device: OpenDevice, change: dict[str, object], error: type[Exception], text: str
) -> None:
    name = take(device)
    before = device.path.read_bytes()
    with pytest.raises(error, match=text) as caught:
        take(device, **{"known": name, "elsewhere": {name}} | change)  # type: ignore[arg-type]  # any of its arguments
    assert str(device.path) in str(caught.value)
    assert device.path.read_bytes() == before


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    copy=st.sampled_from(COPY_OFFSETS),
    byte=st.integers(0, BLOCK_BYTES - 1),
    bit=st.integers(0, 7),
)
def test_one_damaged_copy_is_mended(device: OpenDevice, copy: int, byte: int, bit: int) -> None:
    name = take(device, str(superblock(device).device) if _claimed(device) else "")
    flip(device, copy + byte, 1 << bit)
    assert str(superblock(device).device) == name
    assert take(device, name) == name
    blocks = device.path.read_bytes()
    for offset in COPY_OFFSETS:
        Superblock.decode(blocks[offset : offset + BLOCK_BYTES])


def _claimed(device: OpenDevice) -> bool:
    return read_superblock(device) is not None


def flip(device: OpenDevice, offset: int, bits: int) -> None:
    with open(device.path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ bits]))
        os.fsync(file.fileno())


def test_a_damaged_copy_is_logged(device: OpenDevice, caplog: pytest.LogCaptureFixture) -> None:
    take(device)
    flip(device, COPY_OFFSETS[1] + 16, 1)
    with caplog.at_level(logging.WARNING):
        superblock(device)
    assert f"{device.path}: the superblock at {COPY_OFFSETS[1]} is damaged" in caplog.text


def test_two_damaged_copies_are_refused_untouched(device: OpenDevice) -> None:
    name = take(device)
    for offset in COPY_OFFSETS:
        flip(device, offset + 100, 1)
    before = device.path.read_bytes()
    with pytest.raises(FormatError, match=f"{device.path} is not empty .* delete the file"):
        take(device, name)
    assert device.path.read_bytes() == before


def test_a_write_goes_to_the_copy_of_its_epoch(device: OpenDevice) -> None:
    take(device)
    current = superblock(device)
    write_superblock(device, replace(current, epoch=current.epoch + 1))
    blocks = device.path.read_bytes()
    epochs = [Superblock.decode(blocks[at : at + BLOCK_BYTES]).epoch for at in COPY_OFFSETS]
    assert sorted(epochs) == [current.epoch, current.epoch + 1]


def test_a_device_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SUPERBLOCK_BYTES))
    for flags, action in ((os.O_WRONLY, read_superblock), (os.O_RDONLY, take)):
        opened = OpenDevice(path, os.open(path, flags), SUPERBLOCK_BYTES, False, True, False)
        with pytest.raises(DeviceError, match=f"{path}: superblock: Bad file descriptor"):
            action(opened)
        opened.close()
