"""Requests that come and go: tiers in their order, nobody lost, the same seed the same run."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.profiling.simulation.test_decode import MODEL, drive, setting
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.profiling.simulation.decode import System, decode
from vllm_ssdkv.profiling.simulation.hardware import Gpu, Machine, find
from vllm_ssdkv.profiling.simulation.model_shape import find_model
from vllm_ssdkv.profiling.simulation.reuse import StoreShape
from vllm_ssdkv.profiling.simulation.serve import Report, Request, Serving, draw_requests
from vllm_ssdkv.profiling.simulation.storage import Storage
from vllm_ssdkv.profiling.simulation.systems import (
    attending_drives,
    node_pool,
    ours_offload,
    pool_drives,
)
from vllm_ssdkv.profiling.simulation.tiers import Tier, Tiers

REQUESTS = st.lists(
    st.builds(Request, st.floats(0, 2), st.integers(1, 4000), st.integers(1, 200)),
    min_size=1,
    max_size=8,
)


def tiers(hbm: float = 0, dram: float = 0, drives: float = 1e12) -> Tiers:
    return Tiers([Tier("hbm", hbm), Tier("dram", dram), Tier("drives", drives)])


def serving(drives: int = 2, bandwidth: float = 1.0, link: float = 16e9) -> Serving:
    on = setting(link, link, Storage.alike(drive(bandwidth), drives))
    return Serving(System("s"), on.machine, on.storage, MODEL, most=4)


def run(of: Serving, requests: list[Request], room: Tiers | None = None) -> Report:
    return of.run(requests, room or tiers())


@given(requests=REQUESTS)
def test_all_are_served_and_littles_law_holds(requests: list[Request]) -> None:
    found = run(serving(), requests)
    assert sorted(map(hash, (one.request for one in found.served))) == sorted(map(hash, requests))
    for one in found.served:
        assert one.request.arrival_s <= one.first_token_s <= one.end_s <= found.seconds
    again = run(serving(), requests)
    assert again == found
    # Mean number present, by the clock, against arrivals times stay.
    events = sorted(
        [(one.request.arrival_s, 1) for one in found.served]
        + [(one.end_s, -1) for one in found.served]
    )
    area = present = last = 0.0
    for at, change in events:
        area += present * (at - last)
        present, last = present + change, at
    stay = sum(one.end_s - one.request.arrival_s for one in found.served)
    assert area == pytest.approx(stay)


@given(
    count=st.integers(1, 4),
    prompt=st.integers(1, 5000),
    output=st.integers(1, 100),
    factor=st.floats(1.1, 4),
    what=st.sampled_from(["hbm", "dram", "bandwidth", "link", "drives"]),
)
def test_more_of_anything_is_not_slower_for_a_fixed_batch(
    count: int, prompt: int, output: int, factor: float, what: str
) -> None:
    requests = [Request(0.0, prompt, output)] * count
    need = serving().kv_bytes(requests[0]) * count
    room = {"hbm": need / 5, "dram": need / 5}
    before = run(serving(), requests, tiers(**room))
    if what in room:
        room[what] *= factor
    after = run(
        serving(
            drives=3 if what == "drives" else 2,
            bandwidth=factor if what == "bandwidth" else 1.0,
            link=16e9 * (factor if what == "link" else 1.0),
        ),
        requests,
        tiers(**room),
    )
    assert after.tokens_per_s >= before.tokens_per_s * (1 - 1e-9)


def test_lower_tiers_are_asked_before_allocation_fails() -> None:
    room = tiers(hbm=100, dram=100, drives=100)
    assert room.place("a", 150)
    assert room.place("b", 120)
    assert room.most() == {"hbm": 100, "dram": 100, "drives": 70}
    assert not room.place("c", 31)
    assert room.place("d", 30)
    room.free("a")
    assert room.parts() == pytest.approx({"hbm": 0, "dram": 50 / 150, "drives": 100 / 150})
    assert room.place("c", 31)
    assert room.parts()["hbm"] == pytest.approx(31 / 181)


def test_what_never_fits_names_the_bound_and_by_how_much() -> None:
    room = tiers(hbm=1 << 20, dram=2 << 20, drives=4 << 20)
    text = "KV of 8 MiB is 1 MiB more than all tiers hold .hbm 1 MiB, dram 2 MiB, drives 4 MiB."
    with pytest.raises(ConfigError, match=text):
        room.place("a", 8 << 20)
    assert room.place("b", 1)
    with pytest.raises(ConfigError, match="b: placed already"):
        room.place("b", 1)
    with pytest.raises(ConfigError, match="request 0: KV of"):
        run(serving(), [Request(0, 100_000, 1)], tiers(drives=1e6))
    with pytest.raises(ConfigError, match="requests: none"):
        run(serving(), [])
    with pytest.raises(ConfigError, match="tiers: got"):
        Tiers([])
    with pytest.raises(ConfigError, match="request: got"):
        Request(0, 0, 1)


def test_who_finds_no_room_waits() -> None:
    requests = [Request(0, 1000, 50)] * 3
    need = serving().kv_bytes(requests[0])
    beside, after = run(serving(), requests), run(serving(), requests, tiers(drives=1.5 * need))
    assert len(after.served) == 3
    assert after.seconds > beside.seconds
    assert after.tier_bytes["drives"] == need
    ends = [one.end_s for one in after.served]
    firsts = [one.first_token_s for one in after.served]
    assert all(first > end for first, end in zip(firsts[1:], ends[:-1], strict=True))


def test_kv_in_faster_tiers_is_not_read_from_drives() -> None:
    on = setting(16e9, 16e9, Storage.alike(drive(), 2))
    whole = decode(System("s"), on)
    parts = decode(System("s"), replace(on, in_hbm=0.5, in_dram=0.25))
    read = sum(one.nbytes for name, one in whole.usage.items() if "drive " in name)
    less = sum(one.nbytes for name, one in parts.usage.items() if "drive " in name)
    new = on.batch * MODEL.kv_bytes_per_token()
    assert less - new == pytest.approx((read - new) / 4)
    assert parts.up_bytes == pytest.approx(whole.up_bytes / 2)
    with pytest.raises(ConfigError, match="in_hbm, in_dram: got"):
        replace(on, in_hbm=0.9, in_dram=0.2)


def test_the_same_seed_draws_the_same_requests() -> None:
    one, same, other = (
        draw_requests(50, seed=seed, rate=2.0, prompt=(10, 100), output=(1, 9))
        for seed in (1, 1, 2)
    )
    assert one == same != other
    assert all(10 <= request.prompt <= 100 and 1 <= request.output <= 9 for request in one)
    found = run(serving(), one)
    assert found.ttft_s(0.5) <= found.ttft_s(0.95)
    assert set(found.limits) <= {"gpu", "link", "chassis", "drive"}


@given(
    seed=st.integers(0, 1000),
    factor=st.floats(1.1, 4),
    what=st.sampled_from(["hbm", "bandwidth", "link"]),
)
def test_with_arrivals_more_costs_three_percent_at_most(
    seed: int, factor: float, what: str
) -> None:
    """Who comes earlier to a step may make others wait, so not never."""
    requests = draw_requests(12, seed=seed, rate=20.0, prompt=(100, 4000), output=(5, 60))
    need = serving().kv_bytes(Request(0, 4000, 60))
    before = run(serving(), requests, tiers(hbm=need))
    after = run(
        serving(
            bandwidth=factor if what == "bandwidth" else 1.0,
            link=16e9 * (factor if what == "link" else 1.0),
        ),
        requests,
        tiers(hbm=need * (factor if what == "hbm" else 1.0)),
    )
    assert after.tokens_per_s >= 0.97 * before.tokens_per_s


def test_a_pool_of_128_nodes_is_answered_in_seconds() -> None:
    """The short form of the soak below, with prompts that begin alike."""
    storage = pool_drives(128)
    machine = Machine(find(Gpu, "h100-80"), 64e9, 12.5e9, storage.count)
    of = Serving(node_pool(), machine, storage, find_model("llama-3.1-8b"), most=2, chunk=65536)
    of = replace(of, grows=True, store=StoreShape(128 * 4e11, block=4096, frames=1e13))
    requests = [
        Request(4.0 * n, 10**6, 64, context=f"book {n % 2}", shared=900_000) for n in range(6)
    ]
    begin = time.process_time()
    found = of.run(requests, tiers(hbm=40e9, dram=512e9, drives=128 * 4e11))
    assert len(found.served) == 6
    assert time.process_time() - begin < 20
    assert sum(one.hit > 0 for one in found.served) == 4


@pytest.mark.soak
def test_a_thousand_requests_of_a_million_tokens_on_128_drives() -> None:
    """Bounded: a question about a large pool is answered while one waits."""
    storage = attending_drives("instinfer-csd", 128)
    machine = Machine(find(Gpu, "h100-80"), 64e9, 256e9, storage.count)
    of = Serving(ours_offload(), machine, storage, find_model("llama-3.1-8b"), most=16)
    requests = draw_requests(1000, seed=1, rate=0.2, prompt=(10**6, 10**6), output=(64, 512))
    begin = time.process_time()
    found = of.run(requests, tiers(hbm=40e9, dram=512e9, drives=128 * 4e12))
    assert len(found.served) == 1000
    assert time.process_time() - begin < 300


@pytest.mark.soak
def test_a_thousand_requests_of_a_million_tokens_on_128_nodes_with_a_store() -> None:
    """The same on storage nodes, with prefix hits, eviction and preemption."""
    storage = pool_drives(128)
    machine = Machine(find(Gpu, "h100-80"), 64e9, 12.5e9, storage.count)
    of = Serving(node_pool(), machine, storage, find_model("llama-3.1-8b"), most=16, chunk=65536)
    of = replace(of, grows=True, store=StoreShape(20e12, block=4096, frames=1e13))
    source = random.Random(1)
    requests = [
        replace(one, context=f"book {source.randrange(400)}", shared=900_000)
        for one in draw_requests(1000, seed=1, rate=0.2, prompt=(10**6, 10**6), output=(64, 512))
    ]
    begin = time.process_time()
    found = of.run(requests, tiers(hbm=40e9, dram=512e9, drives=128 * 4e11))
    assert len(found.served) == 1000
    assert found.evicted_blocks > 0
    assert time.process_time() - begin < 300
