"""Page mode: prompts that share a prefix share its slots, within a batch and across batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens, page_mode
from tests.kit.engine import MAX_TOKENS, Engine, Tokens

BLOCK, WINDOW, CHUNK = 32, 128, 256
SHARED = prompts((47 * BLOCK,), seed=3)[0]
TAILS = prompts((1, BLOCK - 1, BLOCK, BLOCK + 1, 500), seed=4)
BATCH = [SHARED, SHARED, *(SHARED + tail for tail in TAILS)]
LATER = [SHARED + tail for tail in prompts((7, 64), seed=5)]
NEWS = prompts((300,), seed=6)[0]


Wanted = Callable[[list[Tokens]], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def next_turn(stock: Stock) -> Tokens:
    """A conversation that begins with the last of ``LATER``: its answer, and then more text."""
    *_, answer = stock.answers("llama", [*BATCH, *LATER])
    return LATER[-1] + list(answer.tokens) + NEWS


@pytest.fixture(scope="module")
def wanted(stock: Stock, next_turn: Tokens) -> Wanted:
    stock.answers("llama", [next_turn])
    return lambda batch: [a.tokens for a in stock.answers("llama", batch)]


@pytest.fixture(scope="module")
def engine(
    models: dict[str, Path], wanted: Wanted, devices: Callable[..., list[dict[str, str]]]
) -> Iterator[Engine]:
    with Engine(
        models["llama"],
        ssdkv=page_mode(devices(), window=WINDOW),
        # Room for three requests at a time.
        kv_tokens=3 * kv_tokens(WINDOW, CHUNK),
        max_num_batched_tokens=CHUNK,
    ) as engine:
        yield engine


def test_within_a_batch(engine: Engine, wanted: Wanted) -> None:
    got = engine.answers(BATCH)
    assert [a.tokens for a in got] == wanted(BATCH)
    engine.settle()
    # The shared blocks are stored once, whoever computed them.
    separate = sum((len(prompt) + MAX_TOKENS - 1) // BLOCK for prompt in BATCH)
    shared = len(SHARED) // BLOCK
    assert engine.ssdkv("slots_stored") <= separate - (len(BATCH) - 1) * shared


def test_across_batches(engine: Engine, wanted: Wanted) -> None:
    before = engine.ssdkv("hit_tokens")
    got = engine.answers(LATER)
    assert [a.tokens for a in got] == wanted(LATER)
    assert [a.cached for a in got] == [len(SHARED)] * len(LATER)
    assert engine.ssdkv("hit_tokens") - before == len(LATER) * len(SHARED)


def test_while_its_owner_still_runs(engine: Engine, wanted: Wanted) -> None:
    first, second = LATER
    engine.add("owner", first)
    while len(engine.step().get("owner", ())) < 10:
        pass
    engine.add("guest", second)
    assert engine.run() == dict(zip(("owner", "guest"), wanted(LATER), strict=True))


def test_turns_of_a_conversation(engine: Engine, wanted: Wanted, next_turn: Tokens) -> None:
    engine.settle()
    (got,) = engine.answers([next_turn])
    assert [got.tokens] == wanted([next_turn])
    # Blocks of the answer are reused as well; the one that its last step filled is not.
    known = (len(LATER[-1]) + MAX_TOKENS - 1) // BLOCK * BLOCK
    assert known - BLOCK <= got.cached <= known
    assert got.cached > len(LATER[-1])


@pytest.mark.parametrize("told", [False, True])
def test_a_reset_beside_a_request_keeps_what_is_stored(
    engine: Engine, wanted: Wanted, told: bool
) -> None:
    """Of HBM's cache alone, and of the connector too."""
    first, second = LATER
    engine.add("owner", first)
    while len(engine.step().get("owner", ())) < 10:
        pass
    assert engine.llm.llm_engine.reset_prefix_cache(True, told)
    assert engine.run() == {"owner": wanted(LATER)[0]}
    (got,) = engine.answers([second])
    assert (got.tokens, got.cached) == (wanted(LATER)[1], (len(second) - 1) // BLOCK * BLOCK)
    assert engine.ssdkv("slots_dropped") == 0


def test_idle_afterwards(engine: Engine) -> None:
    engine.settle()
    assert engine.ssdkv("slots_pinned") == 0
    assert engine.ssdkv("dram_frames_dirty") == 0
