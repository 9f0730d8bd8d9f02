"""Look-ups on nodes: asked for once a step, good for a request, and never in vLLM's way."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from tests.kit.waiting import until
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.secondary_tier.node_lookups import NodeLookups


class Node:
    """Says what is stored, when it may."""

    def __init__(self) -> None:
        self.stored: set[bytes] = set()
        self.asked: list[list[bytes]] = []
        self.answers = threading.Event()
        self.answers.set()
        self.broken = False
        self.computed: set[bytes] = set()
        self.awaited: list[tuple[str, list[bytes]]] = []

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked.append(list(keys))
        self.answers.wait()
        if self.broken:
            raise RuntimeError("no luck")
        return [key in self.stored for key in keys]

    def awaits(self, request: str, keys: Sequence[bytes]) -> bool:
        """True if others compute the first of these chunks."""
        self.awaited.append((request, list(keys)))
        if self.broken:
            raise RuntimeError("no luck")
        return keys[0] in self.computed


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def lookups(node: Node, counters: Counters) -> Iterator[NodeLookups]:
    made = NodeLookups(node.find, node.awaits, counters)
    yield made
    made.close()


def answer(lookups: NodeLookups, key: bytes, request: str) -> bool:
    lookups.ask()
    until(lambda: lookups.found(key, request) is not None, "an answer")
    return bool(lookups.found(key, request))


def test_all_of_a_step_is_one_question(lookups: NodeLookups, node: Node) -> None:
    node.stored = {b"a"}
    for request in ("one", "other"):
        for key in (b"a", b"b", b"a"):
            assert lookups.found(key, request) is None
    assert not node.asked
    assert answer(lookups, b"a", "one")
    assert lookups.found(b"b", "one") is False
    assert lookups.found(b"a", "other") is True
    assert node.asked == [[b"a", b"b"]]
    lookups.ask()
    lookups.close()
    assert len(node.asked) == 1


def test_another_request_asks_anew(lookups: NodeLookups, node: Node) -> None:
    assert lookups.found(b"a", "one") is None
    assert not answer(lookups, b"a", "one")
    node.stored = {b"a"}
    assert lookups.found(b"a", "one") is False
    assert lookups.found(b"a", "other") is None
    assert answer(lookups, b"a", "other")
    lookups.forget("one")
    assert lookups.found(b"a", "one") is None


def test_what_was_not_there_to_load_is_not_found_again(lookups: NodeLookups, node: Node) -> None:
    node.stored = {b"a", b"b"}
    for key in (b"a", b"b"):
        lookups.found(key, "one")
    assert answer(lookups, b"a", "one")
    lookups.missed([b"a", b"c"], "one")
    lookups.missed([b"a"], "nobody")
    assert lookups.found(b"a", "one") is False
    assert lookups.found(b"b", "one") is True


def test_an_answer_for_a_request_that_has_ended_is_nobodys(
    lookups: NodeLookups, node: Node
) -> None:
    node.answers.clear()
    node.stored = {b"a"}
    lookups.found(b"a", "one")
    lookups.ask()
    assert lookups.found(b"a", "one") is None  # and nobody waits
    lookups.forget("one")
    node.answers.set()
    lookups.found(b"b", "other")
    assert not answer(lookups, b"b", "other")
    assert lookups.found(b"a", "one") is None


def test_an_error_is_counted_and_nothing_is_found(
    lookups: NodeLookups, node: Node, counters: Counters
) -> None:
    node.stored, node.broken = {b"a"}, True
    lookups.found(b"a", "one")
    assert not answer(lookups, b"a", "one")
    assert counters.total("thread_errors", thread="node") == 2
    node.broken = False
    lookups.found(b"a", "other")
    assert answer(lookups, b"a", "other")


def test_a_request_waits_for_what_others_compute(lookups: NodeLookups, node: Node) -> None:
    node.stored, node.computed = {b"a"}, {b"b", b"c"}
    for group, keys in enumerate((b"abcd", b"xy")):
        for end, key in enumerate(keys):
            assert lookups.found(bytes([key]), "one", group, end) is None
    assert answer(lookups, b"a", "one")
    until(lambda: len(node.awaited) > 2, "it is asked again whether there is something to wait for")
    assert all(asked == ("one", [b"b", b"c", b"d"]) for asked in node.awaited)
    for key in (b"b", b"c", b"d", b"x", b"y"):
        assert lookups.found(key, "one") is None
    lookups.found(b"e", "other")
    assert not answer(lookups, b"e", "other")  # meanwhile
    node.stored |= {b"b", b"y"}
    node.computed = {b"c"}
    until(lambda: node.awaited[-1][1] == [b"c", b"d"])  # what is stored needs no more waiting
    assert answer(lookups, b"b", "one")
    assert answer(lookups, b"y", "one")
    assert lookups.found(b"c", "one") is None
    node.computed = set()
    for key in (b"c", b"d", b"x"):
        assert not answer(lookups, key, "one")


def test_chunks_are_awaited_head_first(lookups: NodeLookups, node: Node) -> None:
    """vLLM looks windows up from their end."""
    lookups.found(b"b", "one", 1, 32)
    lookups.found(b"a", "one", 1, 16)
    assert not answer(lookups, b"a", "one")
    assert node.awaited == [("one", [b"a", b"b"])]
    lookups.found(b"c", "one", 0, 16)  # of another group than the first one
    assert not answer(lookups, b"c", "one")
    assert len(node.awaited) == 1
