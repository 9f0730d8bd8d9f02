"""Native check and copy of slots as they arrive: the check is the codec's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.conftest import Hbm
from vllm_ssdkv import _io
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.integrity.slot_codec import ChecksumCodec
from vllm_ssdkv.store.io.engines.native import NativeEngine
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.io.engines.threads import ThreadsEngine
from vllm_ssdkv.store.io.engines.uring import UringEngine
from vllm_ssdkv.store.memory.arena import Arena

SHAPE = SlotGeometry("opaque", layers=3, heads=1, groups=1, payload_bytes=6000)
SLOTS = 6
NUMBERS = np.arange(40, 40 + SLOTS)
EPOCHS = np.arange(7, 7 + SLOTS)
KEYS = key_rows([bytes([slot]) * 32 for slot in range(SLOTS)])
DIGEST = b"fingerprint 1234"
PATIENCE_S = 60.0
NOWHERE = _io.Stretches(*(np.zeros(0, dtype=np.uint64) for _ in range(4)))


class Desk:
    """Sealed slots in a file, and an arena with room to read them to."""

    def __init__(self, path: Path):
        self.arena = Arena(SLOTS * SHAPE.slot_bytes)
        self.places = np.arange(SLOTS, dtype=np.uint64) * np.uint64(SHAPE.slot_bytes)
        self.codec = ChecksumCodec(SHAPE, DIGEST, 2, self.arena)
        whole = self.arena.view(0, self.arena.nbytes)
        whole[:] = np.random.default_rng(1).integers(0, 256, len(whole), np.uint8)
        self.codec.seal(NUMBERS, EPOCHS, KEYS, self.places, self.places)
        self.sealed = whole.copy()
        path.write_bytes(self.sealed.tobytes())
        self.fd = os.open(path, os.O_RDWR)
        self.engines: list[NativeEngine] = [ThreadsEngine([self.fd], self.arena, 4)]
        if _io.has_uring:
            self.engines.append(UringEngine([self.fd], self.arena, 4))

    def verifier(
        self,
        hbm: Hbm | None = None,
        *,
        parts: int = 1,
        asked: NDArray[np.intp] | None = None,
        first: int = 0,
        step: int = 1,
    ) -> _io.ArrivalVerifier:
        plain = self.codec.plain_check(NUMBERS, EPOCHS, KEYS)
        assert plain is not None
        which = np.arange(SLOTS * parts) if asked is None else asked
        length = SHAPE.slot_bytes // parts
        return _io.ArrivalVerifier(
            plain.shape,
            np.uint64(self.arena.address) + self.places,
            plain.beginnings.ravel(),
            np.arange(1, SLOTS + 1, dtype=np.uint64) * np.uint64(hbm is not None),
            which // parts,
            (which % parts * length).astype(np.uint64),
            np.full(len(which), length, dtype=np.uint32),
            NOWHERE if hbm is None else hbm.stretches(),
            first,
            step,
        )

    def read(self, engine: NativeEngine, parts: int = 1) -> _io.Batch:
        """All slots, in so many parts each."""
        length = SHAPE.slot_bytes // parts
        at = np.arange(SLOTS * parts, dtype=np.uint64) * np.uint64(length)
        device = np.zeros(len(at), dtype=np.uint16)
        batch = engine.submit(Op.READ, device, at, np.full(len(at), length, np.uint32), at)
        assert isinstance(batch, _io.Batch)
        return batch

    def payload(self, slot: int) -> NDArray[np.uint8]:
        """[pages, payload_bytes], as it was sealed."""
        begin = slot * SHAPE.slot_bytes + SHAPE.header_bytes
        pages = self.sealed[begin : begin + SHAPE.pages * SHAPE.page_bytes]
        return pages.reshape(SHAPE.pages, -1)[:, : SHAPE.payload_bytes]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    made = Desk(tmp_path_factory.mktemp("verifier") / "slots")
    yield made
    for engine in made.engines:
        assert engine.close(PATIENCE_S)
    os.close(made.fd)


def test_what_a_native_engine_reads_is_checked_and_copied(desk: Desk) -> None:
    for engine in desk.engines:
        for parts in (1, 7):
            desk.arena.view(0, desk.arena.nbytes)[:] = 0
            hbm = Hbm(SHAPE)
            verifier = desk.verifier(hbm, parts=parts)
            batch = desk.read(engine, parts)
            assert verifier.follow(batch, PATIENCE_S)
            assert batch.done()
            assert verifier.states().tolist() == [1] * SLOTS
            assert sorted(hbm) == list(range(1, SLOTS + 1))
            for slot in range(SLOTS):
                np.testing.assert_array_equal(hbm[slot + 1], desk.payload(slot))
            assert verifier.follow(batch, 0.0), "once more is no harm"


OUTCOMES = {None: int(np.iinfo(np.int32).min), "short": 1000, "error": -5, "whole": 0}
"""What a part may end with; whole is as many bytes as were asked for."""
MOST = SLOTS * 7


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    flips=st.sets(st.integers(0, SLOTS * SHAPE.slot_bytes - 1), max_size=8),
    parts=st.sampled_from([1, 7]),
    gone=st.sets(st.integers(0, MOST - 1), max_size=4),
    odd=st.dictionaries(
        st.integers(0, MOST - 1), st.sampled_from([None, "short", "error"]), max_size=12
    ),
    sample=st.sampled_from([(0, 1), (0, 4), (3, 4), (5, 16)]),
)
def test_only_what_is_right_is_right(
    desk: Desk,
    flips: set[int],
    parts: int,
    gone: set[int],
    odd: dict[int, str | None],
    sample: tuple[int, int],
) -> None:
    """As the sealer says it of the pages and slots that are there. ``gone`` are parts that nobody
    asked for, ``odd`` those that are not there yet, or ended otherwise."""
    data = desk.arena.view(0, desk.arena.nbytes)
    data[:] = desk.sealed
    for at in flips:
        data[at] ^= 0x10
    first, step = sample
    hbm = Hbm(SHAPE)
    asked = np.array([part for part in range(SLOTS * parts) if part not in gone], dtype=np.intp)
    length = SHAPE.slot_bytes // parts
    verifier = desk.verifier(hbm, parts=parts, asked=asked, first=first, step=step)
    ends = [odd.get(part, "whole") for part in asked.tolist()]
    results = np.array([OUTCOMES[end] or length for end in ends], dtype=np.int32)
    verifier.take(np.full(len(asked), OUTCOMES[None], dtype=np.int32))
    assert verifier.states().tolist() == [0] * SLOTS

    seals, headed = desk.codec.read_headers(NUMBERS, EPOCHS, KEYS, desk.places)
    right = desk.codec.unseal(seals, 0, desk.places + np.uint64(SHAPE.header_bytes))
    looked_at = np.zeros(right.size, dtype=np.bool_)
    looked_at[first::step] = True
    right |= ~looked_at.reshape(right.shape)

    def expect(arrived: NDArray[np.intp]) -> None:
        there = np.zeros(SLOTS * SHAPE.slot_bytes, dtype=np.bool_)
        there.reshape(-1, length)[arrived] = True
        there = there.reshape(SLOTS, -1)
        header = there[:, : SHAPE.header_bytes].all(axis=1)
        pages = there[:, SHAPE.header_bytes :].reshape(SLOTS, SHAPE.pages, -1).all(axis=2)
        whole = header & pages.all(axis=1)
        states = np.where(whole, np.where(right.all(axis=1), 1, 3), 0)
        states[header & ~headed] = 2
        assert verifier.states().tolist() == states.tolist()
        assert verifier.wrong_pages().reshape(-1, 2).tolist() == (
            np.argwhere((states == 3)[:, None] & ~right).tolist()
        )
        usable = (header & headed)[:, None] & pages & right
        copied = [hbm.copied(slot + 1).tolist() for slot in range(SLOTS)]
        assert copied == usable.tolist()

    verifier.take(results)
    expect(asked[results == length])
    late = np.array([end is None for end in ends], dtype=np.bool_)
    results[late] = length
    verifier.take(results)
    expect(asked[results == length])


def test_what_does_not_belong_together_is_refused(desk: Desk) -> None:
    with pytest.raises(ValueError, match="no slot"):
        desk.verifier(asked=np.array([0, SLOTS]))
    with pytest.raises(ValueError, match="in the order"):
        desk.verifier(asked=np.array([1, 0]))
    with pytest.raises(ValueError, match="another batch"):
        desk.verifier().take(np.zeros(SLOTS + 1, dtype=np.int32))
    with pytest.raises(ValueError, match="another batch"):
        desk.verifier().follow(desk.read(desk.engines[0], 7), 1.0)
    with pytest.raises(ValueError, match="does not fit together"):
        desk.verifier(step=0)
    with pytest.raises(ValueError, match="into it"):
        _io.SlotShape(4096, 128, 4090, 3, 8192, 6000)
    one = np.ones(1, dtype=np.uint64)
    for offset, size in ((0, 100), (SHAPE.header_bytes + 1000, 6000), (1 << 40, 1)):
        beyond = _io.Stretches(one * np.uint64(offset), one * np.uint64(size), one, one)
        plain = desk.codec.plain_check(NUMBERS, EPOCHS, KEYS)
        assert plain is not None
        with pytest.raises(ValueError, match="not in one page"):
            _io.ArrivalVerifier(
                plain.shape,
                np.uint64(desk.arena.address) + desk.places,
                plain.beginnings.ravel(),
                np.ones(SLOTS, dtype=np.uint64),
                np.arange(SLOTS),
                np.zeros(SLOTS, dtype=np.uint64),
                np.full(SLOTS, 4096, dtype=np.uint32),
                beyond,
                0,
                1,
            )
