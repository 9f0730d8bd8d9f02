"""Engines that share nodes: each finds what the others stored, whoever is killed or stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import LookupResult

from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.secondary_tier.rig import CHUNK_BYTES, Engine, content, key_of, request_of, running
from vllm_ssdkv.node.protocol.credentials import make_keys
from vllm_ssdkv.node.server.daemon import Node

KEYS = [key_of(number) for number in range(24)]
BAD = {3, 11}
LEASE_S = 2.0
DEADLINE_S = 2.0
LONGEST_S = 30.0
"""Several deadlines, on a busy machine."""
PROMPT_S = 1.5
"""A call of vLLM's thread takes less, on a busy machine; a call of a node that hangs takes 2 s."""

HOOKS = ("lookup", "submit_store", "submit_load", "get_finished_jobs", "touch", "on_schedule_end")

StartNode = Callable[..., Node]


@contextmanager
def two(settings: VllmConfig, **options: object) -> Iterator[tuple[Engine, Engine]]:
    with running(settings, [], **options) as one, running(settings, [], **options) as other:
        yield one, other


@pytest.mark.parametrize("wire", ["unix", "tcp"])
def test_each_engine_finds_what_the_other_stored(
    settings: VllmConfig, start_node: StartNode, tmp_path: Path, wire: str
) -> None:
    options: dict[str, object] = {}
    if wire == "tcp":
        make_keys(tmp_path, 2)
        node = start_node(keys=str(tmp_path), listen=["tcp://127.0.0.1:0"])
        options["node_keys"] = str(tmp_path)
    else:
        node = start_node()
    with two(settings, nodes=[str(node.addresses[0])], **options) as (one, other):
        named = other.arrive(request_of("a name"))
        assert other.stored(KEYS, named) == set()
        other.end(named)
        context = one.begin()
        assert one.looked_up(KEYS[:12], context) == []
        one.compute(range(12))
        assert other.stored(KEYS, other.arrive(request_of("a name"))) == set(range(12))
        other.compute(range(6, 24))
        for engine in (one, other):
            assert engine.recovered(range(24)) == list(range(24))
            assert engine.recovered(range(20, 28)) == list(range(20, 24))
        assert other.tier.chunks.counters.total("slots_stored") == 12
        # A request keeps what it was told: vLLM's scheduler has counted on it.
        assert one.stored(KEYS[:12], context) == set()
        adapted = one.begin(lora=LoRARequest("an adapter", 1, "/none"))
        assert one.stored(KEYS[:12], adapted) == set()
        one.store([key_of(30)], adapted)
        one.settle()
        assert one.tier.chunks.counters.total("stores_skipped", cause="unknown") == 1
        assert other.stored([key_of(30)]) == set()


def test_chunks_belong_to_weights_and_end_with_a_reset(
    settings: VllmConfig, start_node: StartNode
) -> None:
    nodes = [str(start_node().addresses[0])]
    with two(settings, nodes=nodes) as (one, other):
        one.compute(range(8))
        context = one.begin()
        one.store([key_of(8)], context)
        one.reset()  # with a job under way
        one.weights += 1
        assert one.recovered(range(9)) == []
        one.compute(range(4))
        assert one.recovered(range(4)) == list(range(4))
        assert other.recovered(range(9)) == list(range(9))  # of the old weights, as its own are
        with running(settings, [], nodes=nodes, weights_id="others") as third:
            assert third.recovered(range(9)) == []
            third.compute(range(2))
            third.reset()
            assert third.recovered(range(2)) == [0, 1]


