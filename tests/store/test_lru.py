"""The LRU list against Python's own ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.store.lru import LruList

SLOTS = 6


@given(st.lists(st.tuples(st.sampled_from(["use", "remove", "pop"]), st.integers(0, SLOTS - 1))))
def test_behaves_like_an_ordered_dictionary(steps: list[tuple[str, int]]) -> None:
    mine = LruList(SLOTS)
    model: OrderedDict[int, None] = OrderedDict()
    for step, slot in steps:
        if step == "pop" and model:
            assert mine.pop() == model.popitem(last=False)[0]
        elif step == "remove" and slot in model:
            mine.remove(slot)
            del model[slot]
        elif step == "use":
            if slot in model:
                mine.remove(slot)
            mine.append(slot)
            model[slot] = None
            model.move_to_end(slot)
        assert list(mine) == list(model)
        assert len(mine) == len(model)
        assert [s in mine for s in range(SLOTS)] == [s in model for s in range(SLOTS)]


def test_an_empty_list_gives_nothing() -> None:
    mine = LruList(1)
    with pytest.raises(IndexError, match="empty"):
        mine.pop()
    mine.append(0)
    assert mine.pop() == 0
    with pytest.raises(IndexError, match="empty"):
        mine.pop()
