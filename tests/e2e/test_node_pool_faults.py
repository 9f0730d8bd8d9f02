"""Two nodes that engines share, in mode reuse and in page mode, and faults of all kinds.

In `make soak` 50 faults: 7 minutes on two busy cores, 7 s each and one minute to start.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import SOAK_ROUNDS
from tests.e2e.node_pool import ANSWER, KINDS, Answers, Pool, Site, work
from tests.e2e.stock import Stock
from tests.e2e.workload import SMALL_DRAM, kv_tokens

FAULTS = 50 if SOAK_ROUNDS else 3
CAPACITY = "1280MiB" if SOAK_ROUNDS else "768MiB"
"""Capacity of each drive: nothing that a round has stored is evicted in a later one."""

ENGINES = 2
WINDOW, CHUNK = 128, 256

pytestmark = [pytest.mark.rounds, pytest.mark.timeout(7200 if SOAK_ROUNDS else 600)]


@pytest.fixture(scope="module")
def wanted(stock: Stock) -> Answers:
    batch = [p for n in range(FAULTS) for one in work(n, ENGINES) for p in one]
    found = stock.answers("llama", batch, ANSWER, prefix_caching=True)
    return {tuple(p): answer.tokens for p, answer in zip(batch, found, strict=True)}


@pytest.fixture(scope="module")
def sites(root: Path) -> Iterator[list[Site]]:
    made = []
    for number in range(2):
        place = root / f"site{number}"
        place.mkdir()
        made.append(Site(place, CAPACITY, store_share=0.5))
    yield made
    for site in made:
        site.close()


@pytest.fixture(scope="module")
def pool(sites: list[Site], models: dict[str, Path], root: Path, wanted: Answers) -> Iterator[Pool]:
    """An engine in mode reuse and one in page mode; two copies of each block."""
    common = {"nodes": [site.far for site in sites], "replicas": 2, "verify_hits": 0}
    reuse = {**common, "load": "always", "io": {"deadline": 3.0}}
    page = {
        **common,
        "mode": "page",
        "state_dir": str(root / "state"),
        "hbm_window_tokens": WINDOW,
        "dram_gib": SMALL_DRAM,
        "io": {"staging": "4MiB", "deadline": 3.0},
        "offload": {"kind": "node"},
        "engine": {"kv_tokens": kv_tokens(WINDOW, CHUNK), "max_num_batched_tokens": CHUNK},
    }
    with Pool(sites, models["llama"], root, [reuse, page], wanted) as pool:
        pool.connect()
        yield pool


@pytest.mark.parametrize("number", range(FAULTS))
def test_faults_at_random_instants(pool: Pool, number: int) -> None:
    """No wrong token, nobody waits for ever, nothing is left held, and what was durable is found:
    one node of two fails at a time."""
    source = random.Random(f"fault {number}")
    kind, site = KINDS[(3 * number) % len(KINDS)], source.choice(pool.sites)

    def strike() -> Callable[[], None]:
        site.strike(kind, source)
        return lambda: site.mend(kind)

    pool.round(kind, work(number, ENGINES), source, strike)


def test_everything_durable_is_found_in_the_end(pool: Pool) -> None:
    for number in pool.sharing:
        pool.assert_known(number)
    paged = pool.engines[1]
    assert paged.metric("offload_tickets") > 0
    assert paged.metric("offload_steps", by="device") > 0
