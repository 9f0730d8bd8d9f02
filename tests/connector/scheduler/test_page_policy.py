"""Slots of contexts: what is given up when a node has forgotten what it granted."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.scheduler.page_policy import PagePolicy
from vllm_ssdkv.connector.scheduler.slot_ledger import SlotLedger
from vllm_ssdkv.connector.scheduler.step_draft import StepDraft
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
            rebalancer=nobody,
            weights=nobody,
            pauses=nobody,
            unread=nobody,
        )
        engine = SimpleNamespace(block_tokens=BLOCK, max_model_len=1024, x_shape=None, x_share=0.0)
        parts: Any = SimpleNamespace(
            store=SimpleNamespace(own=own, counters=self.counters, suspension=None),
            slots=self.ledger,
            requests={},
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
