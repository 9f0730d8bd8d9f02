"""Marks on slots that hold what nobody has verified yet."""

from __future__ import annotations

from vllm_ssdkv.connector.scheduler.slot_ledger import UnverifiedBlocks


def test_marks_go_with_rewritten_blocks() -> None:
    blocks = UnverifiedBlocks(8)
    for slot in (1, 6):
        blocks.add(slot)
    blocks.rewrite(6, 3)
    blocks.rewrite(2, 4)
    assert blocks.slots().tolist() == [1, 3, 6]


def test_the_new_slot_of_a_verified_block_loses_its_mark() -> None:
    blocks = UnverifiedBlocks(8)
    blocks.add(3)
    blocks.rewrite(2, 3)
    assert blocks.slots().tolist() == []


def test_a_hit_that_was_the_same_vouches_for_all() -> None:
    blocks = UnverifiedBlocks(8)
    blocks.add(1)
    blocks.clear()
    assert blocks.slots().tolist() == []
