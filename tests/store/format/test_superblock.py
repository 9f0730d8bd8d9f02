"""Superblocks: round trip, every byte covered, the newest valid copy wins, no silent overwrite."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.base.errors import FingerprintMismatchError, FormatError
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS, Superblock, newest

BLANK = bytes(BLOCK_BYTES)
BLOCK = Superblock(
    store=UUID(int=1),
    device=UUID(int=2),
    rank=1,
    unit_bytes=524288,
    epoch=6,
    geometry=SlotGeometry("paged", 2, 3, 1, 8192, summary_pages=1),
    fingerprint=Fingerprint({"model": "tiny", "layers": 2}),
)


def refreshed(block: bytearray) -> bytes:
    """The block with its checksum made right again."""
    block[-8:] = checksum_bytes(block[:-8]).to_bytes(8, "little")
    return bytes(block)


@given(
    store=st.uuids(),
    device=st.uuids(),
    rank=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**64 - 1),
    kind=st.sampled_from(["opaque", "paged"]),
    fields=st.dictionaries(st.text(max_size=8), st.integers(), max_size=8),
    key_id=st.binary(min_size=16, max_size=16),
    channels=st.integers(0, 2),
)
def test_round_trip(
    store: UUID,
    device: UUID,
    rank: int,
    epoch: int,
    kind: str,
    fields: dict[str, str | int],
    key_id: bytes,
    channels: int,
) -> None:
    more = (channels, channels) if kind == "paged" else (0, 0)
    shape = SlotGeometry(kind, 5, 1, 1, 12345, any(key_id), *more)  # type: ignore[arg-type]  # sampled
    model = Fingerprint(fields)
    block = Superblock(store, device, rank, 4096, epoch, shape, model, key_id)
    data = block.encode()
    assert len(data) == BLOCK_BYTES
    assert Superblock.decode(data) == block


def test_a_number_of_units_that_is_given_is_behind_the_text() -> None:
    """In a version of its own; elsewhere these bytes are zero, as ever."""
    shape = SlotGeometry("opaque", 2, 1, 1, 8192, units=3)
    block = replace(BLOCK, geometry=shape, unit_bytes=shape.unit_bytes)
    data = bytearray(block.encode())
    at = 144 + len(block.fingerprint.canonical)
    assert (data[8], data[at : at + 4]) == (7, b"\3\0\0\0")
    assert Superblock.decode(bytes(data)) == block
    for version in 1, 7:
        data[8], data[at] = version, 3 * (version == 1)
        with pytest.raises(FormatError, match=r"superblock: (bytes that are zero|version is 7)"):
            Superblock.decode(refreshed(data))


def test_every_byte_is_covered() -> None:
    good = BLOCK.encode()
    for at in range(BLOCK_BYTES):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        with pytest.raises(FormatError, match=r"superblock: (magic|version|block_bytes|checksum)"):
            Superblock.decode(bytes(bad))


def test_well_summed_nonsense_is_refused() -> None:
    with pytest.raises(FormatError, match="length is 10"):
        Superblock.decode(bytes(10))
    data = bytearray(BLOCK.encode())
    data[8] = 9
    with pytest.raises(FormatError, match="version is 9, expected 4: another release made it"):
        Superblock.decode(refreshed(data))
    with pytest.raises(FormatError, match=r"version is 9, expected 4$"):
        Superblock.decode(bytes(data[:-1]) + b"?")  # damaged
    data[8] = 1  # its summary pages came first
    with pytest.raises(FormatError, match="version is 1, expected 4"):
        Superblock.decode(refreshed(data))
    none = replace(BLOCK, geometry=replace(BLOCK.geometry, summary_pages=0))
    data = bytearray(none.encode())
    assert data[8] == 1
    data[8] = 4
    with pytest.raises(FormatError, match="version is 4, expected 1"):
        Superblock.decode(refreshed(data))
    channels = replace(BLOCK, geometry=replace(BLOCK.geometry, channel_pages=2))
    data = bytearray(channels.encode())
    data[56:57] = b"\2"  # channels in int8, which development versions wrote
    with pytest.raises(FormatError, match="scaled_from is 2, with 2 channel pages"):
        Superblock.decode(refreshed(data))
    spread = replace(BLOCK, geometry=replace(BLOCK.geometry, record="spread"))
    data = bytearray(spread.encode())
    assert data[8] == 5
    assert Superblock.decode(bytes(data)) == spread
    data[60:61] = b"\2"
    assert Superblock.decode(refreshed(data)).geometry.record == "spread_with_values"
    data[60:61] = b"\0"
    with pytest.raises(FormatError, match="version is 5, expected 4"):
        Superblock.decode(refreshed(data))
    data[60:61] = b"\6"
    with pytest.raises(FormatError, match="version is 5, expected 6"):
        Superblock.decode(refreshed(data))
    text = BLOCK.encode().index(b'{"layers":2')
    data = bytearray(BLOCK.encode())
    data[text + 10] = ord("3")
    with pytest.raises(FormatError, match="digest"):
        Superblock.decode(refreshed(data))
    data[text] = ord("[")
    with pytest.raises(FormatError, match="fingerprint"):
        Superblock.decode(refreshed(data))
    for field, value in (
        ("kind", 7),
        ("text_bytes", 2**32 - 1),
        ("layers", 0),
        ("cipher", 2),
    ):
        data = bytearray(BLOCK.encode())
        at = {"text_bytes": 116, "kind": 72, "layers": 76, "cipher": 120}[field]
        data[at : at + 4] = value.to_bytes(4, "little")
        with pytest.raises(FormatError, match=field):
            Superblock.decode(refreshed(data))


def test_encoding_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        replace(BLOCK, fingerprint=Fingerprint({"x": "y" * 4000})).encode()
    with pytest.raises(ValueError, match="superblock"):
        replace(BLOCK, rank=-1).encode()


@settings(max_examples=50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8, unique=True).map(sorted), st.data())
def test_a_torn_update_leaves_the_previous_block(epochs: list[int], data: st.DataObject) -> None:
    """Write a series of epochs; the last write stops after any number of bytes."""
    consecutive = range(epochs[0], epochs[0] + len(epochs))
    copies = dict.fromkeys(COPY_OFFSETS, BLANK)
    for epoch in consecutive:
        block = replace(BLOCK, epoch=epoch)
        before = copies[block.copy_offset]
        copies[block.copy_offset] = block.encode()
    written = data.draw(st.integers(0, BLOCK_BYTES))
    torn = copies | {block.copy_offset: block.encode()[:written] + before[written:]}
    assert newest(list(copies.values()), "file") == block
    if len(epochs) > 1:
        found = newest(list(torn.values()), "file")
        assert found is not None
        assert found.epoch in (block.epoch, block.epoch - 1)


def test_a_new_file_has_no_superblock_but_foreign_data_is_not_new() -> None:
    assert newest([BLANK, BLANK], "file") is None
    assert newest([b"", b""], "file") is None
    with pytest.raises(FormatError, match=r"/dev/x is not empty.*delete"):
        newest([b"\x01" + BLANK[1:], BLANK], "/dev/x")
    with pytest.raises(FormatError, match="not empty"):
        newest([BLOCK.encode()[:100], b""], "file")


def test_requirements_name_what_differs() -> None:
    replace(BLOCK, epoch=9).require(BLOCK, "file")
    other = replace(BLOCK, fingerprint=Fingerprint({"model": "large", "layers": 2}))
    with pytest.raises(FingerprintMismatchError, match=r"model: 'tiny' != 'large'.*directory"):
        BLOCK.require(other, "/x/rank0.data")
    for field, value in (
        ("store", UUID(int=9)),
        ("device", UUID(int=9)),
        ("rank", 0),
        ("unit_bytes", 4096),
        ("geometry", SlotGeometry("opaque", 2, 1, 1, 8192)),
        ("geometry", replace(BLOCK.geometry, encrypted=True)),
        ("key_id", bytes(range(16))),
    ):
        with pytest.raises(FormatError, match=f"/x/rank0.data: superblock: {field} is"):
            BLOCK.require(replace(BLOCK, **{field: value}), "/x/rank0.data")
