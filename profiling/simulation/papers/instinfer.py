"""InstInfer (Pan et al., arXiv 2409.04992; HPCA 2025 as InstAttention): rows P1 to P8, and P27."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from vllm_ssdkv.base.sizes import GIB
from vllm_ssdkv.profiling.simulation import systems
from vllm_ssdkv.profiling.simulation.decode import Setting, StepResult, System, decode
from vllm_ssdkv.profiling.simulation.hardware import Drive, Gpu, Host, NearStorage, find
from vllm_ssdkv.profiling.simulation.model_shape import find_model
from vllm_ssdkv.profiling.simulation.papers.result import Result, Target
from vllm_ssdkv.profiling.simulation.storage import PlainDrive, Storage
from vllm_ssdkv.profiling.simulation.systems import instinfer_machine

PAPER = "InstInfer (arXiv 2409.04992)"
PROMPT = 1024
READ_INSIDE = 7.66e9
"""Bytes/s that the paper says its drive reads inside."""
MODEL = "opt-13b"


@cache
def near(batch: int, drives: int = 1, *, sparse: bool = False) -> StepResult:
    """A step of InstInfer."""
    return _step(
        systems.instinfer(sparse=sparse),
        systems.attending_drives("instinfer-csd", drives),
        batch,
    )


@cache
def flexgen(batch: int) -> StepResult:
    """A step of FlexGen with KV on one drive."""
    return _step(systems.flexgen(), systems.memmap_drives(1), batch)


def flexgen_sparq(batch: int) -> StepResult:
    """The same with SparQ."""
    return _step(systems.flexgen_sparq(), systems.memmap_drives(1), batch)


def good_path(batch: int, *, read_share: float = 1.0) -> StepResult:
    """A step with the same drive behind O_DIRECT and io_uring, and InstInfer's rest beside KV."""
    rest = systems.instinfer().rest_s
    system = replace(systems.good_path(rest), read_share=read_share)
    return _step(system, Storage.alike(PlainDrive(find(Drive, "980pro")), 1), batch)


def _step(system: System, storage: Storage, batch: int) -> StepResult:
    model = find_model(MODEL)
    machine = instinfer_machine(storage.count)
    return decode(system, Setting(machine, storage, model, batch, systems.CONTEXT))


@cache
def deepspeed(batch: int, *, overlaps: bool = False) -> StepResult:
    """A step of DeepSpeed: KV in DRAM while both its copies fit there, else on a drive."""
    place = systems.deepspeed("dram" if dram_share(batch) <= 1 else "drives")
    return _step(replace(place, overlaps=overlaps), systems.memmap_drives(1), batch)


def dram_share(batch: int) -> float:
    """Both copies of DeepSpeed's KV over the host's DRAM."""
    copies = 2 * batch * find_model(MODEL).kv_bytes(2 * PROMPT)
    return copies / (find(Host, "instinfer-host").dram_bytes or 0.0)


def ours(batch: int = 64) -> list[tuple[str, float]]:
    """Tokens per second of our modes on this machine, with as much beside KV as InstInfer has."""
    rest = systems.instinfer().rest_s
    plain = Storage.alike(PlainDrive(find(Drive, "980pro")), 1)
    near_drive = systems.attending_drives("instinfer-csd", 1)
    offload = replace(systems.ours_offload(), rest_s=rest)
    sparse = replace(systems.ours_sparse(), name="ours, offload and sparse", attends="drives")
    setting = Setting(instinfer_machine(1), near_drive, find_model(MODEL), batch, systems.CONTEXT)
    found = [
        (replace(systems.ours_exact(), rest_s=rest), plain),
        (replace(systems.ours_sparse(), rest_s=rest), plain),
        (systems.settled(offload, setting), near_drive),
        (replace(sparse, rest_s=rest), near_drive),
    ]
    return [(one.name, _step(one, storage, batch).tokens_per_s) for one, storage in found]


def gain_in_turn(batch: int, drives: int) -> float:
    """Speedup of our attention near storage by two mini-batches, which GPU and drives work on in
    turn."""
    storage = systems.attending_drives("instinfer-csd", drives)
    whole = systems.ours_offload()
    halves = replace(whole, mini_batches=2)
    return _step(whole, storage, batch).seconds / _step(halves, storage, batch).seconds


def traffic_ratio(tokens: int) -> float:
    """Bytes over the drives' link, KV brought against attention near storage; both simulated."""
    model = find_model(MODEL)
    steps = []
    for system, storage in (
        (System("over the link", spill_tokens=1), systems.memmap_drives(1)),
        (
            System("near", attends="drives", spill_tokens=1),
            systems.attending_drives("instinfer-csd", 1),
        ),
    ):
        usage = decode(system, Setting(instinfer_machine(1), storage, model, 1, tokens)).usage
        steps.append(usage["chassis up"].nbytes + usage["chassis down"].nbytes)
    return steps[0] / steps[1]


