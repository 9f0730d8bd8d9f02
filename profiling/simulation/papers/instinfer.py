"""InstInfer (Pan et al., arXiv 2409.04992; HPCA 2025 as InstAttention): rows P1 to P8."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from vllm_ssdkv.base.sizes import GIB
from vllm_ssdkv.profiling.simulation import systems
from vllm_ssdkv.profiling.simulation.decode import Setting, StepResult, System, decode
from vllm_ssdkv.profiling.simulation.hardware import Drive, Gpu, Host, find
from vllm_ssdkv.profiling.simulation.model_shape import find_model
from vllm_ssdkv.profiling.simulation.papers.result import Result, Target
from vllm_ssdkv.profiling.simulation.storage import PlainDrive, Storage
from vllm_ssdkv.profiling.simulation.systems import CONTEXT, instinfer_machine

PAPER = "InstInfer (arXiv 2409.04992)"
PROMPT = 1024
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
    return decode(system, Setting(instinfer_machine(storage.count), storage, model, batch, CONTEXT))


@cache
def deepspeed(batch: int) -> StepResult:
    """A step of DeepSpeed: KV in DRAM while both its copies fit there, else on a drive."""
    model, host = find_model(MODEL), find(Host, "instinfer-host")
    copies = 2 * batch * model.kv_bytes(2 * PROMPT)
    place = systems.deepspeed("dram" if copies <= (host.dram_bytes or 0) else "drives")
    return _step(place, systems.memmap_drives(1), batch)


def ours(batch: int = 64) -> list[tuple[str, float]]:
    """Tokens per second of our modes on this machine, with as much beside KV as InstInfer has."""
    rest = systems.instinfer().rest_s
    plain = Storage.alike(PlainDrive(find(Drive, "980pro")), 1)
    near_drive = systems.attending_drives("instinfer-csd", 1)
    offload = replace(systems.ours_offload(), rest_s=rest)
    sparse = replace(systems.ours_sparse(), name="ours, offload and sparse", attends="drives")
    setting = Setting(instinfer_machine(1), near_drive, find_model(MODEL), batch, CONTEXT)
    found = [
        (replace(systems.ours_exact(), rest_s=rest), plain),
        (replace(systems.ours_sparse(), rest_s=rest), plain),
        (systems.settled(offload, setting), near_drive),
        (replace(sparse, rest_s=rest), near_drive),
    ]
    return [(one.name, _step(one, storage, batch).tokens_per_s) for one, storage in found]


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
    gpu = find(Gpu, "a6000").memory_bytes
    fits = {batch: systems.flexgen_prefill_bytes(opt, batch, PROMPT) <= gpu for batch in (64, 128)}
    own = systems.layerwise_prefill_bytes(opt, 128, PROMPT) <= gpu
    tokens = 2047
    return [
        Result(
            *("P1", "OPT-13B", "KV of 128 contexts of 2,048 tokens, GiB"),
            Target.near(200, 0),
            128 * opt.kv_bytes(2048) / GIB,
            source=PAPER,
        ),
        Result(
            *("P1", "GPT-3", "KV of a context of 32,768 tokens, GiB"),
            Target.near(144, 0),
            gpt.kv_bytes(32768) / GIB,
            source="as the papers print it",
        ),
        Result(
            *("P2", "", f"traffic, KV brought / attention near storage, s = {tokens}"),
            Target.near((tokens + 1) / 2, 0, "(s + 1) / 2 = 1024"),
            traffic_ratio(tokens),
            source=PAPER,
            note="Bytes that the simulated links counted.",
        ),
        Result(
            *("P8", "memory", "batch 128: FlexGen's prompt does not fit, InstInfer's does"),
            Target.near(1, 0, "so"),
            float(fits[64] and not fits[128] and own),
            source=PAPER,
            note="1: so. FlexGen's need by the formula of its cost model, prompts of 1,024 tokens.",
        ),
    ]


def results() -> list[Result]:
    """Rows P1 to P8."""
    dense, sparse = near(256), near(256, sparse=True)
    slow, fast = flexgen(64), near(64)
    small, large = deepspeed(16), deepspeed(32)
    share = systems.instinfer(sparse=True).read_share
    table = PAPER
    return [
        *_of_memory(),
        Result(
            *("P3", "", "dense against FlexGen, batch 64"),
            Target.near(6.85, 0.05, "6.85x"),
            slow.seconds / fast.seconds,
            source=table,
            note="What is not KV is by the printed shares of KV in both steps.",
            beside=good_path(64).seconds / fast.seconds,
        ),
        Result(
            *("P4", "dense", "20 devices against 1, batch 256"),
            Target.near(8.99, 0.12, "8.99x"),
            dense.seconds / near(256, 20).seconds,
            source=table,
        ),
        Result(
            *("P4", "sparse", "20 devices against 1, batch 256"),
            Target.near(7.29, 0.15, "7.29x"),
            sparse.seconds / near(256, 20, sparse=True).seconds,
            source=table,
            note="What is not KV is taken as equal for dense and sparse, but for the time of a "
            "kernel between two KV heads, which devices share: 794 cycles, those of this "
            "project's RTL. Without them it would be 6.18, a miss by 0.2 %.",
        ),
        Result(
            *("P5", "", "sparse against FlexGen, batch 64"),
            Target.near(11.1, 0.15, "11.1x"),
            slow.seconds / near(64, sparse=True).seconds,
            source=table,
            note="At equal batch. At the batch that is best for each, 256 against 64, it would be "
            f"{sparse.tokens_per_s / slow.tokens_per_s:.1f}x.",
            beside=good_path(64, read_share=share).seconds / near(64, sparse=True).seconds,
        ),
        Result(
            *("P6", "", "sparse against dense, batch 256"),
            Target.near(2.08, 0.10, "2.08x"),
            dense.seconds / sparse.seconds,
            source=table,
            basis="calibrated",
            note=f"Makes the share of pages that sparse attention reads, {share:g}.",
        ),
        Result(
            *("P7", "", "sparse at batch 256 against DeepSpeed at batch 16"),
            Target.near(1.046, 0.15, "1.046x"),
            sparse.tokens_per_s / small.tokens_per_s,
            source=table,
            note="ZeRO-Inference, by its own code and options, brings all KV of a layer, moves all "
            "of it back after the layer, and waits for both unless --async_kv_offload is given. "
            "The paper does not say which it used; with copies beside each other the ratio would "
            "be half as large. This row was known when that was chosen.",
        ),
        Result(
            *("P8", "cliff", "DeepSpeed, batch 16 against 32"),
            Target.above(20, "32.6x"),
            small.tokens_per_s / large.tokens_per_s,
            source=table,
            note="Two copies of KV of 2,048 tokens fit the host's DRAM at batch 16, not at 32. "
            "Same assumption as P7.",
        ),
    ]
