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
from dataclasses import replace
from typing import Any

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

GEOMETRY = SlotGeometry("paged", layers=2, heads=2, groups=1, payload_bytes=65000)
BLOCK_TOKENS = 32
CHAIN = 4
DROP_EVERY = 13
DUPLICATE_EVERY = 29
READ_EVERY = 11
PATIENCE_S = 120.0


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def content(number: int) -> NDArray[np.uint8]:
    """Payloads that belong to a block, [pages, payload_bytes]."""
    shape = (GEOMETRY.pages, GEOMETRY.payload_bytes)
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


def say(kind: str, what: object) -> None:
    # One system call: what is said is not held back in a buffer that a kill would lose.
    os.write(sys.stdout.fileno(), f"{kind} {what}\n".encode())


class Victim:
    """Worker and scheduler of one store."""

    def __init__(self, devices: list[str], state_dir: str, *, encrypted: bool):
        options: dict[str, object] = {
            "mode": "page",
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
        geometry = replace(GEOMETRY, encrypted=encrypted)
        place = StorePlace(config, [geometry], Fingerprint({"model": "none"}))
        self.counters = Counters()
        self.opened: OpenStore = open_rank(place, 0, self.counters)
        self.index: SlotIndex
        self.index, self.rebalancer = open_index(place)
        assert self.index._journal is not None
        self.journal: Journal = self.index._journal
        self.copied: dict[int, NDArray[np.uint8]] = {}
        self.store = ContextStore(
            self.opened.files,
            self.opened.arena,
            self.opened.plan,
            self.opened.num_slots,
            BLOCK_TOKENS,
            self._copy_in,
            scrub_rate=config.io.scrub_rate,
        )
        # Not only when the store rests: kills, writes and the scrub shall meet.
        assert self.store._scrubber is not None
        self.store._scrubber._idle = lambda: True
        self.under_way: dict[int, int] = {}
        self.newest: list[int] = []
        """Blocks that became durable a short while ago."""
        self.reads = 0

    def _payloads(self, frame: int) -> NDArray[np.uint8]:
        pages = self.store.frames.view(frame)[self.opened.files.geometry.header_bytes :]
        return pages.reshape(GEOMETRY.pages, GEOMETRY.page_bytes)[:, : GEOMETRY.payload_bytes]

    def _copy_in(self, frames: NDArray[np.int32], block_ids: NDArray[np.int64]) -> None:
        for frame, block in zip(frames.tolist(), block_ids.tolist(), strict=True):
            self.copied[block] = self._payloads(frame).copy()

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
        self.copied.clear()
        self.index.pin(slots)
        self.store.load(
            LoadJob(
                "all",
                slots,
                self.index.epochs(slots),
                tuple(map(key_of, numbers)),
                np.arange(1, len(numbers) + 1, dtype=np.int64),
            )
        )
        outcomes = until(self.store.take_load_outcomes, "the load hangs", seconds=PATIENCE_S)
        assert outcomes[0].complete, outcomes
        assert outcomes[0].bad == []
        for block, number in enumerate(numbers, start=1):
            np.testing.assert_array_equal(self.copied[block], content(number))
        # One by one: as a chain they would be entered the other way round.
        for slot in slots.tolist():
            self.index.unpin(np.array([slot], dtype=np.int64))

    # ---- until the kill ----

    def start(self, numbers: list[int]) -> None:
        """Store blocks as a step of the engine does."""
        slots = self.index.allocate(len(numbers))
        done = 0
        while done < len(slots):
            frames = self.store.reserve_frames(slots[done:], wait=True)
            assert len(frames), "no frame in time"
            part = slice(done, done + len(frames))
            for frame, number in zip(frames.tolist(), numbers[part], strict=True):
                self._payloads(frame)[:] = content(number)
            keys = [key_of(n) for n in numbers[part]]
            self.store.flush(slots[part], self.index.epochs(slots[part]), keys)
            done += len(frames)
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
        durable, failed = self.store.take_write_results()
        assert not failed, failed
        # A slot that was overwritten between two reads is reported with the epoch it had before.
        bad = [(s, e) for s, e in self.store.take_scrubbed() if e == self.index.epoch(s)]
        assert not bad, bad
        self._tell_of_loss()
        for slot, epoch in durable:
            assert epoch == self.index.epoch(slot)
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
        self.store.close()
        self.opened.close()
        assert self.rebalancer.close()
        assert self.index.close()


def main() -> None:
    task: dict[str, Any] = json.load(sys.stdin)
    victim = Victim(task["devices"], task["state_dir"], encrypted=task["encrypted"])
    say("V", json.dumps(victim.recovered(task["candidates"])))
    say("N", victim.index.num_slots)
    if task["window"]:
        victim.run(task["first"], task["window"])
    victim.close()


if __name__ == "__main__":
    main()
