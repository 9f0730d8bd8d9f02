"""A process that fills a small store for ever and is killed; run by ``test_store_kill.py``.

Standard input is one JSON object. Both roles of the store live in this process. What it says:

- ``V [...]``: the numbers of the blocks that a restart found, each read and right
- ``X n``: block n is about to be dropped
- ``D n``: block n is durable
- ``L``: the journal has lost records
- ``C {...}``: what it has done so far, of all that a kill shall meet
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.kit.waiting import until
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store import open as opening
from vllm_ssdkv.store.context_store import ContextStore
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.open import StorePlace, open_index, open_rank
from vllm_ssdkv.store.open_store import OpenStore
from vllm_ssdkv.store.read.load_job import LoadJob
from vllm_ssdkv.store.tiered_store import TieredStore

GEOMETRY = SlotGeometry("paged", layers=2, heads=2, groups=1, payload_bytes=65000)
STAGES: Final = tuple(SlotGeometry("opaque", layers, 1, 1, 65000) for layers in (9, 2))
"""Slots of a pipeline: those of the second stage alone would have one unit, the first's two."""

BLOCK_TOKENS = 32
CHAIN = 4
DROP_EVERY = 13
DUPLICATE_EVERY = 29
READ_EVERY = 11
PATIENCE_S = 120.0


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def content(number: int, rank: int, geometry: SlotGeometry) -> NDArray[np.uint8]:
    """Payloads that belong to a block, [pages, payload_bytes]."""
    shape = (geometry.pages, geometry.payload_bytes)
    return np.random.default_rng([number, rank]).integers(0, 256, shape, dtype=np.uint8)


def say(kind: str, what: object) -> None:
    # One system call: what is said is not held back in a buffer that a kill would lose.
    os.write(sys.stdout.fileno(), f"{kind} {what}\n".encode())


class Worker:
    """One rank's half of the store."""

    def __init__(self, place: StorePlace, rank: int, counters: Counters):
        self.rank, self.geometry = rank, place.geometries[rank]
        self.opened: OpenStore = open_rank(place, rank, counters)
        self.copied: dict[int, NDArray[np.uint8]] = {}
        kind = ContextStore if self.geometry.kind == "paged" else TieredStore
        self.store: TieredStore = kind(
            self.opened.files,
            self.opened.arena,
            self.opened.plan,
            self.opened.num_slots,
            BLOCK_TOKENS,
            self._copy_in,
            scrub_rate=place.config.io.scrub_rate,
        )
        # Not only when the store rests: kills, writes and the scrub shall meet.
        assert self.store._scrubber is not None
        self.store._scrubber._idle = lambda: True

    def _payloads(self, frame: int) -> NDArray[np.uint8]:
        shape = self.geometry
        pages = self.store.frames.view(frame)[shape.header_bytes :]
        return pages.reshape(shape.pages, shape.page_bytes)[:, : shape.payload_bytes]

    def _copy_in(self, frames: NDArray[np.int32], block_ids: NDArray[np.int64]) -> None:
        for frame, block in zip(frames.tolist(), block_ids.tolist(), strict=True):
            self.copied[block] = self._payloads(frame).copy()

    def write(self, slots: NDArray[np.int64], epochs: NDArray[np.int64], told: list[int]) -> None:
        """Write blocks into slots."""
        done = 0
        while done < len(slots):
            frames = self.store.reserve_frames(slots[done:], wait=True)
            assert len(frames), "no frame in time"
            part = slice(done, done + len(frames))
            for frame, number in zip(frames.tolist(), told[part], strict=True):
                self._payloads(frame)[:] = content(number, self.rank, self.geometry)
            self.store.flush(slots[part], epochs[part], [key_of(n) for n in told[part]])
            done += len(frames)

    def load(self, numbers: list[int], slots: NDArray[np.int64], epochs: NDArray[np.int64]) -> None:
        """Read blocks, and compare them."""
        self.copied.clear()
        blocks = np.arange(1, len(numbers) + 1, dtype=np.int64)
        self.store.load(LoadJob("all", slots, epochs, tuple(map(key_of, numbers)), blocks))
        outcomes = until(self.store.take_load_outcomes, "the load hangs", seconds=PATIENCE_S)
        assert outcomes[0].complete, outcomes
        assert outcomes[0].bad == []
        for block, number in enumerate(numbers, start=1):
            expected = content(number, self.rank, self.geometry)
            np.testing.assert_array_equal(self.copied[block], expected)

    def close(self) -> None:
        self.store.close()
        self.opened.close()


