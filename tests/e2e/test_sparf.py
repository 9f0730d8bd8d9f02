"""SparF in the real engine: the recall model answers by logits from an eighth of its channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.test_sparse import BUDGET, LISTS, PAGE_BYTES, QUESTIONS, Recall
from vllm_ssdkv.attention.sparse import SparseDecode
from vllm_ssdkv.profiling.recall.recall import Task, ask

BLOCK = 64
OPTIONS: dict[str, object] = {"budget": BUDGET, "summaries": "20MiB", "estimate_rest": True}
"""Channels of all questions are half of their KV, of 31 MB."""

TIERS = ("dram", "page_cache", "ssd")

HARD_TASKS: tuple[Task, ...] = ("chain", "multikey")
HARD = [
    ask(task, tokens, seed) for task in HARD_TASKS for tokens in (2048, 3000) for seed in (1, 2)
]


@pytest.fixture(scope="module")
def recall(
    devices: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recall]:
    control = tmp_path_factory.mktemp("faults") / "faults.json"
    made = Recall(devices(4), "sparf", control, OPTIONS, dram="40MiB", block=BLOCK)
    made.start()
    yield made
    made.engine.close()


def fetched(recall: Recall, pages: str, tier: str) -> float:
    return recall.engine.ssdkv("sparse_bytes_fetched", pages=pages, tier=tier)


def kept(recall: Recall, pages: str) -> float:
    return recall.engine.ssdkv("sparse_bytes_kept", pages=pages)


def context_bytes(recall: Recall) -> float:
    """What exact attention would read."""
    return recall.engine.ssdkv("sparse_pages_in_context") * PAGE_BYTES


def assert_sound(recall: Recall) -> None:
    for name in ("checksum_failures", "load_failures", "slots_dropped", "recomputed_requests"):
        assert recall.engine.ssdkv(name) == 0, name


def test_an_eighth_of_pages_chosen_by_an_eighth_of_the_channels(recall: Recall) -> None:
    engine = recall.engine
    assert recall.right() == len(QUESTIONS)
    tokens = sum(len(question.answer) - 1 for question in QUESTIONS)
    assert engine.ssdkv("sparse_selections") == LISTS * tokens
    whole = context_bytes(recall)
    tiers = [fetched(recall, "token", tier) for tier in TIERS]
    assert 0 < sum(tiers) <= BUDGET * whole
    assert sum(tiers) == kept(recall, "token")
    assert 0 < tiers[2] <= 0.13 * whole
    # An eighth of K, which is half of the KV.
    assert fetched(recall, "channel", "dram") == kept(recall, "channel") == whole / 16
    assert fetched(recall, "channel", "ssd") == 0
    assert engine.ssdkv("sparse_rows_exact") == 0
    assert_sound(recall)


def test_needles_among_many_are_told_apart(recall: Recall) -> None:
    """The tasks for which page bounds are too coarse, from the same eighth. With channels in DRAM
    native code chooses, also where it stops for pages that have to be read."""
    with patch.object(SparseDecode, "attend", side_effect=AssertionError("Python has chosen")):
        assert recall.right(HARD) == len(HARD)
    assert recall.engine.ssdkv("sparse_rows_exact") == 0
    assert_sound(recall)


def test_adaptive_by_channels_where_dram_has_room_for_few(recall: Recall) -> None:
    """Requests whose channels do not fit attend to everything, and say so."""
    recall.engine.close()
    tight = {"budget": BUDGET, "summaries": "4MiB", "scorer": "sparf", "mass": 0.99}
    recall.selector, recall.options = "adaptive", tight
    recall.start()
    engine = recall.engine
    assert recall.right() == len(QUESTIONS)
    assert engine.ssdkv("sparse_rows_exact") > 0
    selections = engine.ssdkv("sparse_selections")
    assert 0 < engine.ssdkv("sparse_missing_mass") < 0.5 * selections
    assert_sound(recall)


def test_choices_that_are_kept_and_hot_pages(recall: Recall) -> None:
    """Where queries look up something else they choose at once: no answer is lost."""
    recall.engine.close()
    keep = {"reuse_steps": 8, "reuse_similarity": 0.7, "hbm_pages": "4MiB"}
    recall.selector, recall.options = "sparf", {**OPTIONS, **keep}
    recall.dram = "40MiB"
    recall.start()
    engine = recall.engine
    assert recall.right() == len(QUESTIONS)
    assert recall.right(HARD) == len(HARD)
    lists = engine.ssdkv("sparse_selections")
    assert lists == LISTS * sum(len(question.answer) - 1 for question in QUESTIONS + HARD)
    assert 0 < engine.ssdkv("sparse_selections_reused") < lists
    assert engine.ssdkv("sparse_pages_selected") <= BUDGET * engine.ssdkv("sparse_pages_in_context")
    # Only those who choose look at channels.
    assert 0 < kept(recall, "channel") < context_bytes(recall) / 16
    tiers = [engine.ssdkv("sparse_pages_fetched", tier=t) for t in ("hbm", *TIERS)]
    assert sum(tiers) == engine.ssdkv("sparse_pages_selected")
    assert tiers[0] > 0
    assert engine.ssdkv("hot_pages_places") == (4 << 20) // PAGE_BYTES
    assert engine.ssdkv("sparse_rows_exact") == 0
    assert_sound(recall)


def test_a_device_that_dies_while_tokens_are_decoded(recall: Recall) -> None:
    """Requests go on from what can be read, with a mean V of their own tokens."""

    def strike(step: int) -> None:
        if step == 4:
            recall.faults({"kind": "eio", "device": 2})

    assert recall.right(after_step=strike) == len(QUESTIONS)
    assert recall.engine.ssdkv("device_lost", device=recall.places[2]["path"]) == 1
    assert recall.engine.ssdkv("recomputed_requests") > 0