def test_a_node_that_stands_still_holds_nobody_up(settings: VllmConfig, node_place: Path) -> None:
    longest: dict[str, float] = {}

    def timed(tier: Any, name: str) -> Callable[..., Any]:  # noqa: ANN401 - ours
        hook = getattr(tier, name)

        def call(*given: Any) -> Any:  # noqa: ANN401 - of vLLM's
            began = time.monotonic()
            result = hook(*given)
            longest[name] = max(longest.get(name, 0.0), time.monotonic() - began)
            return result

        return call

    with NodeProcess(node_place, lease=LEASE_S) as node:
        options = {"nodes": [node.address], "io": {"deadline": DEADLINE_S}}
        with running(settings, [], **options) as engine:
            engine.compute(range(12))
            engine.empty_pool()
            for name in HOOKS:
                setattr(engine.tier, name, timed(engine.tier, name))
            context = engine.begin()
            assert engine.stored(KEYS[:12], context) == set(range(12))
            node.signal(signal.SIGSTOP)
            began = time.monotonic()
            engine.store([key_of(50)], context)
            # The answers of before: they are to be loaded, and are not there.
            assert engine.looked_up(KEYS[:12], context) == []
            assert engine.stored(KEYS[12:], engine.begin()) == set()
            assert time.monotonic() - began < LONGEST_S
            engine.manager.touch(KEYS[:12], context)
            engine.reset()
            assert max(longest.values()) < PROMPT_S, longest
            counters = engine.tier.chunks.counters
            assert counters.total("stores_skipped", cause="node") == 1
            until(lambda: counters.total("node_sessions_lost") >= 1, "a session is counted as lost")
            node.signal(signal.SIGCONT)

            def again() -> bool:
                engine.empty_pool()
                engine.compute(range(60, 61))
                return engine.stored([key_of(60)]) == {0}

            until(again, "the node is used again")


def test_damage_on_a_node_is_named_chunk_by_chunk(
    settings: VllmConfig, start_node: StartNode, node_place: Path
) -> None:
    node = start_node()
    with running(settings, [], nodes=[str(node.addresses[0])]) as engine:
        engine.compute(range(24))
    node.close()
    for file in (node_place / "ssd").rglob("*.data"):
        data = bytearray(file.read_bytes())
        for position in BAD:
            at = data.index(content(KEYS[position]).tobytes()[:64]) + CHUNK_BYTES // 2
            data[at] ^= 0x10
        file.write_bytes(data)
    node = start_node()
    good = [number for number in range(24) if number not in BAD]
    with two(settings, nodes=[str(node.addresses[0])]) as (one, other):
        assert one.stored(KEYS) == set(range(24))
        context = one.begin()
        assert one.looked_up(KEYS, context) == [KEYS[number] for number in good]
        assert one.stored(KEYS, context) == set(good)
        assert other.recovered(range(24)) == good
        assert one.tier.chunks.counters.total("load_failures") >= 1
        one.compute(range(24))
        assert other.recovered(range(24)) == list(range(24))


def test_of_two_nodes_one_may_end(settings: VllmConfig, start_node: StartNode) -> None:
    nodes = [start_node(), start_node("other")]
    options = {"nodes": [str(node.addresses[0]) for node in nodes], "replicas": 2}
    with two(settings, **options) as (one, other):
        one.compute(range(24))
        nodes[0].close()
        assert other.recovered(range(24)) == list(range(24))
        other.compute(range(30, 40))
        assert one.recovered(range(30, 40)) == list(range(30, 40))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("count", [1, 2])
def test_a_request_waits_for_chunks_that_another_engine_computes(
    settings: VllmConfig, start_node: StartNode, count: int
) -> None:
    made = [start_node(f"{at}") for at in range(count)]
    with two(settings, nodes=[str(node.addresses[0]) for node in made]) as (one, other):
        first = one.begin()
        assert one.stored(KEYS[:12], first) == set()  # it computes them from now on
        second = other.begin()
        asked = [other.tier.lookup(key, second) for key in KEYS[:16]]
        for at in (0, 6):
            for _ in range(20):
                other.step()
                asked = [other.tier.lookup(key, second) for key in KEYS[:16]]
                time.sleep(0.005)
            assert asked[at:] == [LookupResult.RETRY] * (16 - at)
            one.store(KEYS[at : at + 6], first)
            one.settle()
        one.end(first)
        assert other.stored(KEYS[:16], second) == set(range(12))
        other.end(second)
        counters = other.tier.chunks.counters
        assert counters.total("prefix_waits", end="served") == 1
        assert counters.total("prefix_waits", end="taken_over") == 0
        stores = [store for node in made for store in node._registry.stores()]
        until(lambda: not any(len(store._chains) for store in stores), "nobody computes any more")
        assert one.stored(KEYS[12:16]) == set()
        assert one.tier.chunks.counters.total("prefix_waits", end="served") == 0


def test_a_request_waits_for_no_engine_that_stores_nothing(
    settings: VllmConfig, start_node: StartNode
) -> None:
    with two(settings, nodes=[str(start_node().addresses[0])]) as (one, other):
        assert one.stored(KEYS, one.begin()) == set()
        assert other.stored(KEYS, other.begin()) == set()
        assert other.tier.chunks.counters.total("prefix_waits", end="taken_over") == 1