def _of_memory() -> list[Result]:
    """P1, P2 and the memory of P8."""
    opt, gpt = find_model(MODEL), find_model("gpt-3")
    gpu, tokens = find(Gpu, "a6000").memory_bytes, 2047
    needs = {
        "FlexGen at 64": systems.flexgen_prefill_bytes(opt, 64, PROMPT) / gpu,
        "FlexGen at 128": systems.flexgen_prefill_bytes(opt, 128, PROMPT) / gpu,
        "InstInfer at 128": systems.layerwise_prefill_bytes(opt, 128, PROMPT) / gpu,
    }
    fits = [need <= 1 for need in needs.values()]
    return [
        Result(
            *("P1", "OPT-13B", "KV of 128 contexts of 2,048 tokens, GiB"),
            Target.near(200, 0),
            128 * opt.kv_bytes(2048) / GIB,
            PAPER,
            "arithmetic",
        ),
        Result(
            *("P1", "GPT-3", "KV of a context of 32,768 tokens, GiB"),
            Target.near(144, 0),
            gpt.kv_bytes(32768) / GIB,
            "as the papers print it",
            "arithmetic",
        ),
        Result(
            *("P2", "", f"traffic, KV brought / attention near storage, s = {tokens}"),
            Target.near((tokens + 1) / 2, 0, "(s + 1) / 2 = 1024"),
            traffic_ratio(tokens),
            PAPER,
            "arithmetic",
            note="The simulated links counted these bytes. An identity rests on no constant.",
        ),
        Result(
            *("P8", "memory", "batch 128: FlexGen's prompt does not fit, InstInfer's does"),
            Target.near(1, 0, "so"),
            float(fits == [True, False, True]),
            PAPER,
            "arithmetic",
            note="1: so. FlexGen's cost model gives its need. Margins: needs over the GPU's "
            "memory.",
            margins=needs,
        ),
    ]


def _calibrated() -> list[Result]:
    """P3, P5, P6 and the part of P4 that P6 made."""
    slow, fast, sparse = flexgen(64), near(64), near(256, sparse=True)
    share = systems.instinfer(sparse=True).read_share
    return [
        Result(
            *("P3", "", "dense against FlexGen, batch 64"),
            Target.times(6.85),
            slow.seconds / fast.seconds,
            PAPER,
            "calibrated",
            note="An identity of printed numbers: KV's shares of both steps, and both rates of "
            "reading. No GPU and no link is in it.",
            beside=good_path(64).seconds / fast.seconds,
        ),
        Result(
            *("P4", "sparse", "20 devices against 1, batch 256"),
            Target.times(7.29),
            sparse.seconds / near(256, 20, sparse=True).seconds,
            PAPER,
            "calibrated",
            note="P6 gives the step of one device. Work beside KV is assumed to be the same as for "
            "dense.",
        ),
        Result(
            *("P5", "", "sparse against FlexGen, batch 64"),
            Target.times(11.1),
            slow.seconds / near(64, sparse=True).seconds,
            PAPER,
            "calibrated",
            note='The paper says "up to". Rests on P3 and P6. With the best batch of each, 256 '
            f"and 64, it would be {sparse.tokens_per_s / slow.tokens_per_s:.1f}x.",
            beside=good_path(64, read_share=share).seconds / near(64, sparse=True).seconds,
        ),
        Result(
            *("P6", "", "sparse against dense, batch 256"),
            Target.times(2.08),
            near(256).seconds / sparse.seconds,
            PAPER,
            "calibrated",
            note=f"This result sets the share of pages that sparse attention reads, {share:g}.",
        ),
    ]


def _of_flash() -> Result:
    """P27."""
    flash = find(NearStorage, "instinfer-csd").drive.flash
    reads = {us: replace(flash, read_s=us * 1e-6).bandwidth / 1e9 for us in (30, 42)}
    return Result(
        *("P27", "", "bandwidth inside of InstInfer's drive, GB/s"),
        Target.near(READ_INSIDE / 1e9, 0.08),
        flash.bandwidth / 1e9,
        PAPER,
        "arithmetic",
        note="Channels carry 11.2, but dies are the limit. The paper prints neither their number "
        "nor their times. We assume as many a channel as on OpenSSD's boards, and "
        f"{1e6 * flash.read_s:.0f} us a page; the 30 to 42 us of public models give "
        f"{reads[30]:.2f} to {reads[42]:.2f}. P3 to P7 rest on ours.",
    )


def results() -> list[Result]:
    """Rows P1 to P8, and P27."""
    dense, small, large = near(256), deepspeed(16), deepspeed(32)
    beside = dense.tokens_per_s / deepspeed(16, overlaps=True).tokens_per_s
    return [
        *_of_memory(),
        *_calibrated(),
        _of_flash(),
        Result(
            *("P4", "dense", "20 devices against 1, batch 256"),
            Target.times(8.99),
            dense.seconds / near(256, 20).seconds,
            PAPER,
            "predicted",
            note="The share of KV that is printed for batch 64 gives the work beside KV.",
        ),
        Result(
            *("P7", "", "dense at batch 256 against DeepSpeed at batch 16"),
            Target.times(1.046),
            dense.tokens_per_s / small.tokens_per_s,
            PAPER,
            "predicted",
            note="By its code, ZeRO-Inference brings all KV of a layer, moves it back after the "
            "layer, and waits for both unless --async_kv_offload is given. With that option it "
            f"would be {beside:.2f}. The paper does not say where its DeepSpeed spends the time.",
        ),
        Result(
            *("P8", "cliff", "DeepSpeed, batch 16 against 32"),
            Target.times(32.6),
            small.tokens_per_s / large.tokens_per_s,
            PAPER,
            "predicted",
            note="Two copies of KV of 2,048 tokens fit the host's DRAM at batch 16, not at 32: "
            f"{dram_share(16):.2f} and {dram_share(32):.2f} of it. At 32 all KV goes to one drive "
            "and back. We assume FlexGen's rate of reading and the data sheet's of writing.",
        ),
    ]
