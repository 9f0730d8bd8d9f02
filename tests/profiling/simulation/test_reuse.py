"""Prefix hits, eviction, preemption: the product's index as policy, loads beside steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.profiling.simulation.test_decode import MODEL, drive
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.profiling.simulation.decode import System
from vllm_ssdkv.profiling.simulation.hardware import Gpu, Machine, find, node_costs
from vllm_ssdkv.profiling.simulation.reuse import Background, ReuseStore, StoreShape
from vllm_ssdkv.profiling.simulation.serve import Report, Request, Serving
from vllm_ssdkv.profiling.simulation.storage import Storage
from vllm_ssdkv.profiling.simulation.tiers import Tier, Tiers

BLOCK = 64
TOKEN = MODEL.kv_bytes_per_token()


def serving(store: StoreShape | None, *, drives: float = 1.0, grows: bool = False) -> Serving:
    storage = Storage.alike(drive(drives), 4)
    # Computing is slow, as of a large model, so that what is stored is worth a load.
    gpu = find(Gpu, "a6000").with_figures(flops=1e12)
    machine = Machine(gpu, 16e9, 28e9, 4)
    return Serving(System("reuse", kv="hbm"), machine, storage, MODEL, 4, 512, grows, store)


def shape(blocks: int = 1000, frames: float = 1e12, path: str | None = None) -> StoreShape:
    return StoreShape(blocks * BLOCK * TOKEN, BLOCK, frames, path)


def run(of: Serving, requests: list[Request], nbytes: float = 1e12) -> Report:
    return of.run(requests, Tiers([Tier("hbm", nbytes)]))


def asked(count: int, contexts: int = 1, prompt: int = 4000) -> list[Request]:
    return [
        Request(2.0 * n, prompt, 4, context=f"text {n % contexts}", shared=prompt - 100)
        for n in range(count)
    ]


def test_a_prompt_begins_with_what_was_stored_and_its_own_tokens_are_computed() -> None:
    with_store, without = run(serving(shape()), asked(4)), run(serving(None), asked(4))
    hits = [one.hit for one in with_store.served]
    assert hits == [0, *[3900 // BLOCK * BLOCK] * 3]
    assert with_store.loaded_bytes == 3 * hits[1] * TOKEN
    assert with_store.stored_bytes == hits[1] * TOKEN  # once, however often it is asked for
    first, later = with_store.served[0], with_store.served[3]
    assert later.ttft_s < 0.3 * first.ttft_s
    assert without.served[3].ttft_s == pytest.approx(first.ttft_s, rel=0.01)


def test_blocks_that_are_in_dram_do_not_come_from_drives() -> None:
    cached = replace(shape(), cache=1e12)
    found, cold = run(serving(cached), asked(4)), run(serving(shape()), asked(4))
    assert found.from_dram_bytes == found.loaded_bytes > 0
    assert cold.from_dram_bytes == 0
    assert found.served[3].ttft_s < cold.served[3].ttft_s
    small = run(serving(replace(shape(), cache=10 * BLOCK * TOKEN)), asked(4))
    assert small.from_dram_bytes == 3 * 10 * BLOCK * TOKEN


def test_prompts_that_come_together_find_what_the_first_of_them_computed() -> None:
    """Looked up in their turn; blocks that wait to be written are in DRAM."""
    together = [replace(one, arrival_s=0.0) for one in asked(4)]
    found = run(serving(shape(), drives=0.01), together)
    assert sorted(one.hit for one in found.served)[0] == 0
    assert sum(one.hit > 0 for one in found.served) == 3
    assert found.from_dram_bytes > 0


def test_a_load_that_is_slower_than_computing_is_not_made() -> None:
    slow = run(serving(shape(), drives=0.0005), asked(4))
    # What waits to be written is in DRAM, and costs little; nothing is read from such drives.
    assert slow.loaded_bytes == slow.from_dram_bytes
    assert sum(one.hit > 0 for one in slow.served) < 3


def test_the_least_recently_used_blocks_go_first_and_ends_before_heads() -> None:
    blocks = 3900 // BLOCK
    store = ReuseStore(shape(blocks + blocks // 2), MODEL)
    for text in ("a", "b"):
        keys = store.missing(text, 3900)
        store.order(keys)
        store.written(1)
    assert store.find("b", 3900) == blocks * BLOCK
    assert store.find("a", 3900) == (blocks // 2) * BLOCK
    assert store.evicted == blocks - blocks // 2
    small = run(serving(shape(blocks + 2)), asked(6, contexts=3))
    assert small.evicted_blocks > 0
    assert small.loaded_bytes < run(serving(shape()), asked(6, contexts=3)).loaded_bytes


def test_writes_take_what_loads_leave_and_what_waits_too_long_is_not_stored() -> None:
    of = serving(shape())
    background = Background(of.machine, of.storage, BLOCK * TOKEN)
    keys = [bytes([n]) * 32 for n in range(8)]
    assert background.store(shape(frames=8 * BLOCK * TOKEN), keys, BLOCK * TOKEN)
    assert not background.store(shape(frames=8 * BLOCK * TOKEN), keys, BLOCK * TOKEN)
    assert background.skipped_bytes == 8 * BLOCK * TOKEN
    background.load(1e9)
    need = background.next_end_s()
    assert background.advance(need / 2) == 0
    assert background.take_written() == 0, "loads go first"
    assert background.advance(need / 2 * 1.0001) == 1
    background.advance(1.0)
    assert background.take_written() == 1
    assert background.stored_bytes == 8 * BLOCK * TOKEN


def test_paths_of_others_load_slower_than_a_good_one() -> None:
    of = serving(None)
    seconds = {
        path: Background(of.machine, of.storage, 1 << 20, path).load_s(8e9)
        for path in (None, "lmcache", "vllm-fs")
    }
    assert seconds[None] < min(seconds["lmcache"], seconds["vllm-fs"])
    # All of it is in DRAM before it goes on: a stage after the other.
    assert seconds["lmcache"] > 8e9 / 27.6e9 + 8e9 / 16e9
    assert seconds[None] == pytest.approx(8e9 / 16e9, rel=0.01)
    with pytest.raises(ConfigError, match="paths: 'nfs' is not described"):
        Background(of.machine, of.storage, 1 << 20, "nfs")


def test_a_node_costs_what_was_measured_beside_the_drives() -> None:
    of = serving(None)
    block, nbytes, latency = 1 << 20, 64 << 20, 1e-3
    seconds = {
        node: Background(of.machine, of.storage, block, node=node).load_s(nbytes)
        for node in (None, "unix", "tcp")
    }
    for socket in ("unix", "tcp"):
        costs = node_costs(socket)
        assert 0 < costs.attend < latency
        expected = costs.load + 64 * costs.block + nbytes * costs.byte
        assert seconds[socket] - seconds[None] == pytest.approx(expected)
    assert seconds["tcp"] > seconds["unix"] >= seconds[None]
    with pytest.raises(ConfigError, match="node: got 'tls'; measured are tcp, unix"):
        Background(of.machine, of.storage, block, node="tls")
    near, far = replace(shape(), node=None), replace(shape(), node="tcp")
    found = [run(serving(one), asked(6, contexts=3)) for one in (near, far)]
    assert found[0].loaded_bytes == found[1].loaded_bytes > 0
    assert found[0].seconds < found[1].seconds


def test_the_youngest_is_preempted_where_no_tier_has_room_and_ends_all_the_same() -> None:
    requests = [Request(0.0, 1000, 400)] * 4
    room = 4 * 1100.0 * TOKEN
    found = run(serving(None, grows=True), requests, room)
    assert len(found.served) == 4
    assert sum(one.preempted for one in found.served) > 0
    assert found.served[0].preempted == 0, "the oldest goes on"
    waits = run(serving(None), requests, room)
    assert sum(one.preempted for one in waits.served) == 0
    assert found.tier_bytes["hbm"] <= room
    enough = run(serving(None, grows=True), requests)
    assert sum(one.preempted for one in enough.served) == 0
    assert enough.seconds < found.seconds


def test_a_chunk_of_a_prompt_makes_others_wait_for_no_longer_than_itself() -> None:
    """Chunked prefill: a long prompt does not stop those that decode."""
    requests = [Request(0.0, 100, 3000), Request(0.05, 16000, 4)]
    small = run(serving(None), requests)
    large = run(replace(serving(None), chunk=16000), requests)
    assert small.gap_s(1.0) < 0.2 * large.gap_s(1.0)
    assert small.gap_s(0.5) <= small.gap_s(0.99) <= small.gap_s(1.0)
    made = sum(gap.tokens for gap in small.gaps)
    assert made == sum(one.request.output - 1 for one in small.served)


@given(
    st.lists(
        st.tuples(st.floats(0, 4), st.integers(1, 3), st.integers(200, 3000), st.integers(1, 40)),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
    st.integers(5, 200),
)
def test_with_a_store_all_are_served_and_the_same_run_is_the_same(
    drawn: list[tuple[float, int, int, int]], grows: bool, blocks: int
) -> None:
    requests = [
        Request(at, prompt, output, context=str(context), shared=prompt // 2)
        for at, context, prompt, output in drawn
    ]
    of = serving(shape(blocks), grows=grows)
    room = max(of.kv_bytes(request) for request in requests) * 1.5
    found = run(of, requests, room)
    assert len(found.served) == len(requests)
    for one in found.served:
        assert one.request.arrival_s <= one.first_token_s <= one.end_s <= found.seconds
        assert one.hit <= one.request.shared
    assert found.tier_bytes["hbm"] <= room * (1 + 1e-9)
    assert run(of, requests, room) == found


def test_requests_and_stores_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="request: shared: got 11; 0 to 10 tokens"):
        Request(0, 10, 1, shared=11)
    with pytest.raises(ConfigError, match="store: nbytes: got 1 B; a block of 64 tokens takes"):
        ReuseStore(StoreShape(1.0, BLOCK), MODEL)
    with pytest.raises(ConfigError, match="store: got"):
        StoreShape(0)


@given(
    seed=st.integers(0, 1000),
    factor=st.floats(1.1, 4),
    what=st.sampled_from(["hbm", "bandwidth", "store"]),
    tight=st.booleans(),
)
def test_with_a_store_and_arrivals_more_costs_little(
    seed: int, factor: float, what: str, tight: bool
) -> None:
    """Five percent at most; ten where a store holds less than two prompts and rows are preempted.

    With more room a request comes in earlier: before what it has in common with another is stored,
    so that it is computed twice; or it evicts and displaces others sooner.
    """
    source, now, requests = random.Random(seed), 0.0, []
    for _ in range(12):
        now += source.expovariate(40.0)
        prompt = source.randint(500, 4000)
        text = str(source.randrange(3))
        requests.append(Request(now, prompt, source.randint(4, 40), text, prompt // 2))
    blocks, room = (20 if tight else 1000), 12000.0 * TOKEN
    before = run(serving(shape(blocks), grows=tight), requests, room)
    after = run(
        serving(
            shape(int(blocks * factor) if what == "store" else blocks),
            drives=factor if what == "bandwidth" else 1.0,
            grows=tight,
        ),
        requests,
        room * (factor if what == "hbm" else 1.0),
    )
    assert after.tokens_per_s >= (0.9 if tight else 0.95) * before.tokens_per_s
