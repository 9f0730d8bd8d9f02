"""The committed stores: still written byte by byte, still read, and as ``docs/format.md`` says."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from tests.store import golden_store as writer
from vllm_ssdkv.store.format.manifest import Manifest
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS, Superblock, newest
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.integrity.cipher import CipherCodec
from vllm_ssdkv.store.integrity.slot_codec import ChecksumCodec, SlotCodec
from vllm_ssdkv.store.integrity.store_key import StoreKey, block_name
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.placement.placement import placement_of

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
FORMAT_PAGE = HERE.parents[1] / "docs" / "format.md"


def committed(name: str) -> dict[str, bytes]:
    """Name to content of every committed file of a store, decompressed."""
    return {
        p.name.removesuffix(".gz"): gzip.decompress(p.read_bytes())
        if p.suffix == ".gz"
        else p.read_bytes()
        for p in (GOLDEN / name).iterdir()
    }


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return committed("plain")


@pytest.fixture(scope="module")
def encrypted() -> dict[str, bytes]:
    return committed("encrypted")


@pytest.fixture(scope="module")
def twice() -> dict[str, bytes]:
    return committed("twice")


@pytest.fixture(scope="module")
def channels() -> dict[str, bytes]:
    return committed("channels")


STORES = ("plain", "encrypted", "twice", "channels", "heads", "spread", "codes", "stages")


@pytest.mark.parametrize("name", STORES)
def test_the_golden_store_is_small(name: str) -> None:
    assert sum(p.stat().st_size for p in (GOLDEN / name).iterdir()) < 64 * 1024


@pytest.mark.parametrize("store", STORES)
def test_this_release_writes_the_same_bytes(store: str) -> None:
    files = committed(store)
    again = writer.STORES[store].files()
    assert again.keys() == files.keys()
    for name, data in files.items():
        differs = np.flatnonzero(
            np.frombuffer(again[name].ljust(len(data)), np.uint8)[: len(data)]
            != np.frombuffer(data, np.uint8)
        )
        assert len(again[name]) == len(data), name
        assert differs.size == 0, f"{name} differs first at byte {differs[:1]}"


@pytest.mark.parametrize("store", STORES)
def test_this_release_reads_it(store: str, tmp_path: Path) -> None:
    golden, files = writer.STORES[store], committed(store)
    for name in ("store.json", "journal"):
        shutil.copy(GOLDEN / store / name, tmp_path / name)
    manifest = Manifest.load(tmp_path)
    assert manifest is not None
    manifest.check_key(golden.key_id)
    manifest.check(writer.FINGERPRINT)
    journal = Journal(
        tmp_path / "journal",
        store=UUID(manifest.store),
        fingerprint=writer.FINGERPRINT.digest,
        num_slots=writer.SLOTS,
        sync_interval_s=None,
    )
    index = SlotIndex(writer.SLOTS, journal, open_number=manifest.opened)
    assert index.counters["journal_corrupt_records"] == 0
    assert index.gauges()["ready"] == 3
    for one in golden.ranks:
        _read_rank(one, manifest, index, files)
    journal._file.close()


def _read_rank(
    golden: writer.Golden, manifest: Manifest, index: SlotIndex, files: Mapping[str, bytes]
) -> None:
    """Read every slot of one rank, and compare it."""
    geometry, digest = golden.geometry, writer.FINGERPRINT.digest
    assert manifest.geometries[golden.rank] == geometry
    placement = placement_of(manifest, golden.rank)
    data = [np.frombuffer(files[golden.data_name(d)], np.uint8) for d in range(placement.devices)]
    for device in range(placement.devices):
        copies = [bytes(data[device][at : at + BLOCK_BYTES]) for at in COPY_OFFSETS]
        block = newest(copies, "golden")
        assert block is not None
        assert block.epoch == 2
        assert block.unit_bytes == geometry.unit_bytes
        assert data[device].size == placement.device_bytes(device)
        assert (block.geometry, block.key_id.strip(b"\0")) == (geometry, golden.key_id)
        assert str(block.device) == manifest.devices[device].files[golden.rank]
        assert Superblock.decode(copies[1]).epoch == 1
    arena = Arena(geometry.slot_bytes)
    codec: SlotCodec = ChecksumCodec(geometry, digest, golden.rank, arena)
    if golden.key_id:
        slots_key = writer.KEY.slots(writer.STORE, golden.rank)
        codec = CipherCodec(geometry, digest, golden.rank, arena, slots_key)
    for slot, (hex_key, counter) in writer.CONTENT.items():
        key = bytes.fromhex(hex_key)
        assert index.lookup([key]).tolist() == [slot]
        assert index.epoch(slot) == writer.epoch(counter)
        whole = arena.view(0, geometry.slot_bytes)
        for found in placement.copies(np.array([slot]), 0, whole.size):
            if found is None:
                continue
            whole[:] = 0
            for at in range(found.device.size):
                begin, length = int(found.offset[at]), int(found.length[at])
                source = data[int(found.device[at])][begin : begin + length]
                whole[int(found.buffer[at]) :][:length] = source
            start = np.zeros(1, dtype=np.uint64)
            epoch = np.array([index.epoch(slot)])
            seals, right = codec.read_headers(np.array([slot]), epoch, key_rows([key]), start)
            assert right.all()
            pages = np.array([geometry.header_bytes], dtype=np.uint64)
            assert codec.unseal(seals, 0, pages).all()
            for number in range(geometry.pages):
                begin = geometry.page_offset(number)
                payload = whole[begin : begin + geometry.payload_bytes]
                assert np.array_equal(payload, golden.page(slot, number))


# ---- the page of the format, taken at its word, without the package ----

Value = int | str
FIELD = re.compile(r"^\| (-?\d+) \| *(\d*) *\| (\w+) \| *`?(\w*)`? *\|", re.MULTILINE)


def table(heading: str) -> list[tuple[int, int | None, str, str]]:
    """Offset, bytes, type and name of each field in the table below a heading."""
    text = FORMAT_PAGE.read_text(encoding="utf-8")
    section = re.split(rf"^#+ {heading}$", text, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
    rows = [(int(m[1]), int(m[2]) if m[2] else None, m[3], m[4]) for m in FIELD.finditer(section)]
    assert rows, heading
    return rows


def fields(heading: str, data: bytes, constants: Mapping[str, Value]) -> dict[str, Value]:
    """Decode by the table; check zeros, the checksum, that no byte is left out, and constants."""
    found: dict[str, Value] = {}
    end = 0
    for offset, size, kind, name in table(heading):
        at = offset if offset >= 0 else len(data) + offset
        if size is None:
            end = len(data) - 8  # a list and what fills up
            continue
        assert at == end, f"{heading}: {name} at {at}, previous field ends at {end}"
        end = at + size
        raw = data[at:end]
        match kind:
            case "zero":
                assert raw == bytes(size)
            case "u32" | "u64":
                assert size == int(kind[1:]) // 8
                found[name] = int.from_bytes(raw, "little")
            case "ascii":
                found[name] = raw.decode("ascii")
            case "uuid":
                found[name] = str(UUID(bytes=raw))
            case "hex":
                found[name] = raw.hex()
            case _:
                raise AssertionError(f"unknown type {kind}")
    assert end == len(data)
    assert found.pop("checksum") == xxhash.xxh3_64_intdigest(data[:-8])
    for name, value in constants.items():
        assert found[name] == value, name
    return found


STORE = "5d5a2f0e-8c5b-4b1e-9a63-0d2f6a4c7b10"
TEXT = b'{"dtype":"bfloat16","layers":3,"model":"golden"}'
DIGEST = hashlib.blake2b(TEXT, digest_size=16).hexdigest()
PAYLOAD, PAGE, HEADER, UNIT = 204_000, 204_800, 4096, 311_296


def test_superblock_as_documented(files: dict[str, bytes]) -> None:
    for device in range(2):
        for epoch, at in ((2, 0), (1, 524_288)):
            block = files[f"device{device}.data"][at : at + 4096]
            constants: dict[str, Value] = {
                "magic": "SSDKVSUP",
                "version": 1,
                "block_bytes": 4096,
                "store": STORE,
                "device": f"00000000-0000-4000-8000-00000000000{'ab'[device]}",
                "rank": 0,
                "channel_pages": 0,
                "scaled_from": 0,
                "record": 0,
                "epoch": epoch,
                "kind": 0,
                "layers": 3,
                "heads": 1,
                "groups": 1,
                "payload_bytes": PAYLOAD,
                "unit_bytes": UNIT,
                "fingerprint": DIGEST,
                "text_bytes": len(TEXT),
                "cipher": 0,
                "key_id": "00" * 16,
                "summary_pages": 0,
            }
            found = fields("Superblock", block, constants)
            assert found.keys() == constants.keys()
            (start,) = [offset for offset, _, _, name in table("Superblock") if name == "text"]
            rest = block[start:-8]
            assert rest == TEXT.ljust(len(rest), b"\0")


def test_superblock_with_channel_pages_as_documented() -> None:
    files = committed("channels")
    constants: dict[str, Value] = {"version": 4, "summary_pages": 1, "channel_pages": 2}
    fields("Superblock", files["device0.data"][:4096], constants)
    manifest = json.loads(files["store.json"])
    assert {name: manifest[name] for name in constants} == constants | {"version": 5}


def test_records_of_mean_and_variance_as_documented() -> None:
    files = committed("spread")
    fields("Superblock", files["device0.data"][:4096], {"version": 5, "record": 2})
    manifest = json.loads(files["store.json"])
    assert (manifest["version"], manifest["record"]) == (6, "spread_with_values")


def test_codes_as_documented() -> None:
    files = committed("codes")
    constants: dict[str, Value] = {"version": 6, "record": 4, "scaled_from": 2}
    fields("Superblock", files["device0.data"][:4096], constants)
    manifest = json.loads(files["store.json"])
    assert (manifest["version"], manifest["record"]) == (6, "codes_2")


def units_by_heads(manifest: Mapping[str, int]) -> list[tuple[int, int]]:
    """Bytes and turn of each unit, by the rule of heads under "Striping"; pages of 4096 bytes."""
    layers, heads, groups = (manifest[name] for name in ("layers", "heads", "groups"))
    units = [(4096, 0)]
    counts = [(layer, heads * groups) for layer in range(layers)]
    counts += [(layers, manifest["summary_pages"])]
    counts += [(layer, manifest["channel_pages"]) for layer in range(layers)]
    for layer, pages in counts:
        of_head = [page * heads // pages for page in range(pages)]
        units += [(4096 * of_head.count(h), layer + h) for h in range(heads) if h in of_head]
    return units


def documented_slot(
    files: dict[str, bytes],
    slot: int,
    copy: int = 0,
    units: Sequence[tuple[int, int]] = ((UNIT, 0), (UNIT, 1)),
    unit_bytes: int = UNIT,
) -> bytes:
    """Read a slot by the rules under "Striping", one unit after the other."""
    (segment,) = [
        s
        for s in json.loads(files["store.json"])["segments"]
        if s["first"] <= slot < s["first"] + s["slots"]
    ]
    lanes, copies = segment["lanes"], segment["copies"]
    order = sorted(range(len(lanes)), key=lambda lane: (lanes.index(lanes[lane]), lane))
    most = max(lanes.count(device) for device in lanes)
    partner = {lane: order[(j + most) % len(order)] for j, lane in enumerate(order)}

    def device_of(s: int, c: int, u: int) -> int:
        lane = (s + units[u][1]) % len(lanes)
        return int(lanes[partner[lane] if c else lane])

    begin_on = {extent["device"]: extent["begin"] for extent in segment["extents"]}
    row, phase = divmod(slot - segment["first"], len(lanes))
    pieces = []
    for unit in range(len(units)):
        device = device_of(phase, copy, unit)
        there = [
            (s, c, u)
            for s in range(len(lanes))
            for c in range(copies)
            for u in range(len(units))
            if device_of(s, c, u) == device
        ]
        size = [units[u][0] for _, _, u in there]
        before = row * sum(size) + sum(size[: there.index((phase, copy, unit))])
        begin = 1_048_576 + begin_on[device] * unit_bytes + before
        pieces.append(files[f"device{device}.data"][begin : begin + units[unit][0]])
    return b"".join(pieces)


@pytest.mark.parametrize("slot", [0, 1, 3])
def test_two_copies_as_documented(
    files: dict[str, bytes], twice: dict[str, bytes], slot: int
) -> None:
    used = HEADER + 3 * PAGE
    whole = documented_slot(files, slot)[:used]
    for copy in range(1 if slot == 3 else 2):
        assert documented_slot(twice, slot, copy)[:used] == whole


@pytest.mark.parametrize("slot", [0, 1, 3])
def test_units_by_heads_as_documented(slot: int) -> None:
    files = committed("heads")
    manifest = json.loads(files["store.json"])
    assert [segment.get("rule") for segment in manifest["segments"]] == ["heads", None]
    pages = 2 * 3 * 2 + 2 + 2 * 4
    whole = 4096 * (1 + pages)
    units = units_by_heads(manifest) if slot < 3 else [(whole, 0)]
    assert sum(size for size, _ in units) == whole
    turns = [0, 0, 1, 2, 1, 2, 3, 2, 3, 0, 1, 2, 1, 2, 3]
    assert slot == 3 or [turn for _, turn in units] == turns
    for copy in range(1 if slot == 3 else 2):
        data = documented_slot(files, slot, copy, units, whole)
        assert data[:8] == b"SSDKVSLT"
        sums = np.frombuffer(data, "<u8", pages, 128).tolist()
        for number in range(pages):
            payload = data[4096 * (1 + number) :][:1000]
            assert payload == bytes((i + 31 * slot + 7 * number) % 251 for i in range(1000))
            assert xxhash.xxh3_64_intdigest(payload) == sums[number]


@pytest.mark.parametrize(("rank", "layers"), [(0, 3), (1, 1)])
def test_slots_of_several_sizes_as_documented(rank: int, layers: int) -> None:
    """All ranks have as many units, which are of each rank's own size."""
    files = committed("stages")
    manifest = json.loads(files["store.json"])
    assert manifest["version"] == 7
    assert manifest["shapes"][rank] == {"layers": layers, "payload_bytes": PAYLOAD}
    mine = (
        files
        if rank == 0
        else files | {f"device{d}.data": files[f"device{d}.rank1.data"] for d in range(2)}
    )
    whole = HEADER + layers * PAGE
    size = -(-whole // 2 // 4096) * 4096
    for device in range(2):
        block = mine[f"device{device}.data"][:4096]
        constants: dict[str, Value] = {"version": 7, "rank": rank, "layers": layers}
        found = fields("Superblock", block, constants | {"unit_bytes": size})
        assert found["device"] == manifest["devices"][device]["files"][rank]
        units = 144 + int(found["text_bytes"])
        assert block[units : units + 4] == (2).to_bytes(4, "little")
        assert block[units + 4 : -8] == bytes(4096 - 8 - units - 4)
    for slot in (0, 1, 3):
        data = documented_slot(mine, slot, units=((size, 0), (size, 1)), unit_bytes=size)
        header = {"rank": rank, "slot": slot, "pages": layers}
        fields("Slot header", data[:HEADER], header)
        sums = np.frombuffer(data, "<u8", layers, 128).tolist()
        for number in range(layers):
            payload = data[HEADER + number * PAGE :][:PAYLOAD]
            first = 31 * slot + 7 * number + 13 * rank
            assert payload[:300] == bytes((i + first) % 251 for i in range(300))
            assert xxhash.xxh3_64_intdigest(payload) == sums[number]


@pytest.mark.parametrize(
    ("slot", "key", "counter"), [(0, "00" * 32, 1), (1, "11" * 32, 4), (3, "33" * 32, 3)]
)
def test_slot_as_documented(files: dict[str, bytes], slot: int, key: str, counter: int) -> None:
    data = documented_slot(files, slot)
    constants: dict[str, Value] = {
        "magic": "SSDKVSLT",
        "version": 1,
        "header_bytes": HEADER,
        "pages": 3,
        "page_bytes": PAGE,
        "payload_bytes": PAYLOAD,
        "rank": 0,
        "slot": slot,
        "epoch": 2 * 2**40 + counter,
        "fingerprint": DIGEST,
        "key": key,
        "salt": "00" * 32,
    }
    found = fields("Slot header", data[:HEADER], constants)
    assert found.keys() == constants.keys()
    sums = np.frombuffer(data, "<u8", 3, 128).tolist()
    assert data[128 + 24 : HEADER - 8] == bytes(HEADER - 8 - 128 - 24)
    for number in range(3):
        begin = HEADER + number * PAGE
        payload = data[begin : begin + PAYLOAD]
        assert payload[:300] == bytes((i + 31 * slot + 7 * number) % 251 for i in range(300))
        assert xxhash.xxh3_64_intdigest(payload) == sums[number]


# ---- the encrypted store, with another implementation of everything ----

KEY = bytes(range(32))
SMALL_PAYLOAD, SMALL_SLOT = 1000, 4 * 4096
SMALL_PAGES = 3
"""One of them is a summary page, which is a page like the others."""


def hkdf(salt: bytes, info: bytes, length: int = 32) -> bytes:
    return HKDF(SHA256(), length, salt, info).derive(KEY)


def test_encrypted_superblock_as_documented(encrypted: dict[str, bytes]) -> None:
    found = fields(
        "Superblock",
        encrypted["device0.data"][:4096],
        {"cipher": 1, "kind": 1, "layers": 2, "summary_pages": 1},
    )
    assert found["key_id"] == hkdf(b"", b"vllm-ssdkv key id", 16).hex()
    assert json.loads(encrypted["store.json"])["key_id"] == found["key_id"]


@pytest.mark.parametrize(
    ("slot", "key", "counter"), [(0, "00" * 32, 1), (1, "11" * 32, 4), (3, "33" * 32, 3)]
)
def test_encrypted_slot_as_documented(
    encrypted: dict[str, bytes], slot: int, key: str, counter: int
) -> None:
    # One unit per slot: slots 0 and 2 follow each other on device 0, slots 1 and 3 on device 1.
    device, place = {0: (0, 0), 1: (1, 0), 3: (1, 1)}[slot]
    begin = 1_048_576 + place * SMALL_SLOT
    data = encrypted[f"device{device}.data"][begin : begin + SMALL_SLOT]
    constants: dict[str, Value] = {
        "slot": slot,
        "pages": SMALL_PAGES,
        "payload_bytes": SMALL_PAYLOAD,
        "key": key,
        "salt": f"{slot + 1:02x}" * 32,
    }
    header = fields("Slot header", data[:4096], constants)
    slots_key = hkdf(UUID(STORE).bytes, b"vllm-ssdkv slots of rank 0")
    info = b"vllm-ssdkv slot" + bytes([slot + 1]) * 32
    slot_key = HKDFExpand(SHA256(), 32, info).derive(slots_key)
    sums, tags = np.frombuffer(data, "<u8", SMALL_PAGES, 128).tolist(), 128 + SMALL_PAGES * 8
    for number in range(SMALL_PAGES):
        begin = 4096 * (1 + number)
        stored = data[begin : begin + SMALL_PAYLOAD]
        assert xxhash.xxh3_64_intdigest(stored) == sums[number]
        associated = (
            bytes.fromhex(DIGEST)
            + (0).to_bytes(4, "little")
            + number.to_bytes(4, "little")
            + slot.to_bytes(8, "little")
            + int(header["epoch"]).to_bytes(8, "little")
            + bytes.fromhex(key)
        )
        tag = data[tags + 16 * number :][:16]
        nonce = number.to_bytes(4, "little") + bytes(8)
        plain = AESGCM(slot_key).decrypt(nonce, stored + tag, associated)
        expected = ((np.arange(SMALL_PAYLOAD) + 31 * slot + 7 * number) % 251).astype(np.uint8)
        assert plain == expected.tobytes()
        with pytest.raises(InvalidTag):
            AESGCM(slot_key).decrypt(nonce, stored + tag, associated[:-1] + b"?")
    own = tags + SMALL_PAGES * 16
    nonce = (4294967295).to_bytes(4, "little") + bytes(8)
    assert AESGCM(slot_key).encrypt(nonce, b"", data[:own]) == data[own : own + 16]
    assert data[own + 16 : 4096 - 8] == bytes(4096 - 8 - own - 16)


def test_names_as_documented() -> None:
    block = bytes(range(64, 96))
    names_key = hkdf(UUID(STORE).bytes, b"vllm-ssdkv block names")
    expected = hashlib.blake2b(block, key=names_key, digest_size=32).digest()
    assert block_name(StoreKey(KEY).names(UUID(STORE)), block) == expected


def test_journal_as_documented(files: dict[str, bytes]) -> None:
    data = files["journal"]
    header = fields(
        "Journal",
        data[:128],
        {
            "magic": "SSDKVJNL",
            "version": 1,
            "header_bytes": 128,
            "record_bytes": 72,
            "store": STORE,
            "fingerprint": DIGEST,
        },
    )
    assert len(header) == 6
    records = [fields("Record", data[at : at + 72], {}) for at in range(128, len(data), 72)]
    assert [(r["kind"], r["slot"], int(r["epoch"]) - 2 * 2**40) for r in records] == [
        (1, 0, 1),
        (1, 1, 2),
        (1, 3, 3),
        (2, 1, 2),
        (1, 1, 4),
        (1, 2, 5),
        (2, 2, 5),
    ]
    assert [r["sequence"] for r in records] == [1, 2, 3, 4, 5, 6, 7]
    assert [str(r["key"])[:2] for r in records] == ["00", "22", "33", "00", "11", "44", "00"]


@pytest.mark.parametrize("name", STORES)
def test_manifest_as_documented(name: str) -> None:
    text = FORMAT_PAGE.read_text(encoding="utf-8").split("## Manifest")[1].split("\n## ")[0]
    members = dict(re.findall(r"^\| `([\w.\[\]]+)` \| (\w+) \|", text, flags=re.MULTILINE))
    found = json.loads(committed(name)["store.json"])
    for member, left_out in (("channel_pages", 0), ("scaled_from", 0), ("record", "bounds")):
        if getattr(writer.STORES[name].geometry, member) == left_out:
            del members[member]
    kinds = {
        "integer": int,
        "text": str,
        "list": list,
        "object": dict,
        "number": (int, float),
        "boolean": bool,
    }
    parts: list[tuple[dict[str, object], str]] = [(found, "")]
    for part in ("devices", "segments"):
        parts += [(entry, f"{part}[].") for entry in found[part]]
    for content, prefix in parts:
        expected = {
            name.removeprefix(prefix): kind
            for name, kind in members.items()
            if name.startswith(prefix) and "." not in name.removeprefix(prefix)
        }
        if not prefix and "shapes" not in content:
            del expected["shapes"]
        if prefix == "segments[]." and "rule" not in content:
            del expected["rule"]
        assert content.keys() == expected.keys()
        for member, kind in expected.items():
            assert isinstance(content[member], kinds[kind]), member


def test_the_bounds_in_the_page_are_those_of_the_code() -> None:
    from vllm_ssdkv.store.index.journal import SLACK_RECORDS, journal_bytes

    text = FORMAT_PAGE.read_text(encoding="utf-8")
    assert f"128 + 72 * (3 * slots + 2 * {SLACK_RECORDS})" in text
    assert f"`2 * live + {SLACK_RECORDS}` records" in text
    assert journal_bytes(1000) == 128 + 72 * (3 * 1000 + 2 * SLACK_RECORDS)
