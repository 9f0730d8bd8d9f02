"""The manifest: round trip, whole replacement, and no silent use of a wrong one."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from msgspec import structs

from vllm_ssdkv.base.errors import (
    DamagedError,
    FingerprintMismatchError,
    FormatError,
    KeyMismatchError,
    StoreError,
    StoreLockedError,
)
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest, ManifestDevice, locked, sealed
from vllm_ssdkv.store.format.segment import Extent, Segment
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.placement.placement import placement_of

SHAPE = SlotGeometry("paged", 2, 3, 1, 8192, summary_pages=1)
MODEL = Fingerprint({"model": "tiny", "layers": 2})
PATHS = ("/a", "/b")
WEIGHTS = (1.0, 2.5)
DEADLINE_S = 60.0


SEGMENT = Segment(0, 4, 3, (0, 1), (Extent(0, 0, 2), Extent(1, 0, 2)))


def manifest() -> Manifest:
    made = Manifest.create(MODEL, [SHAPE] * 2, "a/model")
    for path, capacity, weight in zip(PATHS, (1 << 30, 1 << 31), WEIGHTS, strict=True):
        device = ManifestDevice(path=path, capacity=capacity, weight=weight, files=["", ""])
        made.devices.append(device)
    made.segments = [SEGMENT]
    made.numbers = 4
    return made


def test_round_trip(tmp_path: Path) -> None:
    assert Manifest.load(tmp_path) is None
    mine = manifest()
    mine.opened = 7
    mine.devices[1].files[0] = mine.store
    mine.devices[1].fresh = [1]
    mine.save(tmp_path)
    assert Manifest.load(tmp_path) == mine
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == [NAME, COPY]
    assert (tmp_path / COPY).read_bytes() == (tmp_path / NAME).read_bytes()
    assert Manifest.load_copy(tmp_path) == mine


def test_channel_pages_are_named_where_there_are_any(tmp_path: Path) -> None:
    manifest().save(tmp_path)
    assert b'"channel_pages"' not in (tmp_path / NAME).read_bytes()
    shape = replace(SHAPE, channel_pages=2)
    mine = manifest()
    mine.channel_pages = Manifest.create(MODEL, [shape] * 2).channel_pages
    mine.save(tmp_path)
    found = Manifest.load(tmp_path)
    assert found is not None
    assert found.geometry == shape


def test_the_kind_of_record_is_kept(tmp_path: Path) -> None:
    """In a store with bounds it is not named, so that earlier releases read it; they refuse others
    by the version."""
    mine = manifest()
    assert b"record" not in mine.text
    mine.record = "spread"
    mine.save(tmp_path)
    found = Manifest.load(tmp_path)
    assert found is not None
    assert (found.version, found.geometry) == (6, replace(SHAPE, record="spread"))
    (tmp_path / NAME).write_bytes(sealed(mine.text.replace(b'"spread"', b'"means!"')))
    with pytest.raises(DamagedError, match="record"):
        Manifest.load(tmp_path)
    mine.version = 5  # as development versions wrote it
    (tmp_path / NAME).write_bytes(mine.text)
    found = Manifest.load(tmp_path)
    assert found is not None
    assert found.geometry.record == "spread"


@pytest.mark.parametrize(
    ("version", "summaries", "channels", "scaled_from", "text"),
    [
        (1, 1, 0, 0, "has format version 1, with summary pages, this release reads 1, 4, 5, 6, 7"),
        (
            2,
            1,
            2,
            0,
            "has format version 2, this release reads 1, 4, 5, 6, 7: use another directory",
        ),
        (4, 0, 0, 0, "version 4, and summary_pages is 0"),
        (4, 0, 2, 0, "channel_pages is 2, with 0 summary pages"),
        (4, 1, 0, 2, "scaled_from is 2, with 0 channel pages"),
        (4, 1, 2, 2, "has format version 4, with channels in int8, .* use another directory"),
    ],
)
def test_where_the_tail_lies_is_told_by_the_version(
    tmp_path: Path, version: int, summaries: int, channels: int, scaled_from: int, text: str
) -> None:
    mine = manifest()
    mine.version, mine.summary_pages = version, summaries
    mine.channel_pages, mine.scaled_from = channels, scaled_from
    (tmp_path / NAME).write_bytes(mine.text)
    with pytest.raises(FormatError, match=text):
        Manifest.load(tmp_path)


def test_every_store_is_another() -> None:
    assert manifest().store != manifest().store


def test_what_is_in_the_file(tmp_path: Path) -> None:
    """The names and types that ``docs/format.md`` promises."""
    mine = manifest()
    mine.save(tmp_path)
    data = (tmp_path / NAME).read_bytes()
    content = json.loads(data)
    digits = content.pop("checksum")
    blank = data.replace(digits.encode(), b"0" * 16)
    assert digits == f"{xxhash.xxh3_64_intdigest(blank):016x}"
    assert abs(content.pop("revision") - time.time()) < DEADLINE_S
    assert content == {
        "version": 5,
        "store": mine.store,
        "model": "a/model",
        "fingerprint": {"model": "tiny", "layers": 2},
        "kind": "paged",
        "layers": 2,
        "heads": 3,
        "groups": 1,
        "payload_bytes": 8192,
        "summary_pages": 1,
        "tp_size": 2,
        "devices": [
            {
                "path": path,
                "capacity": capacity,
                "weight": weight,
                "rate": 0.0,
                "files": ["", ""],
                "present": True,
                "fresh": [],
                "gap": [0, 0],
            }
            for path, capacity, weight in (("/a", 1 << 30, 1.0), ("/b", 1 << 31, 2.5))
        ],
        "key_id": "",
        "segments": [
            {
                "first": 0,
                "numbers": 4,
                "slots": 3,
                "lanes": [0, 1],
                "extents": [
                    {"device": 0, "begin": 0, "units": 2},
                    {"device": 1, "begin": 0, "units": 2},
                ],
                "copies": 1,
                "since": 0,
            }
        ],
        "numbers": 4,
        "fresh": [],
        "grows": False,
        "run": "",
        "opened": 0,
        "last_opened": 0,
        "model_digests": [],
        "bound_to": {},
        "suspended": "",
        "state": str(tmp_path.resolve()),
        "inode": tmp_path.stat().st_ino,
    }


def test_revisions_grow_whatever_the_clock_says(tmp_path: Path) -> None:
    """And a manifest that is made anew is newer than what was there before."""
    mine = manifest()
    mine.save(tmp_path)
    first = mine.revision
    assert abs(first - time.time()) < DEADLINE_S
    mine.save(tmp_path)
    assert mine.revision > first
    mine.revision = 1 << 40
    mine.save(tmp_path)
    assert mine.revision == (1 << 40) + 1
    assert Manifest.load(tmp_path) == mine


@pytest.mark.parametrize("version", [1, 4])
def test_what_an_earlier_release_wrote_is_read(tmp_path: Path, version: int) -> None:
    text = (Path(__file__).parents[1] / "golden_earlier" / f"version{version}.json").read_bytes()
    (tmp_path / NAME).write_bytes(text)
    found = Manifest.load(tmp_path)
    assert found is not None
    assert (found.version, found.revision, found.state, found.opened) == (version, 0, "", 2)
    assert [segment.since for segment in found.segments] == [0, 0]
    found.save(tmp_path)
    again = Manifest.load(tmp_path)
    assert again is not None
    assert (again.version, again.segments, again.geometry) == (5, found.segments, found.geometry)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", "not a uuid"),
        ("store", 5),
        ("layers", 0),
        ("payload_bytes", 1 << 31),
        ("last_opened", -1),
        ("tp_size", 1),
        ("tp_size", -1),
        ("kind", "other"),
        ("devices", []),
        ("opened", -1),
        ("key_id", "00"),
        ("key_id", "x" * 32),
        ("key_id", None),
        ("model_digests", ["00"]),
        ("model_digests", ["00", "x"]),
        ("bound_to", {"device": 1.5}),
        ("suspended", False),
        ("fingerprint", {"layers": 1.5}),
        ("unknown", 1),
        ("devices.path", None),
        ("devices.capacity", 0),
        ("devices.weight", 0),
        ("devices.rate", -1),
        ("devices.files", [""]),
        ("devices.files", ["", "x"]),
        ("devices.fresh", [2]),
        ("devices.present", 1),
        ("numbers", 3),
        ("fresh", [-1]),
        ("segments.first", -1),
        ("segments.lanes", [0, 2]),
        ("segments.extents", [{"device": 2, "begin": 0, "units": 2}]),
        ("segments.extents", [{"device": 0, "begin": -1, "units": 2}]),
        ("segments.copies", 3),
        ("segments.since", -1),
        ("revision", -1),
        ("state", None),
        ("segments.unknown", 1),
        ("devices.gap", [2, 1]),
        ("devices.gap", [-1, 1]),
    ],
)
def test_impossible_values_are_refused(tmp_path: Path, field: str, value: object) -> None:
    manifest().save(tmp_path)
    path = tmp_path / NAME
    content = json.loads(path.read_bytes())
    outer, _, inner = field.partition(".")
    if inner:
        content[outer][-1][inner] = value
    else:
        content[outer] = value
    path.write_bytes(sealed(json.dumps(content, indent=1).encode()))
    with pytest.raises(
        FormatError, match=f"{path} is damaged .*: `ssdkv fsck --repair {tmp_path}`"
    ):
        Manifest.load(tmp_path)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    manifest().save(tmp_path)
    data = (tmp_path / NAME).read_bytes()
    for bit in range(0, 8 * len(data), 5):
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        (tmp_path / NAME).write_bytes(spoiled)
        with pytest.raises(FormatError):
            Manifest.load(tmp_path)


def test_a_copy_alone_is_no_new_store(tmp_path: Path) -> None:
    manifest().save(tmp_path)
    (tmp_path / NAME).unlink()
    with pytest.raises(FormatError, match="its copy is there: `ssdkv fsck --repair"):
        Manifest.load(tmp_path)
    (tmp_path / COPY).unlink()
    assert Manifest.load(tmp_path) is None


def test_another_version_is_refused_whatever_else_it_says(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"version": 8, "new": true}')
    with pytest.raises(FormatError, match="format version 8, this release reads 1, 4, 5, 6, 7"):
        Manifest.load(tmp_path)
    text = sealed(manifest().text.replace(b'"version": 5', b'"version": 8'))
    (tmp_path / NAME).write_bytes(text)
    with pytest.raises(FormatError, match="format version 8") as refused:
        Manifest.load(tmp_path)
    assert not isinstance(refused.value, DamagedError)


def test_a_version_that_is_damaged_is_no_other_release_s(tmp_path: Path) -> None:
    """Refused as another version it would stop every start, with a whole copy beside it."""
    (tmp_path / NAME).write_bytes(manifest().text.replace(b'"version": 5', b'"version": 7'))
    with pytest.raises(DamagedError, match="its checksum"):
        Manifest.load(tmp_path)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    manifest().save(tmp_path)
    data = (tmp_path / NAME).read_bytes()
    for length in range(len(data)):
        (tmp_path / NAME).write_bytes(data[:length])
        with pytest.raises(FormatError, match="damaged"):
            Manifest.load(tmp_path)


def test_an_unreadable_or_unwritable_place_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(StoreError, match=r"store\.json: Is a directory"):
        Manifest.load(tmp_path)
    with pytest.raises(StoreError, match="absent: No such file"):
        manifest().save(tmp_path / "absent")
    with pytest.raises(StoreError, match="absent: No such file"), locked(tmp_path / "absent"):
        pass


def test_a_store_of_something_else_is_refused_and_named() -> None:
    mine = manifest()
    mine.check(MODEL)
    other = Fingerprint({"model": "large", "layers": 2})
    with pytest.raises(FingerprintMismatchError, match=r"/a, /b .*model: 'tiny' != 'large'"):
        mine.check(other)


def test_what_it_says_of_devices_and_slots() -> None:
    mine = manifest()
    assert mine.weights() == [1.0, 2.5]
    mine.devices[0].present = False
    assert mine.weights() == [0.0, 2.5]
    assert [device.path for device in mine.present()] == ["/b"]
    assert placement_of(mine).slots == 3
    mine.segments = [SEGMENT, SEGMENT]
    with pytest.raises(FormatError, match=r"segments: .* overlap"):
        placement_of(mine)


def test_changes_exclude_each_other(tmp_path: Path) -> None:
    manifest().save(tmp_path)

    def count(times: int) -> None:
        for _ in range(times):
            with locked(tmp_path, DEADLINE_S):
                found = Manifest.load(tmp_path)
                assert found is not None
                found.opened += 1
                found.save(tmp_path)

    threads = [threading.Thread(target=count, args=(10,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    found = Manifest.load(tmp_path)
    assert found is not None
    assert found.opened == 30


def test_waiting_for_the_lock_ends(tmp_path: Path) -> None:
    refused = pytest.raises(StoreLockedError, match=f"{tmp_path} is in use")
    with locked(tmp_path), refused, locked(tmp_path, 0.05):
        pass
    with locked(tmp_path, 0.0):
        pass


@pytest.mark.parametrize(
    ("made", "given", "text"),
    [
        (b"", b"k" * 16, "is not encrypted, the options give the key 6b6b.* Leave encryption out"),
        (
            b"k" * 16,
            b"",
            "is encrypted with the key 6b6b.*, the options give no key. Give that key",
        ),
        (
            b"k" * 16,
            b"l" * 16,
            "is encrypted with the key 6b6b.* give the key 6c6c.* Give that key",
        ),
    ],
)
def test_another_key_is_refused(made: bytes, given: bytes, text: str) -> None:
    mine = Manifest.create(MODEL, [SHAPE] * 2, "a/model", made)
    mine.devices = manifest().devices
    mine.check_key(made)
    with pytest.raises(KeyMismatchError, match=text) as caught:
        mine.check_key(given)
    assert "the store on /a, /b " in str(caught.value)
    assert "or delete the content of these" in str(caught.value)


def test_a_rule_of_segments_is_told_by_the_version(tmp_path: Path) -> None:
    """Older releases, who would misread such segments, refuse it; of others they read all."""
    mine = manifest()
    mine.save(tmp_path)
    assert mine.version == 5
    assert b'"rule"' not in (tmp_path / NAME).read_bytes()
    mine.segments[0] = structs.replace(mine.segments[0], rule="heads")
    mine.save(tmp_path)
    again = Manifest.load(tmp_path)
    assert again is not None
    assert (again.version, again.segments[0].rule) == (6, "heads")
    mine.version = 5
    (tmp_path / NAME).write_bytes(mine.text)
    with pytest.raises(FormatError, match=r"version 5, and segments\[0\] has a rule"):
        Manifest.load(tmp_path)
