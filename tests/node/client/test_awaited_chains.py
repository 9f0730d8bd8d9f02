"""Waits of requests for blocks that others compute, and their ends."""

from __future__ import annotations

from tests.kit.clock import Clock
from vllm_ssdkv.node.client.awaited_chains import (
    ASK_S,
    LONGEST_S,
    PATIENCE,
    STALL_S,
    AwaitedChains,
)


def test_a_request_asks_at_once_and_then_now_and_then() -> None:
    clock = Clock(0.0)
    chains = AwaitedChains(clock)
    chain = chains.of("a")
    assert chain is chains.of("a")
    assert chain.number != chains.of("b").number
    assert chains.asks_again(chain)
    chains.told(chain, 0)
    assert not chains.asks_again(chain)
    clock.now += ASK_S
    assert chains.asks_again(chain)
    assert chains.take("a") is chain
    assert chains.take("a") is None
    assert len(chains) == 1


def test_it_waits_as_long_as_something_comes() -> None:
    clock = Clock(0.0)
    chains = AwaitedChains(clock)
    chain = chains.of("a")
    assert not chains.overdue(chain, 0.0), "it does not wait"
    for found in range(20):
        chains.told(chain, found)
        clock.now += STALL_S * 0.9
        assert not chains.overdue(chain, None)
    clock.now += STALL_S
    assert chains.overdue(chain, None), "nothing has come for too long"
    chain.begun = None
    assert chains.overdue(chain, None), "it takes over once and for all"


def test_it_waits_no_longer_than_computing_would_take() -> None:
    clock = Clock(0.0)
    chains = AwaitedChains(clock)
    chain = chains.of("a")
    for found in range(10):
        chains.told(chain, found)
        clock.now += 1.0
    assert not chains.overdue(chain, 10.1 / PATIENCE)
    assert chains.overdue(chain, 9.9 / PATIENCE)


def test_it_never_waits_for_ever() -> None:
    clock = Clock(0.0)
    chains = AwaitedChains(clock)
    chain = chains.of("a")
    found = 0
    while not chains.overdue(chain, 1e9):
        found += 1
        chains.told(chain, found)
        clock.now += 1.0
    assert clock.now <= LONGEST_S + 2
