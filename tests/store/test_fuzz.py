"""Damaged and forged bytes for everything that reads the disk.

Inputs are mutations of real ones; half of them get a right checksum again, so that the fields
behind it are reached. Two things must hold: nothing but the documented errors is raised, and what
is accepted is what this release would have written: encoded again, it is the same bytes.

Every test runs for ``fuzz_seconds``. A failure names the seed and the number of its
input, and shows the input.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from tests.mutation import mutated
from tests.store.conftest import PAGED
from tests.store.headers import encoded
from vllm_ssdkv._index import Replay
from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.fingerprint import DIGEST_BYTES
from vllm_ssdkv.store.format.journal_record import check_header, encode_header
from vllm_ssdkv.store.format.manifest import NAME, Manifest
from vllm_ssdkv.store.format.slot_header import SlotHeader, decode
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS, Superblock, newest

GOLDEN = Path(__file__).parent / "golden"
STORE, DIGEST = UUID(int=5), bytes(range(16))
KINDS = (PUT, DEL) = (1, 2)
RECORD = struct.Struct("<IIQQQ32sQ")
JOURNAL_SLOTS = 1000

Mutate = Callable[[bytes, random.Random], bytes]
Parse = Callable[[bytes], bytes | None]
"""What was accepted, encoded again; None where it was refused as documented."""


def sealed(data: bytes, body: int) -> bytes:
    """The same with the checksum of its first ``body`` bytes right behind them."""
    if len(data) < body + 8:
        return data
    return data[:body] + checksum_bytes(data[:body]).to_bytes(8, "little") + data[body + 8 :]


def fuzz(seeds: list[bytes], parse: Parse, seal: Callable[[bytes], bytes], seconds: float) -> None:
    """Mutate and parse until the time is over."""
    for seed in seeds:
        assert parse(seed) == seed, "a seed is not accepted as it is"
    # The same inputs in every short run, others in every long one.
    first = random.randrange(1 << 32) if "SSDKV_SOAK_FUZZ_S" in os.environ else 1
    end = time.monotonic() + seconds
    number = refused = 0
    while number < 200 or time.monotonic() < end:
        source = random.Random(f"{first} {number}")
        data = mutated(source.choice(seeds), source, source.choice(seeds))
        if source.random() < 0.5:
            data = seal(data)
        try:
            again = parse(data)
        except Exception as error:
            raise AssertionError(f"seed {first}, input {number}: {data!r}") from error
        refused += again is None
        assert again in (None, data), f"seed {first}, input {number} is accepted: {data!r}"
        number += 1
    assert 0 < refused < number


def golden(name: str) -> list[bytes]:
    """The files of that name, decompressed."""
    found = [
        gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for path in sorted(GOLDEN.rglob(name))
    ]
    assert found
    return found


@pytest.mark.rounds
def test_slot_headers(fuzz_seconds: float) -> None:
    size = PAGED.header_bytes

    def header(number: int) -> bytes:
        sums = np.random.default_rng(number).integers(0, 2**64, PAGED.pages, dtype=np.uint64)
        key = bytes([number]) * 32
        one = SlotHeader(key, number, number << 40, number % 3, sums)
        return encoded(one, PAGED, DIGEST).tobytes()

    def parse(data: bytes) -> bytes | None:
        try:
            found = decode(data, PAGED, DIGEST)
        except FormatError:
            return None
        again = encoded(found, PAGED, DIGEST)
        return again.tobytes() + data[size:]  # what follows a header is not its business

    fuzz([header(n) for n in range(1, 5)], parse, lambda d: sealed(d, size - 8), fuzz_seconds)


@pytest.mark.rounds
def test_superblocks(fuzz_seconds: float) -> None:
    seeds = [
        file[offset : offset + BLOCK_BYTES]
        for file in golden("device*.data.gz")
        for offset in COPY_OFFSETS
    ]

    def parse(data: bytes) -> bytes | None:
        try:
            found = Superblock.decode(data)
        except FormatError:
            return None
        # A file's first bytes are read by this one, which must be no more lenient.
        assert newest([b"", data], "a file") == found
        return found.encode()

    at = seeds[0].index(Superblock.decode(seeds[0]).fingerprint.digest)

    def seal(data: bytes) -> bytes:
        text = data[data.find(b"{") : data.rfind(b"}") + 1]
        digest = hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()
        return sealed(data[:at] + digest + data[at + DIGEST_BYTES :], BLOCK_BYTES - 8)

    fuzz(seeds, parse, seal, fuzz_seconds)


@pytest.mark.rounds
def test_manifests(fuzz_seconds: float, tmp_path: Path) -> None:
    def parse(data: bytes) -> bytes | None:
        (tmp_path / NAME).write_bytes(data)
        try:
            found = Manifest.load(tmp_path)
        except FormatError:
            return None
        assert found is not None
        found.save(tmp_path)  # a worker that opens the store does that
        saved = (tmp_path / NAME).read_bytes()
        again = Manifest.load(tmp_path)
        assert again == found
        assert again.text == saved
        return data  # JSON has many spellings, so the bytes may differ from those saved

    fuzz(golden(NAME), parse, lambda d: d, fuzz_seconds)


@pytest.mark.rounds
def test_journal_headers(fuzz_seconds: float) -> None:
    seed = encode_header(STORE, DIGEST)

    def parse(data: bytes) -> bytes | None:
        try:
            check_header(data, STORE, DIGEST)
        except FormatError:
            return None
        return encode_header(STORE, DIGEST) + data[len(seed) :]  # records follow

    others = [encode_header(UUID(int=6), DIGEST), encode_header(STORE, bytes(16))]
    assert all(parse(other) is None for other in others)
    fuzz([seed, seed + bytes(100)], parse, lambda d: sealed(d, len(seed) - 8), fuzz_seconds)


@pytest.mark.rounds
def test_journal_records(fuzz_seconds: float) -> None:
    """Replay against a reader written from ``docs/format.md`` alone."""

    def expected(data: bytes) -> tuple[list[tuple[int, int, bytes]], int]:
        valid, corrupt = [], -(-len(data) // RECORD.size)
        for at in range(0, len(data) - RECORD.size + 1, RECORD.size):
            record = data[at : at + RECORD.size]
            kind, _, slot, epoch, sequence, key, found = RECORD.unpack(record)
            right = found == checksum_bytes(record[:-8])
            if right and kind in KINDS and max(slot, epoch, sequence) < 2**63:
                corrupt -= 1
                if slot < JOURNAL_SLOTS:
                    valid.append((sequence, kind, slot, epoch, key))
        by_slot: dict[int, tuple[int, int, int, bytes]] = {}
        for sequence, kind, slot, epoch, key in sorted(valid, key=lambda record: record[0]):
            by_slot[slot] = (sequence, kind, epoch, key)
        by_key: dict[bytes, tuple[int, int]] = {}
        # We never write a sequence twice; forged records may have it, and have no order then.
        for slot, (_, kind, epoch, key) in sorted(
            by_slot.items(), key=lambda item: (item[1][0], item[0])
        ):
            if kind == PUT:
                by_key.pop(key, None)
                by_key[key] = (slot, epoch)
        return [(slot, epoch, key) for key, (slot, epoch) in by_key.items()], corrupt

    def parse(data: bytes) -> bytes | None:
        found = Replay(JOURNAL_SLOTS)
        found.feed(data)
        live = list(zip(found.slots.tolist(), found.epochs.tolist(), found.keys, strict=True))
        assert (live, found.corrupt) == expected(data)
        return None if found.corrupt else data

    def reseal(data: bytes) -> bytes:
        records = [data[at : at + RECORD.size] for at in range(0, len(data), RECORD.size)]
        return b"".join(sealed(record, RECORD.size - 8) for record in records)

    (file,) = {file[len(encode_header(STORE, DIGEST)) :] for file in golden("journal")}
    fuzz([file, file + file[: 3 * RECORD.size]], parse, reseal, fuzz_seconds)
