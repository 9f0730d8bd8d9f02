"""One stored copy for several ranks with the same KV: the first writes, all read its files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.kit.waiting import until
from tests.store.conftest import BLOCK_TOKENS, OPAQUE, PATIENCE_S, Bytes, array, content, key_of
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.worker.rank_store import EmbeddedRank, StoreWork
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.maintenance.fsck import examined
from vllm_ssdkv.store.open import StorePlace, open_index, open_rank
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.tiered_store import TieredStore

SHARERS = 3
MODEL = Fingerprint({"model": "latent"})
SLOTS = array([0, 3, 5])
KEYS = [key_of(slot) for slot in SLOTS.tolist()]


def pages(store: TieredStore, frame: int) -> Bytes:
    found = store.frames.view(frame)[OPAQUE.header_bytes :].reshape(OPAQUE.pages, -1)
    return found[:, : OPAQUE.payload_bytes]


def took(store: TieredStore, outcomes: list[LoadOutcome]) -> bool:
    outcomes.extend(store.take_load_outcomes())
    return bool(outcomes)


@dataclass
class Rig:
    devices: list[Path]
    config: SSDKVConfig
    place: StorePlace
    ranks: list[EmbeddedRank[TieredStore]]
    stores: list[TieredStore]
    hbm: list[dict[int, Bytes]]
    ends: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def open(cls, devices: list[Path]) -> Rig:
        config = SSDKVConfig.from_extra_config(
            {
                "devices": [{"path": d, "capacity": 16 << 20, "weight": 1} for d in devices],
                "dram_gib": "24MiB",
                "io": {"scrub_rate": 1 << 30},
                "trim": True,
            }
        )
        place = StorePlace(config, [OPAQUE], MODEL, sharers=SHARERS)
        rig = cls(devices, config, place, [], [], [{} for _ in range(SHARERS)])
        for worker in range(SHARERS):
            rank = EmbeddedRank(open_rank(place, worker, Counters()), TieredStore)
            rig.ranks.append(rank)
            rig.ends.callback(rank.close)
            rig.stores.append(rank.start(StoreWork(config, BLOCK_TOKENS, rig.copy_in(worker))))
            rig.ends.callback(rig.stores[-1].close)
        index, rebalancer = open_index(place)
        rig.ends.callback(index.close)
        rig.ends.callback(rebalancer.close)
        return rig

    def copy_in(self, worker: int):
        def copy(frames: np.ndarray, blocks: np.ndarray) -> None:
            for frame, block in zip(frames.tolist(), blocks.tolist(), strict=True):
                self.hbm[worker][block] = pages(self.stores[worker], frame).copy()

        return copy

    def write(self, names: list[int], epochs: np.ndarray) -> None:
        """As a plan has it done: the first writes, the others forget."""
        writer = self.stores[0]
        for frame, name in zip(
            writer.reserve_frames(SLOTS, wait=True).tolist(), names, strict=True
        ):
            pages(writer, frame)[:] = content(OPAQUE, name)
        for store in self.stores[1:]:
            store.abandon(SLOTS)
        writer.flush(SLOTS, epochs, KEYS)
        assert writer.drain(PATIENCE_S)
        assert writer.take_write_results()[1] == []

    def check(self, names: list[int], epochs: np.ndarray) -> None:
        for worker, store in enumerate(self.stores):
            store.load(LoadJob("all", SLOTS, epochs, tuple(KEYS), SLOTS + 1))
            outcomes: list[LoadOutcome] = []
            until(partial(took, store, outcomes))
            assert [outcome.complete for outcome in outcomes] == [True], worker
            for slot, name in zip(SLOTS.tolist(), names, strict=True):
                np.testing.assert_array_equal(self.hbm[worker][slot + 1], content(OPAQUE, name))


@pytest.fixture
def rig(tmp_devices: Callable[[int], list[Path]]) -> Iterator[Rig]:
    made = Rig.open(tmp_devices(2))
    with made.ends:
        yield made


def test_all_ranks_read_what_the_first_has_written(rig: Rig) -> None:
    names = sorted(file.name for device in rig.devices for file in device.glob("*.data"))
    assert names == ["rank0.data"] * 2, "one copy"
    for worker, rank in enumerate(rig.ranks):
        modes = {fcntl.fcntl(d.fd, fcntl.F_GETFL) & os.O_ACCMODE for d in rank.opened.devices}
        assert modes == {os.O_RDONLY if worker else os.O_RDWR}
        assert rank.rank == worker
    for old in ([10, 11, 12], [20, 21, 22]):  # slots are used again: no rank has the old bytes
        epochs = array([old[0]] * 3)
        rig.write(old, epochs)
        rig.check(old, epochs)
    rig.ends.close()
    with examined(rig.devices, rig.place.state, write=False) as found:
        assert found.report.clean, found.report.problems
    again = Rig.open(rig.devices)
    with again.ends:
        again.check(old, epochs)


def test_the_scheduler_waits_for_the_weights_of_every_rank(rig: Rig) -> None:
    settings = Fingerprint({"attention": "a"})
    digests = [bytes([number + 1]) * 16 for number in range(SHARERS)]
    for worker in (1, 0):
        rig.place.tell_weights(worker, digests[worker])
        with pytest.raises(StoreError, match="not every rank"):
            rig.place.bind(settings)
    rig.place.tell_weights(2, digests[2])
    assert rig.place.bind(settings) == digests


def test_files_of_another_start_are_not_read(rig: Rig) -> None:
    file = rig.devices[0] / "rank0.data"
    file.rename(file.with_suffix(".old"))
    with pytest.raises(StoreError, match=r"cannot open .*rank0\.data to read"):
        open_rank(rig.place, 1, Counters())
    file.with_suffix(".old").rename(file)
