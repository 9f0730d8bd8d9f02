"""Four engines of one model on one node: prefixes that all of them ask for at once, and kills.

In `make soak` 20 kills and 50 faults: a kill takes 11 s, a fault 7 s, on two busy cores.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import SOAK_ROUNDS
from tests.e2e.models import prompts
from tests.e2e.node_pool import ANSWER, BLOCK, KINDS, Answers, Pool, Site, whole, work
from tests.e2e.stock import Stock
from tests.kit.engine import Tokens

ENGINES = 4
KILLS = 20 if SOAK_ROUNDS else 2
FAULTS = 50 if SOAK_ROUNDS else 0
"""In `make test`, test_node_pool_faults.py has some."""

CAPACITY = "1536MiB" if SOAK_ROUNDS else "768MiB"
"""Of the drive: nothing that a round has stored is evicted in a later one."""

ROOTS, BRANCHES, ENDS = 8, 5, 5
ROOT, BRANCH = 384, 128

pytestmark = [pytest.mark.rounds, pytest.mark.timeout(3600 if SOAK_ROUNDS else 600)]


def tree() -> list[Tokens]:
    """Two hundred prompts: of each prefix, 40 in all, there are five ends of half a block."""
    roots = prompts([ROOT] * ROOTS, seed=51)
    branches = prompts([BRANCH] * (ROOTS * BRANCHES), seed=52)
    ends = iter(prompts([16] * (ROOTS * BRANCHES * ENDS), seed=53))
    return [
        roots[i // BRANCHES] + branch + next(ends)
        for i, branch in enumerate(branches)
        for _ in range(ENDS)
    ]


BLOCKS = (ROOTS * ROOT + ROOTS * BRANCHES * BRANCH) // BLOCK
"""Different whole blocks of the tree."""


@pytest.fixture(scope="module")
def wanted(stock: Stock) -> Answers:
    rounds = [p for n in range(KILLS + FAULTS) for batch in work(n, ENGINES) for p in batch]
    batch = tree() + rounds
    found = stock.answers("llama", batch, ANSWER, prefix_caching=True)
    return {tuple(p): answer.tokens for p, answer in zip(batch, found, strict=True)}


@pytest.fixture(scope="module")
def site(root: Path) -> Iterator[Site]:
    made = Site(root, CAPACITY)
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool(site: Site, models: dict[str, Path], root: Path, wanted: Answers) -> Iterator[Pool]:
    """Two engines on the node's host, and two behind a network."""
    addresses = [site.near, site.far] * (ENGINES // 2)
    # A deadline of a load, in place of 10 s: what a node that hangs costs.
    given: dict[str, object] = {"load": "always", "verify_hits": 0, "io": {"deadline": 3.0}}
    options = [{"nodes": [address], **given} for address in addresses]
    with Pool([site], models["llama"], root, options, wanted) as pool:
        pool.connect()
        yield pool


def test_two_hundred_requests_at_once_compute_each_prefix_once(pool: Pool) -> None:
    batch = tree()
    random.Random(7).shuffle(batch)
    parts = [batch[number::ENGINES] for number in range(ENGINES)]
    for engine in pool.engines:
        engine.await_chains(1e3)  # whatever else this machine does
    for number, part in enumerate(parts):
        pool.order(number, part)
    found = [pool.taken(number, part) for number, part in enumerate(parts)]
    computed = sum(whole(p) for p in batch) // BLOCK - sum(map(sum, found)) // BLOCK
    overdue = sum(engine.metric("prefix_waits", end="taken_over") for engine in pool.engines)
    served = sum(engine.metric("prefix_waits", end="served") for engine in pool.engines)
    print(f"{computed} blocks of {BLOCKS} computed; waits: {served} served, {overdue} in vain")
    assert (computed, overdue) == (BLOCKS, 0)
    assert served > 0
    pool.idle()
    assert pool.ask(0, batch[:20]) == [whole(p) for p in batch[:20]]
    pool.known += batch[:20]
    for engine in pool.engines:
        engine.await_chains(2.0)


def nothing() -> None:
    """Faults that end by themselves."""


@pytest.mark.parametrize("number", range(KILLS))
def test_kills_at_random_instants(pool: Pool, number: int) -> None:
    source = random.Random(f"kill {number}")
    # Every third is the node's; in the short form there is one of each.
    victim = None if number % 3 == 1 else source.randrange(ENGINES)

    def strike() -> Callable[[], None]:
        if victim is None:
            pool.sites[0].strike("kill", source)
            return lambda: pool.sites[0].mend("kill")
        pool.engines[victim].kill()
        return nothing

    what = "kill of a node" if victim is None else "kill of an engine"
    pool.round(what, work(number, ENGINES), source, strike, victim)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(FAULTS))
def test_faults_at_random_instants(pool: Pool, number: int) -> None:
    source = random.Random(f"fault {number}")
    kind = KINDS[(3 * number + 2) % len(KINDS)]

    def strike() -> Callable[[], None]:
        pool.sites[0].strike(kind, source)
        return lambda: pool.sites[0].mend(kind)

    pool.round(kind, work(KILLS + number, ENGINES), source, strike)


def test_everything_durable_is_found_in_the_end(pool: Pool) -> None:
    for number in pool.sharing:
        pool.assert_known(number)