class Victim:
    """Workers and scheduler of one store.

    ``staged``: it is a pipeline's, and each block is written by one stage after another has told of
    it, now of the larger one and now of the smaller one.
    """

    def __init__(
        self, devices: list[str], state_dir: str, *, encrypted: bool = False, staged: bool = False
    ):
        options: dict[str, object] = {
            "mode": "reuse" if staged else "page",
            "devices": [{"path": path, "capacity": "16MiB", "weight": 1} for path in devices],
            "state_dir": state_dir,
            "dram_gib": "18MiB" if encrypted else "16MiB",
            "io": {"staging": "4MiB", "scrub_rate": "1GiB"},
        }
        if encrypted:
            os.environ["SSDKV_VICTIM_KEY"] = "5a" * 32
            options["encryption"] = {"key_env": "SSDKV_VICTIM_KEY"}
        config = SSDKVConfig.from_extra_config(options)
        # Rewrites of the journal must be among the moments of a kill.
        vars(opening)["Journal"] = functools.partial(Journal, slack_records=64)
        shapes = STAGES if staged else (GEOMETRY,)
        geometries = [replace(one, encrypted=encrypted) for one in shapes]
        place = StorePlace(config, geometries, Fingerprint({"model": "none"}))
        self.counters = Counters()
        self.workers = [Worker(place, rank, self.counters) for rank in range(len(geometries))]
        self.store = self.workers[0].store
        self.index: SlotIndex
        self.index, self.rebalancer = open_index(place)
        assert self.index._journal is not None
        self.journal: Journal = self.index._journal
        self.under_way: dict[int, int] = {}
        self.told: Counter[int] = Counter()
        """Number of workers that have told that a slot is written."""
        self.waiting: list[tuple[Worker, NDArray[np.int64], list[int]]] = []
        """Writes that begin when another worker has told of the same blocks."""
        self.newest: list[int] = []
        """Blocks that became durable a short while ago."""
        self.reads = self.apart = 0

    # ---- after a kill ----

    def recovered(self, candidates: list[int]) -> list[int]:
        """Those of the blocks that are found; all of them are read and compared."""
        gauges = self.index.gauges()
        assert gauges["free"] + gauges["ready"] == self.index.num_slots, gauges
        assert gauges["pinned"] == gauges["writing"] == gauges["lost"] == 0, gauges
        slot_of = {n: s for n in candidates for s in self.index.lookup([key_of(n)]).tolist()}
        assert len(slot_of) == len(set(slot_of.values())) == gauges["ready"], gauges
        numbers = list(slot_of)
        slots = np.array([slot_of[n] for n in numbers], dtype=np.int64)
        if numbers:
            self._load(numbers, slots)
        return numbers

    def _load(self, numbers: list[int], slots: NDArray[np.int64]) -> None:
        self.index.pin(slots)
        for worker in self.workers:
            worker.load(numbers, slots, self.index.epochs(slots))
        # One by one: as a chain they would be entered the other way round.
        for slot in slots.tolist():
            self.index.unpin(np.array([slot], dtype=np.int64))

    # ---- until the kill ----

    def start(self, numbers: list[int]) -> None:
        """Store blocks as a step of the engine does."""
        slots = self.index.allocate(len(numbers))
        first, *others = self.workers if numbers[0] // CHAIN % 2 else self.workers[::-1]
        first.write(slots, self.index.epochs(slots), numbers)
        self.waiting += [(other, slots, numbers) for other in others]
        for slot, number in zip(slots.tolist(), numbers, strict=True):
            assert self.index.publish(slot, key_of(number))
            self.under_way[slot] = number
        self._tell_of_loss()

    def _tell_of_loss(self) -> None:
        """A disk too slow for the journal, which is bounded: it says so, and no promise holds."""
        if self.index.counters["journal_lost_records"]:
            say("L", 0)

    def duplicate(self, number: int) -> None:
        """The same block once more: it must stay private and its slot must come back."""
        slots = self.index.allocate(1)
        assert not self.index.publish(int(slots[0]), key_of(number))
        self.index.unpin(slots)

    def finish(self) -> None:
        """Report what was written."""
        for worker in self.workers:
            durable, failed = worker.store.take_write_results()
            assert not failed, failed
            # A slot that was overwritten between two reads is reported with its epoch of before.
            bad = [(s, e) for s, e in worker.store.take_scrubbed() if e == self.index.epoch(s)]
            assert not bad, bad
            self._tell_of_loss()
            self._written(durable)
        due = [one for one in self.waiting if self.told.keys() >= set(one[1].tolist())]
        for one in due:
            self.waiting.remove(one)
            worker, slots, numbers = one
            worker.write(slots, self.index.epochs(slots), numbers)

    def _written(self, durable: list[tuple[int, int]]) -> None:
        """A worker has written slots, each given with its epoch."""
        for slot, epoch in durable:
            assert epoch == self.index.epoch(slot)
            self.told[slot] += 1
            if self.told[slot] < len(self.workers):
                self.apart += 1
                continue
            del self.told[slot]
            number = self.under_way.pop(slot)
            self.index.durable(slot)
            self._tell_of_loss()
            say("D", number)
            self.newest = [*self.newest[-2 * CHAIN :], number]
            if number % DUPLICATE_EVERY == 0:
                self.duplicate(number)
            if number % DROP_EVERY == 0:
                say("X", number)
                self.index.drop(slot)
            self.index.unpin(np.array([slot], dtype=np.int64))

    def read(self) -> None:
        """A request finds some of the newest blocks."""
        slots = {
            number: slot
            for number in random.sample(self.newest, min(CHAIN, len(self.newest)))
            for slot in self.index.lookup([key_of(number)]).tolist()
        }
        if slots:
            self._load(list(slots), np.array(list(slots.values()), dtype=np.int64))
            self.reads += 1

    def done(self) -> dict[str, float]:
        """How often happened what a kill shall meet."""
        counts = self.index.counters
        return {
            "writes": counts["published"],
            "evictions": counts["evictions"],
            "rewrites": counts["journal_rewrites"],
            "scrubbed": self.counters.total("scrub_bytes"),
            "reads": self.reads,
            "apart": self.apart,
        }

    def run(self, number: int, window: int) -> None:
        """Store block after block, and read some of them."""
        deadline = time.monotonic() + PATIENCE_S
        turn = 0
        while time.monotonic() < deadline:
            turn += 1
            if turn % READ_EVERY == 0:
                self.read()
                say("C", json.dumps(self.done()))
            if self.journal.nbytes > self.journal.max_bytes * 3 // 4:
                self.index.flush()  # the drive is slow: let a rewrite end
            if len(self.under_way) + CHAIN <= window:
                self.start(list(range(number, number + CHAIN)))
                number += CHAIN
            self.finish()
        raise TimeoutError("nobody killed this process")

    def close(self) -> None:
        """End as an engine does that nobody killed."""
        for worker in self.workers:
            worker.close()
        assert self.rebalancer.close()
        assert self.index.close()


def main() -> None:
    task: dict[str, Any] = json.load(sys.stdin)
    kinds = {"encrypted": task["encrypted"], "staged": task["staged"]}
    victim = Victim(task["devices"], task["state_dir"], **kinds)
    say("V", json.dumps(victim.recovered(task["candidates"])))
    say("N", victim.index.num_slots)
    if task["window"]:
        victim.run(task["first"], task["window"])
    victim.close()


if __name__ == "__main__":
    main()
