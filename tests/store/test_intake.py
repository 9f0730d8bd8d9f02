"""What native code makes of slots as they arrive: checked as the sealer does, and copied."""

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
from vllm_ssdkv.store.arena import Arena
from vllm_ssdkv.store.engine.native import NativeEngine
from vllm_ssdkv.store.engine.protocol import Op
from vllm_ssdkv.store.engine.threads import ThreadsEngine
from vllm_ssdkv.store.engine.uring import UringEngine
from vllm_ssdkv.store.header_batch import key_rows
from vllm_ssdkv.store.layout import SlotGeometry
from vllm_ssdkv.store.sealer import ChecksumSealer

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
        self.sealer = ChecksumSealer(SHAPE, DIGEST, 2, self.arena)
        whole = self.arena.view(0, self.arena.nbytes)
        whole[:] = np.random.default_rng(1).integers(0, 256, len(whole), np.uint8)
        self.sealer.seal(NUMBERS, EPOCHS, KEYS, self.places, self.places)
        self.sealed = whole.copy()
        path.write_bytes(self.sealed.tobytes())
        self.fd = os.open(path, os.O_RDWR)
        self.engines: list[NativeEngine] = [ThreadsEngine([self.fd], self.arena, 4)]
        if _io.has_uring:
            self.engines.append(UringEngine([self.fd], self.arena, 4))

    def intake(
        self,
        hbm: Hbm | None = None,
        *,
        slot_of: NDArray[np.int64] | None = None,
        length: int = SHAPE.slot_bytes,
        missing: NDArray[np.uint8] | None = None,
        first: int = 0,
        step: int = 1,
    ) -> _io.Intake:
        plain = self.sealer.plain_check(NUMBERS, EPOCHS, KEYS)
        assert plain is not None
        which = np.arange(SLOTS) if slot_of is None else slot_of
        return _io.Intake(
            plain.shape,
            np.uint64(self.arena.address) + self.places,
            plain.beginnings.ravel(),
            np.arange(1, SLOTS + 1, dtype=np.uint64) * np.uint64(hbm is not None),
            which,
            np.full(len(which), length, dtype=np.uint32),
            np.zeros(SLOTS, dtype=np.uint8) if missing is None else missing,
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
    made = Desk(tmp_path_factory.mktemp("intake") / "slots")
    yield made
    for engine in made.engines:
        assert engine.close(PATIENCE_S)
    os.close(made.fd)


def test_what_a_native_engine_reads_is_checked_and_copied(desk: Desk) -> None:
    for engine in desk.engines:
        for parts in (1, 7):
            desk.arena.view(0, desk.arena.nbytes)[:] = 0
            hbm = Hbm(SHAPE)
            slot_of = np.repeat(np.arange(SLOTS), parts)
            intake = desk.intake(hbm, slot_of=slot_of, length=SHAPE.slot_bytes // parts)
            batch = desk.read(engine, parts)
            assert intake.follow(batch, PATIENCE_S)
            assert batch.done()
            assert intake.states().tolist() == [1] * SLOTS
            assert sorted(hbm) == list(range(1, SLOTS + 1))
            for slot in range(SLOTS):
                np.testing.assert_array_equal(hbm[slot + 1], desk.payload(slot))
            assert intake.follow(batch, 0.0), "once more is no harm"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    flips=st.sets(st.integers(0, SLOTS * SHAPE.slot_bytes - 1), max_size=8),
    arrived=st.lists(
        st.sampled_from([None, "short", "error", "whole"]), min_size=SLOTS, max_size=SLOTS
    ),
    missing=st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS),
    sample=st.sampled_from([(0, 1), (0, 4), (3, 4), (5, 16)]),
)
def test_only_what_is_right_is_right(
    desk: Desk,
    flips: set[int],
    arrived: list[str | None],
    missing: list[bool],
    sample: tuple[int, int],
) -> None:
    """As the sealer says it of the slots that are there."""
    data = desk.arena.view(0, desk.arena.nbytes)
    data[:] = desk.sealed
    for at in flips:
        data[at] ^= 0x10
    first, step = sample
    hbm = Hbm(SHAPE)
    gone = np.array(missing).astype(np.uint8)
    intake = desk.intake(hbm, missing=gone, first=first, step=step)
    pending = int(np.iinfo(np.int32).min)
    codes = {None: pending, "short": 4096, "error": -5, "whole": SHAPE.slot_bytes}
    results = np.array([codes[one] for one in arrived], dtype=np.int32)
    intake.take(np.full(SLOTS, pending, dtype=np.int32))
    assert intake.states().tolist() == [0] * SLOTS
    intake.take(results)

    seals, headed = desk.sealer.read_headers(NUMBERS, EPOCHS, KEYS, desk.places)
    right = desk.sealer.unseal(seals, 0, desk.places + np.uint64(SHAPE.header_bytes))
    looked_at = np.zeros(right.size, dtype=np.bool_)
    looked_at[first::step] = True
    right |= ~looked_at.reshape(right.shape)
    expected = np.where(~headed, 2, np.where(right.all(axis=1), 1, 3))
    here = np.array([one == "whole" for one in arrived]) & (gone == 0)
    assert intake.states().tolist() == np.where(here, expected, 0).tolist()
    wrong = intake.wrong_pages().reshape(-1, 2).tolist()
    assert wrong == np.argwhere((here & headed)[:, None] & ~right).tolist()
    assert sorted(hbm) == (np.flatnonzero(here & (expected == 1)) + 1).tolist()

    intake.take(np.full(SLOTS, SHAPE.slot_bytes, dtype=np.int32))
    late = np.array([one is None for one in arrived]) & (gone == 0)
    assert intake.states().tolist() == np.where(here | late, expected, 0).tolist()


def test_what_does_not_belong_together_is_refused(desk: Desk) -> None:
    with pytest.raises(ValueError, match="no slot"):
        desk.intake(slot_of=np.array([0, SLOTS]))
    with pytest.raises(ValueError, match="another batch"):
        desk.intake().take(np.zeros(SLOTS + 1, dtype=np.int32))
    with pytest.raises(ValueError, match="another batch"):
        desk.intake().follow(desk.read(desk.engines[0], 7), 1.0)
    with pytest.raises(ValueError, match="does not fit together"):
        desk.intake(step=0)
    with pytest.raises(ValueError, match="into it"):
        _io.SlotShape(4096, 128, 4090, 3, 8192, 6000)
    one = np.ones(1, dtype=np.uint64)
    for offset, size in ((0, 100), (SHAPE.header_bytes + 1000, 6000), (1 << 40, 1)):
        beyond = _io.Stretches(one * np.uint64(offset), one * np.uint64(size), one, one)
        plain = desk.sealer.plain_check(NUMBERS, EPOCHS, KEYS)
        assert plain is not None
        with pytest.raises(ValueError, match="not in one page"):
            _io.Intake(
                plain.shape,
                np.uint64(desk.arena.address) + desk.places,
                plain.beginnings.ravel(),
                np.ones(SLOTS, dtype=np.uint64),
                np.arange(SLOTS),
                np.full(SLOTS, 4096, dtype=np.uint32),
                np.zeros(SLOTS, dtype=np.uint8),
                beyond,
                0,
                1,
            )
