"""Slots with a tail under every fault: what is chosen is right, or its row is lost, and nothing is
served that is wrong.

Beside what :mod:`tests.store.test_store_machine` does with any store, blocks are chosen from: their
summaries are made from frames or read, and frames make room for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.store.tails import tail_of
from tests.store.test_store_machine import (
    PATIENCE_S,
    PICKS,
    StoreMachine,
    _quiet,
    _unhurried,
    content,
    key_of,
    run,
)
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.read.selected_context import SelectedContexts

pytestmark = pytest.mark.slow

__all__ = ["_quiet", "_unhurried"]


class ChoosingMachine(StoreMachine):
    """Names are chosen from, too."""

    tail = 1

    @rule(picks=PICKS, cold=st.booleans(), forget=st.booleans(), fault=st.booleans())
    def choose(self, picks: Sequence[int], cold: bool, forget: bool, fault: bool) -> None:
        """All pages of all blocks, perhaps with nothing of them in DRAM, or no summaries, or while
        a device fails."""
        names = self.some(picks)
        if cold:
            self.store.settle()
            names = self.some(picks)
        if not names:
            return
        index, tiers = self.store.index, self.store.tiers
        slots = np.concatenate([index.lookup([key_of(name)]) for name in names])
        index.pin(slots)
        tiers.extend_context("row", 0, slots)
        if fault:
            self.damaged.add(0)
            self.store.faults({"kind": "eio", "op": "read", "device": 0})
        complete = self._bring_headers(slots, names)
        if cold:  # the hit has brought them to DRAM
            tiers.frames.forget(slots)
        if forget and tiers._summaries is not None:
            tiers._summaries.forget(slots)
        lost: list[int] = []
        if complete:
            chosen = tiers.choose([slots], [0])
            assert chosen.left_out == set()
            self._compare(chosen, names)
            assert not chosen.poisoned or self.damaged, "a healthy store did not deliver"
            lost = chosen.bad
            chosen.close()
            tiers.rebalance_dram([slots], [0])
        self.store.faults()
        tiers.drop_context("row")
        for slot in set(lost):
            index.drop(slot)
        index.unpin(slots)
        self.store.take_reports()

    def _bring_headers(self, slots: np.ndarray, names: Sequence[int]) -> bool:
        """As a hit does before its blocks are chosen from."""
        index, tiers = self.store.index, self.store.tiers
        nothing = np.zeros(0, dtype=np.int64)
        keys = tuple(map(key_of, names))
        tiers.load(LoadJob("row", slots, index.epochs(slots), keys, nothing))
        outcomes: list[LoadOutcome] = []
        end = time.monotonic() + PATIENCE_S
        while not outcomes:
            outcomes = tiers.take_load_outcomes(0.01)
            assert time.monotonic() < end, "the load hangs"
        for slot, epoch in outcomes[0].bad:
            if index.epoch(slot) == epoch:
                index.drop(slot)
        return outcomes[0].complete

    def _compare(self, chosen: SelectedContexts, names: Sequence[int]) -> None:
        geometry, arena = self.store.place.geometries[0], self.store.tiers.arena
        record = geometry.payload_bytes // 16
        per_layer = geometry.pages_per_layer
        for layer in range(geometry.layers):
            if chosen.poisoned:
                return
            for at, name in zip(chosen.page_records(layer).tolist(), names, strict=True):
                held = arena.view(at - arena.address, per_layer * record)
                summary = tail_of(geometry, content(name))[0]
                wanted = summary[layer * per_layer * record :][: per_layer * record]
                np.testing.assert_array_equal(held, wanted)
            entries = [(block, page) for block in range(len(names)) for page in range(per_layer)]
            for start in range(0, len(entries), chosen.room):
                part = np.array(entries[start : start + chosen.room], dtype=np.int64)
                fetch = chosen.fetch(chosen.pages(layer, part[:, 0], part[:, 1]))
                good = chosen.complete(fetch, part[:, 0])
                there = fetch.address[good].tolist()
                for (block, page), at in zip(part[good].tolist(), there, strict=True):
                    held = arena.view(at - arena.address, geometry.payload_bytes)
                    wanted = content(names[block])[geometry.first_page(layer) + page]
                    np.testing.assert_array_equal(held, wanted)
                chosen.release(fetch)


class EncryptedChoosingMachine(ChoosingMachine):
    """The same over a store that is encrypted."""

    encrypted = True


class ReplicaChoosingMachine(ChoosingMachine):
    """The same with every block twice."""

    replicas = 2


MACHINES = [ChoosingMachine, EncryptedChoosingMachine, ReplicaChoosingMachine]


@pytest.mark.parametrize(("machine", "examples"), list(zip(MACHINES, (5, 2, 4), strict=True)))
def test_what_is_chosen_is_right_or_lost(machine: type[StoreMachine], examples: int) -> None:
    run(machine, examples, steps=20)


@pytest.mark.soak
@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_chosen_is_right_or_lost_for_long(
    machine: type[StoreMachine], soak_rounds: int
) -> None:
    run(machine, examples=3 * soak_rounds, steps=40)
