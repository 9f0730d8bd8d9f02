"""Slots of contexts: admission, and writes to slots that a node has granted and forgotten."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.scheduler.page_policy import PagePolicy
from vllm_ssdkv.connector.scheduler.scheduler_parts import SchedulerStore
from vllm_ssdkv.connector.scheduler.slot_ledger import SlotLedger
from vllm_ssdkv.connector.scheduler.step_draft import StepDraft
from vllm_ssdkv.offload.xcache.x_rule import XShape
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.index.slot_index import SlotIndex

SLOTS = 16
BLOCK = 16


class Granted(SlotIndex):
    """An index of a node, all of whose slots this engine may have."""

    lost = False

    def obtain(self, count: int) -> None:
        del count

    def take_loss(self) -> bool:
        lost, self.lost = self.lost, False
        return lost


@dataclass
class Rig:
    shape: XShape | None = None
    index: Granted = field(default_factory=lambda: Granted(SLOTS, None))
    draft: StepDraft = field(default_factory=StepDraft)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.ledger = SlotLedger(self.index, self.index, 1, self.draft, self.counters)
        nobody: Any = SimpleNamespace()
        own = SimpleNamespace(
            index=self.index,
            shared=self.index,
            alone=None,
            rebalancer=SimpleNamespace(step=lambda **_: None, grow_for=lambda _: False),
            weights=SimpleNamespace(lost=(), may_return=True, reset=lambda: False),
            pauses=SimpleNamespace(state=WriteState.OPEN),
            unread=SimpleNamespace(give_up=lambda: None),
        )
        engine = SimpleNamespace(
            block_tokens=BLOCK, max_model_len=1024, x_shape=self.shape, x_share=1.0
        )
        parts: Any = SimpleNamespace(
            store=SimpleNamespace(own=own, counters=self.counters, suspension=None),
            slots=self.ledger,
            requests={},
            loads={},
            draft=self.draft,
            identities=SimpleNamespace(keys=nobody),
            engine=engine,
            config=SimpleNamespace(window_tokens=64),
        )
        self.policy = PagePolicy(parts)


def test_writes_that_a_node_has_forgotten_are_given_up() -> None:
    rig = Rig()
    slot = rig.ledger.allocate(7)
    rig.ledger.publish(slot, bytes(32), needed=True)
    rig.policy.begin_step()
    assert slot in rig.ledger.writing
    rig.index.lost = True
    rig.policy.begin_step()
    assert not rig.ledger.writing
    assert rig.draft.discard == [slot], "workers write it no more"


@pytest.mark.parametrize(("blocks", "may_find"), [(1, True), (2, False)])
def test_x_spares_no_slots_where_each_block_has_its_own(blocks: int, may_find: bool) -> None:
    """A request that is admitted as X finds no hit: for nothing, if X needs as many slots."""
    shape = XShape(hidden=64, kv_heads=blocks, head_size=33, itemsize=2)
    assert shape.blocks_per_slot(BLOCK, 64) == blocks
    rig = Rig(shape)
    rig.index.reserve(SLOTS - 3)
    request: Any = SimpleNamespace(request_id="a", num_prompt_tokens=60, max_tokens=4)
    waits = rig.policy.admit(request)
    assert rig.policy.may_find("a") == may_find
    assert (waits is None) == (not may_find)


def test_all_parts_of_a_store_are_closed_whichever_fails() -> None:
    closed: list[str] = []

    class Part:
        def __init__(self, name: str):
            self.name = name
            self.rebalancer = self

        def close(self) -> None:
            closed.append(self.name)
            raise OSError(self.name)

    index, policy, own = map(Part, ("index", "policy", "own"))
    store: Any = SchedulerStore
    with pytest.raises(OSError, match="policy"):
        store(index, None, None, policy, Counters(), b"", own).close()
    assert closed == ["own", "index", "policy"]
