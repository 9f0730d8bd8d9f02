"""Segments on their way from the scheduler to workers."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from vllm_ssdkv.store.format.segment import Extent, Rule, Segment


@pytest.mark.parametrize("rule", [msgspec.UNSET, "heads"])
def test_pickled_without_a_name_that_every_module_is_searched_for(rule: Rule) -> None:
    segment = Segment(4, 8, 6, (0, 1, 0), (Extent(0, 2, 9), Extent(1, 0, 5)), 2, 7, rule)
    text = pickle.dumps(segment)
    assert b"UNSET" not in text
    again = pickle.loads(text)
    assert again == segment
    assert msgspec.json.encode(again) == msgspec.json.encode(segment)
