"""Laws of a decode step, on machines and systems at random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.profiling.simulation.decode import Setting, StepResult, System, decode, prefill
from vllm_ssdkv.profiling.simulation.hardware import (
    Drive,
    Gpu,
    Machine,
    NearStorage,
    Network,
    find,
)
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape
from vllm_ssdkv.profiling.simulation.storage import AttendingDrive, PlainDrive, Storage
from vllm_ssdkv.profiling.simulation.systems import (
    good_path,
    node_pool,
    ours_offload,
    ours_sparse,
    pool_drives,
    settled,
)

MODEL = ModelShape.of(
    {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "vocab_size": 1,
        "dtype": "float16",
    },
    name="small",
)
SYSTEMS = st.builds(
    System,
    st.just("drawn"),
    kv=st.sampled_from(["hbm", "dram", "drives"]),
    weights=st.sampled_from(["hbm", "dram"]),
    read_share=st.floats(0.05, 1),
    ahead=st.integers(1, 6),
    spill_tokens=st.sampled_from([1, 4, 16, 64]),
    whole_kv_back=st.booleans(),
    overlaps=st.booleans(),
    rest_s=st.sampled_from([0.0, 0.01]),
)
WAITING = st.builds(
    System,
    st.just("waiting"),
    weights=st.sampled_from(["hbm", "dram"]),
    read_share=st.floats(0.05, 1),
    ahead=st.integers(1, 6),
    spill_tokens=st.sampled_from([1, 16]),
    writes_first=st.booleans(),
    relay=st.sampled_from([None, 20e9]),
    overlaps=st.booleans(),
)
NEAR = st.builds(
    System,
    st.just("near"),
    attends=st.just("drives"),
    x_share=st.sampled_from([0.0, 0.25, 0.5]),
    weights=st.sampled_from(["hbm", "dram"]),
    ahead=st.integers(1, 6),
    spill_tokens=st.sampled_from([1, 16, 64]),
    writes_first=st.booleans(),
)
IN_TURN = st.builds(
    System,
    st.just("in turn"),
    attends=st.just("drives"),
    x_share=st.sampled_from([0.0, 0.5]),
    spill_tokens=st.sampled_from([1, 16]),
    mini_batches=st.sampled_from([2, 4]),
)
RATES = st.floats(1e9, 64e9)


def drive(scale: float = 1.0, iops: float = 1.0) -> PlainDrive:
    base = find(Drive, "pm9a3")
    return PlainDrive(
        base.with_figures(
            read_bandwidth=base.read_bandwidth * scale,
            write_bandwidth=base.write_bandwidth * scale,
            iops=base.iops * iops,
        )
    )


def setting(
    link: float, drives_link: float, storage: Storage, batch: int = 4, tokens: int = 4096
) -> Setting:
    machine = Machine(find(Gpu, "a6000"), link, drives_link, storage.count)
    return Setting(machine, storage, MODEL, batch, tokens)


def moved(found: StepResult, prefix: str) -> float:
    return sum(usage.nbytes for name, usage in found.usage.items() if name.startswith(prefix))


@given(
    system=SYSTEMS | WAITING | NEAR | IN_TURN, link=RATES, chassis=RATES, drives=st.integers(1, 5)
)
def test_bytes_and_utilisation(system: System, link: float, chassis: float, drives: int) -> None:
    near = system.attends == "drives"
    device = AttendingDrive(find(NearStorage, "hilos-smartssd")) if near else drive()
    on = setting(link, chassis, Storage.alike(device, drives))
    found = decode(system, on)
    kv = on.batch * MODEL.kv_bytes(on.tokens)
    new = on.batch * MODEL.kv_bytes_per_token()
    x = on.batch * on.tokens * MODEL.x_bytes_per_token()
    read = system.read_share * kv * (1 - system.x_share) + x * system.x_share
    back = read if system.whole_kv_back else 0.0
    if system.kv != "hbm":
        out = new * (1 - system.x_share) + system.x_share * on.batch * MODEL.x_bytes_per_token()
    if system.kv == "drives":
        # In as out: what drives read goes over their link, or is attended to there.
        assert moved(found, "drive ") == pytest.approx(read + out + back)
        if not near:
            assert moved(found, "chassis up") == pytest.approx(read)
            assert moved(found, "chassis down") == pytest.approx(out + back)
    if system.kv == "dram":
        assert moved(found, "chassis") == moved(found, "drive ") == 0
        assert moved(found, "link down") == pytest.approx(out + back)
    if system.kv == "hbm":
        assert moved(found, "drive ") == moved(found, "link down") == 0
    for name, usage in found.usage.items():
        assert usage.utilisation <= 1 + 1e-9, name
        if usage.jobs:
            assert usage.present == pytest.approx(usage.jobs / usage.seconds * usage.stay_s)
    assert found.seconds >= max(usage.busy_s for usage in found.usage.values()) * (1 - 1e-9)
    again = decode(system, on)
    assert (again.seconds, again.usage) == (found.seconds, found.usage)


@given(
    system=SYSTEMS | WAITING | NEAR,
    link=RATES,
    chassis=RATES,
    drives=st.integers(1, 5),
    what=st.sampled_from(["link", "chassis", "drives", "iops", "bandwidth", "memory"]),
    factor=st.floats(1.01, 4),
)
def test_more_of_anything_is_not_slower(
    system: System, link: float, chassis: float, drives: int, what: str, factor: float
) -> None:
    near = system.attends == "drives"
    if near and what in ("bandwidth", "iops"):
        what = "link"  # rates of drives that attend are the product's
    kind = AttendingDrive(find(NearStorage, "hilos-smartssd")) if near else drive()
    before = decode(system, setting(link, chassis, Storage.alike(kind, drives)))
    scale = factor if what == "bandwidth" else 1.0
    iops = factor if what == "iops" else 1.0
    count = drives + 2 if what == "drives" else drives
    storage = Storage.alike(kind if near else drive(scale, iops), count)
    on = setting(
        link * (factor if what == "link" else 1),
        chassis * (factor if what == "chassis" else 1),
        storage,
    )
    gpu: Any = on.machine.gpu
    if what == "memory":
        faster = gpu.with_figures(bandwidth=gpu.bandwidth * factor)
        on = replace(on, machine=replace(on.machine, gpu=faster))
    after = decode(system, on)
    assert after.tokens_per_s >= before.tokens_per_s * (1 - 1e-9)


def test_loads_run_beside_computing() -> None:
    """A step takes about as long as the slower of both, not as both."""
    on = setting(32e9, 32e9, Storage.alike(drive(), 5), batch=1, tokens=1024)
    beside = decode(System("a"), on)
    serial = decode(System("b", overlaps=False), on)
    reads = max(usage.busy_s for name, usage in beside.usage.items() if "drive" in name)
    computing = beside.usage["gpu"].busy_s
    assert beside.seconds < reads + computing
    assert serial.seconds > beside.seconds + 0.5 * min(computing, reads)


def test_projecting_x_takes_two_flop_for_each_weight_of_k_and_v() -> None:
    """4 KV heads of 64 channels are 512 numbers of K and V, each a sum of 1,024 products."""
    gpu = find(Gpu, "a6000").with_figures(flops=1e12, bandwidth=1e18)
    storage = Storage.alike(AttendingDrive(find(NearStorage, "hilos-smartssd")), 2)
    on = Setting(Machine(gpu, 32e9, 32e9, 2), storage, MODEL, 4, 4096)
    kv, half = (
        decode(System("x", attends="drives", x_share=share), on).usage["gpu"].busy_s
        for share in (0.0, 0.5)
    )
    # Of 4 contexts 2 are X, in 6 layers.
    assert half - kv == pytest.approx(2 * 4096 * 6 * 512 * 1024 * 2 / 1e12)


def test_the_write_path_takes_bandwidth() -> None:
    """Small writes cost pages, and reads wait for the drives that they occupy."""
    on = setting(32e9, 32e9, Storage.alike(drive(), 1), batch=64, tokens=256)
    few, many = (decode(System("w", spill_tokens=tokens), on) for tokens in (16, 1))
    assert many.usage["drive 0"].busy_s > 1.1 * few.usage["drive 0"].busy_s
    assert many.seconds > few.seconds


def test_drives_of_unequal_speed_get_shares_of_the_products_lanes() -> None:
    storage = Storage.of([drive(), drive(0.5)])
    assert storage.shares == pytest.approx((2 / 3, 1 / 3), rel=0.02)
    on = setting(64e9, 64e9, storage)
    busy = [decode(System("s"), on).usage[f"drive {n}"].busy_s for n in range(2)]
    assert busy[0] == pytest.approx(busy[1], rel=0.05)


def test_attention_near_storage_moves_little() -> None:
    """With as many KV heads as heads: (s + 1) / 2 times less."""
    model = ModelShape.of(
        {
            "model_type": "opt",
            "hidden_size": 512,
            "num_attention_heads": 8,
            "num_hidden_layers": 3,
            "vocab_size": 1,
            "dtype": "float16",
        },
        name="mha",
    )
    attending = Storage.alike(AttendingDrive(find(NearStorage, "instinfer-csd")), 2)
    machine = Machine(find(Gpu, "a6000"), 32e9, 14e9, 2)
    for tokens in (1, 100, 2047):
        over = decode(System("a"), Setting(machine, Storage.alike(drive(), 2), model, 3, tokens))
        near = decode(
            System("b", attends="drives", spill_tokens=1),
            Setting(machine, attending, model, 3, tokens),
        )
        ratio = (moved(over, "chassis up") + moved(over, "chassis down")) / (
            moved(near, "chassis up") + moved(near, "chassis down")
        )
        assert ratio == pytest.approx((tokens + 1) / 2)


@pytest.mark.parametrize("drives", [1, 8, 64])
def test_parts_of_a_batch_take_the_longer_of_two_stages(drives: int) -> None:
    """The whole batch takes their sum; the accelerator reads its weights once for each part."""
    device = AttendingDrive(find(NearStorage, "instinfer-csd"))
    on = setting(32e9, 32e9, Storage.alike(device, drives), batch=8)
    # Nothing is written here but whole pages, and drives answer at once: two stages are left.
    near = System("near", attends="drives")
    whole, parts = decode(near, on), decode(replace(near, mini_batches=2), on)
    stages = [[found.usage[name].busy_s for name in ("gpu", "drive 0")] for found in (whole, parts)]
    assert stages[1][0] == pytest.approx(2 * stages[0][0], rel=0.02)
    # Each drive reads whole pages of each channel.
    assert stages[1][1] == pytest.approx(stages[0][1], rel=0.05)
    assert parts.attended.theirs == pytest.approx(whole.attended.theirs)
    layers, latency = len(MODEL.layers), 2 * device.latency_s
    rest = layers * latency + 1e-3
    assert sum(stages[0]) < whole.seconds < sum(stages[0]) + rest
    # The first part fills the two stages, the last one drains them.
    assert max(stages[1]) < parts.seconds < max(stages[1]) + sum(stages[1]) / layers + rest


def test_a_prefill_writes_beside_computing_and_two_layers_wait_at_most() -> None:
    fast = prefill(System("p"), setting(32e9, 32e9, Storage.alike(drive(), 4)))
    slow = prefill(System("p"), setting(32e9, 32e9, Storage.alike(drive(0.01), 1)))
    written = 4 * MODEL.kv_bytes(4096)
    for found in (fast, slow):
        assert moved(found, "drive ") == pytest.approx(written)
    assert fast.seconds < fast.usage["gpu"].busy_s * 1.5
    assert slow.seconds == pytest.approx(slow.usage["drive 0"].busy_s, rel=0.05)
    assert slow.limit == "drive"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv": "dram", "attends": "drives"}, "bad: attends: drives do not attend to KV in dram"),
        ({"read_share": 1.5}, "bad: read_share: got 1.5; 0 to 1"),
        ({"ahead": 0}, "bad: ahead: got 0; at least 1"),
        (
            {"kv": "dram", "relay": 1e9},
            "bad: relay, writes_first: KV lies in dram; they are of KV on drives",
        ),
        (
            {"writes_first": True, "whole_kv_back": True},
            "bad: writes_first, whole_kv_back: one of both, not rows and everything",
        ),
        ({"rest_s": -1.0}, "bad: rest_s: got -1.0; at least 0"),
        ({"mini_batches": 0}, "bad: mini_batches: got 0; at least 1"),
        (
            {"mini_batches": 2, "weights": "dram"},
            "bad: mini_batches: need weights in hbm, and copies beside computing",
        ),
        (
            {"mini_batches": 2, "overlaps": False},
            "bad: mini_batches: need weights in hbm, and copies beside computing",
        ),
    ],
)
def test_systems_that_cannot_be(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        System("bad", **change)
    assert str(caught.value) == text


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="mini_batches: got 3 for a batch of 4; a divisor"):
        decode(System("p", mini_batches=3), setting(1e9, 1e9, Storage.alike(drive(), 1)))
    with pytest.raises(ConfigError, match="batch: got 0; at least 1"):
        setting(1e9, 1e9, Storage.alike(drive(), 1), batch=0)
    state = ModelShape.of(
        {
            "model_type": "mamba",
            "hidden_size": 64,
            "state_size": 8,
            "num_hidden_layers": 2,
            "vocab_size": 1,
        },
        name="state",
    )
    with pytest.raises(ConfigError, match="state: no layer has KV"):
        replace(setting(1e9, 1e9, Storage.alike(drive(), 1)), model=state)
    with pytest.raises(ConfigError, match="drives: none; give at least one"):
        Storage.of([])
    with pytest.raises(ConfigError, match="drive pm9a3 does not attend"):
        decode(System("x", attends="drives"), setting(1e9, 1e9, Storage.alike(drive(), 1)))


def test_the_products_rule_finds_who_attends() -> None:
    """A slow link: the drives. A fast one, and drives that attend slowly: the accelerator."""
    fast = find(NearStorage, "hilos-smartssd")
    slow = fast.with_figures(attend_bandwidth=0.5e9)
    for described, link, low, high in ((fast, 1e9, 0.7, 1.0), (slow, 32e9, 0.0, 0.5)):
        on = setting(link, link, Storage.alike(AttendingDrive(described), 2))
        found = settled(ours_offload(), on)
        assert low <= found.near_share <= high
        alone = decode(ours_offload(), on).seconds
        assert decode(found, on).seconds <= alone * 1.05


def test_parts_that_drives_attend_to_and_bring_are_all() -> None:
    on = setting(16e9, 16e9, Storage.alike(AttendingDrive(find(NearStorage, "instinfer-csd")), 2))
    whole = decode(ours_offload(), on)
    parts = decode(ours_offload(0.25), on)
    assert moved(whole, "drive ") == pytest.approx(moved(parts, "drive "))
    attended = parts.attended
    assert attended.theirs == pytest.approx(attended.nbytes / 4)
    assert attended.nbytes == pytest.approx(on.batch * MODEL.kv_bytes(on.tokens))
    assert attended.seconds >= max(attended.step_s, attended.device_s) * (1 - 1e-9)
    assert decode(ours_sparse(0.125), setting(16e9, 16e9, Storage.alike(drive(), 2))).seconds < (
        decode(good_path(), setting(16e9, 16e9, Storage.alike(drive(), 2))).seconds
    )


def test_a_relay_lets_no_stage_work_beside_another() -> None:
    """Drives, then the copy in DRAM, then the link: rates of one after the other."""
    on = setting(32e9, 64e9, Storage.alike(drive(), 4), batch=16, tokens=32768)
    found = decode(System("relayed", relay=60e9, ahead=1), on)
    read = on.batch * MODEL.kv_bytes(on.tokens)
    stages = read * (1 / (4 * 6.9e9) + 1 / 60e9 + 1 / 32e9)
    assert found.seconds == pytest.approx(stages, rel=0.03)
    assert found.usage["relay"].nbytes == pytest.approx(read)
    assert decode(System("direct", ahead=1), on).seconds < 0.6 * found.seconds
    with pytest.raises(ConfigError, match="bad: relay: got 0; bytes/s above 0, or none"):
        System("bad", relay=0)


def test_rows_that_are_written_first_are_waited_for() -> None:
    attending = AttendingDrive(find(NearStorage, "hilos-smartssd"))
    on = setting(16e9, 16e9, Storage.alike(attending, 4), batch=16, tokens=2048)
    near = System("near", attends="drives", spill_tokens=1)
    later, first = decode(near, on), decode(replace(near, writes_first=True), on)
    rows = 2 * MODEL.kv_heads * on.batch * 6 / 4
    assert first.seconds - later.seconds == pytest.approx(rows * attending.rewrite_s, rel=0.1)
    # In as out, whenever it is written.
    assert moved(first, "drive ") == pytest.approx(moved(later, "drive "))


def test_latency_is_drawn_and_the_slowest_drive_is_waited_for() -> None:
    one = setting(64e9, 64e9, Storage.alike(drive(), 8), batch=1, tokens=256)
    median = decode(System("s", ahead=1), one).seconds
    drawn = [decode(System("s", ahead=1), replace(one, seed=seed)).seconds for seed in range(12)]
    assert len(set(drawn)) == 12
    assert drawn[3] == decode(System("s", ahead=1), replace(one, seed=3)).seconds
    # Of eight draws the largest counts: nearly every step is slower than by the median.
    assert sorted(drawn)[1] > median
    few = setting(64e9, 64e9, Storage.alike(drive(), 1), batch=1, tokens=256)
    gaps = [
        sum(decode(System("s", ahead=1), replace(on, seed=seed)).seconds for seed in range(12))
        - 12 * decode(System("s", ahead=1), on).seconds
        for on in (few, one)
    ]
    assert gaps[1] > gaps[0]


def test_a_pool_of_nodes_sends_little_over_its_network() -> None:
    """Nodes attend: a slow network hardly matters. As plain drives behind it, it does."""
    seconds = {}
    for network in ("ethernet-25g", "ethernet-100g"):
        storage = pool_drives(8, network=network)
        rate = find(Network, network).bandwidth
        machine = Machine(find(Gpu, "a6000"), 32e9, rate, 8)
        for system in (node_pool(), System("brought")):
            found = decode(system, Setting(machine, storage, MODEL, 4, 32768))
            seconds[network, system.name] = found.seconds
    pool = [seconds[network, "pool of nodes"] for network in ("ethernet-25g", "ethernet-100g")]
    brought = [seconds[network, "brought"] for network in ("ethernet-25g", "ethernet-100g")]
    assert pool[0] < 1.1 * pool[1]
    assert brought[0] > 2 * brought[1]
    with pytest.raises(
        ConfigError, match="nodes: dockerssd-node: flash, cores, core_attend_bandwidth"
    ):
        pool_drives(1, node="dockerssd-node")
