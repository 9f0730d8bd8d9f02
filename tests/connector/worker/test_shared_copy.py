"""Two ranks with the same KV, as of latent attention: the first stores it, both load it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kit.waiting import until
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.identity.loaded_model import LoadedModel
from vllm_ssdkv.connector.identity.module_tree import TREE
from vllm_ssdkv.connector.kv_layout import KVLayout, joined_geometry
from vllm_ssdkv.connector.messages import CopyFrames, CopyToDram, Flush, Load, RankReport, StepPlan
from vllm_ssdkv.connector.worker.binding import Binding
from vllm_ssdkv.connector.worker.rank_store import EmbeddedRank
from vllm_ssdkv.connector.worker.worker import SSDKVWorker
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.open import StorePlace, open_rank
from vllm_ssdkv.store.tiered_store import TieredStore

RANKS, BLOCKS, TOKENS = 2, 8, 16
SIZES = {"0.indexer": 132 * TOKENS, "0.latent": 1152 * TOKENS, "1.latent": 1152 * TOKENS}
"""Bytes of a block of each layer."""


def report(worker: SSDKVWorker) -> RankReport:
    worker.collect(idle=False)
    return worker.take_report() or RankReport()


class Rig:
    """Workers, and their caches."""

    def __init__(self, device: Path, ends: ExitStack):
        config = SSDKVConfig.from_extra_config(
            {"devices": [{"path": str(device), "capacity": "16MiB"}], "dram_gib": "16MiB"}
        )
        sizes = tuple(SIZES.values())
        layout = KVLayout(
            tuple(SIZES),
            TOKENS,
            1,
            576,
            torch.bfloat16,
            joined_geometry(sizes),
            ranks=1,
            num_blocks=BLOCKS,
            layer_bytes=sizes,
            sharers=RANKS,
        )
        place = StorePlace(config, [layout.geometry], Fingerprint({"model": "m"}), sharers=RANKS)
        self.files, self.step = device, 0
        self.workers, self.caches = [], []
        for rank in range(RANKS):
            access = EmbeddedRank(open_rank(place, rank, Counters()), TieredStore)
            binding = Binding(
                LoadedModel(torch.nn.Sequential(torch.nn.Linear(2, 2)), str), rank, lambda _: None
            )
            worker = SSDKVWorker(config, layout, access, None, binding)
            caches = {
                name: torch.zeros(BLOCKS, size, dtype=torch.uint8) for name, size in SIZES.items()
            }
            worker.register(caches)
            ends.callback(worker.close)
            self.workers.append(worker)
            self.caches.append(caches)

    def run(self, **orders: object) -> None:
        self.step += 1
        plan = replace(StepPlan(self.step, (0,) * RANKS), **orders)  # type: ignore[arg-type]
        for worker in self.workers:
            worker.begin(plan)
            worker.end(plan)

    def compute(self, seed: int) -> None:
        """The same KV in blocks 1 and 2 of every rank."""
        for caches in self.caches:
            generator = torch.Generator().manual_seed(seed)
            for cache in caches.values():
                cache[1:3].random_(256, generator=generator)

    def store(self, slots: list[int], epoch: int) -> None:
        self.run(
            save=CopyToDram.of([(slot, epoch, at, -1) for at, slot in enumerate(slots, 1)]),
            commit=Flush.of([(slot, epoch, bytes([slot] * 32)) for slot in slots]),
        )
        told: list[tuple[int, int]] = []
        until(lambda: told.extend(report(self.workers[0]).durable) or len(told) == len(slots))
        assert sorted(told) == [(slot, epoch) for slot in slots]
        assert report(self.workers[1]).durable == [], "the scheduler waits for one"

    def load(self, name: str, slots: list[int], epoch: int) -> None:
        """Blocks 4 and 5 get what these slots hold, which is what blocks 1 and 2 have."""
        for caches in self.caches:
            for cache in caches.values():
                cache[4:6] = 0
        where, keys = np.array(slots), tuple(bytes([slot] * 32) for slot in slots)
        epochs, blocks = np.full(len(slots), epoch), np.array([4, 5])
        self.run(loads=[Load(name, where, epochs, keys, blocks, len(slots))])
        for worker, caches in zip(self.workers, self.caches, strict=True):
            ended: set[str] = set()

            def has_ended(worker: SSDKVWorker = worker, ended: set[str] = ended) -> bool:
                worker.collect(idle=False)
                finished, failed = worker.take_loads()
                assert not failed
                ended |= finished
                return bool(ended)

            until(has_ended)
            assert ended == {name}
            for cache in caches.values():
                assert torch.equal(cache[4:6], cache[1:3])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    TREE.install()
    (tmp_path / "ssd").mkdir(mode=0o700)
    with ExitStack() as ends:
        yield Rig(tmp_path / "ssd", ends)


def test_both_ranks_load_what_the_first_has_stored(rig: Rig) -> None:
    """A slot that is used again has its new bytes on both, whatever their memory held before."""
    assert [file.name for file in rig.files.glob("*.data")] == ["rank0.data"]
    for epoch in (1, 2):
        rig.compute(epoch)
        rig.store([3, 4], epoch)
        rig.load(f"hit {epoch}", [3, 4], epoch)
    for name in ("checksum_failures", "header_mismatches"):
        assert not any(worker.counters.total(name) for worker in rig.workers)
    place = {"device": str(rig.files)}
    written = [worker.counters.total("bytes_written", **place) for worker in rig.workers]
    assert written[0] > 0 == written[1]
    assert rig.workers[1].counters.total("bytes_read", **place) > 0


def test_the_rank_that_reads_copies_no_frames(rig: Rig) -> None:
    """Where slots move, the first rank writes them elsewhere."""
    rig.compute(1)
    rig.store([3, 4], 1)
    rig.load("before", [3, 4], 1)
    old, new, keys = np.array([3, 4]), np.array([5, 6]), (bytes([3] * 32), bytes([4] * 32))
    rig.run(copy_frames=CopyFrames(old, np.array([1, 1]), new, np.array([7, 7]), keys))
    told: list[tuple[int, int]] = []
    until(lambda: told.extend(report(rig.workers[0]).durable) or len(told) == 2)
    assert sorted(told) == [(5, 7), (6, 7)]
    other = report(rig.workers[1])
    assert (other.durable, other.failed_writes) == ([], [])
