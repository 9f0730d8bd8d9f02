"""Systems of the papers, and ours, as settings of the simulator.

What papers leave out is assumed here, in one place each, and said. Figures of hardware are
descriptions; nothing here is fitted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

from vllm_ssdkv.offload.share_rule import MeasuredShare
from vllm_ssdkv.profiling.simulation.decode import Setting, System, decode
from vllm_ssdkv.profiling.simulation.hardware import (
    Calibration,
    Drive,
    Gpu,
    Host,
    IoPath,
    Link,
    Machine,
    NearStorage,
    Network,
    StorageNode,
    find,
)
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, find_model
from vllm_ssdkv.profiling.simulation.storage import AttendingDrive, NodeDrive, PlainDrive, Storage

COPY_PASSES = 3
"""Bytes of DRAM's bandwidth for a copied one: read, fetched at its place, written."""
PAGE_BYTES = 4096
"""Bytes of a page of the page cache, through which mapped files are read."""
SETTLING = 48
"""Steps after which the product's share has settled."""
SHARES_BATCH = 64
"""Batch at which InstInfer prints the shares of KV in a step."""
CONTEXT = 1536
"""Tokens of a context of InstInfer's in the middle of its 1,024 tokens of output; prompts are of
1,024."""


def ours_exact() -> System:
    """The plugin, page mode, exact: four layers ahead, whole slots written."""
    return System("ours, exact")


def ours_sparse(budget: float = 0.125) -> System:
    """The plugin with a selector: whole pages, no more than the budget."""
    return replace(ours_exact(), name="ours, sparse", read_share=budget)


def ours_offload(near_share: float = 1.0) -> System:
    """The plugin with attention near storage: ``offload.share``."""
    return replace(ours_exact(), name="ours, offload", attends="drives", near_share=near_share)


def settled(system: System, setting: Setting, steps: int = SETTLING) -> System:
    """The system with the share of the drives that ``offload.share: auto`` comes to.

    The product's own rule decides before each step, and learns from it.
    """
    rule = MeasuredShare()
    for _ in range(steps):
        result = decode(replace(system, near_share=rule.share), setting)
        rule.learn(result.attended)
    return replace(system, near_share=rule.share)


def good_path(rest_s: float = 0.0) -> System:
    """A strong baseline: tiers behind O_DIRECT and io_uring, all KV over the link, in time.

    ``rest_s``: what a step takes beside that.
    """
    return replace(ours_exact(), name="good I/O path", rest_s=rest_s)


@cache
def flexgen() -> System:
    """FlexGen with KV on an SSD: one layer ahead. Weights fit into its GPU's memory."""
    shares = find(Calibration, "opt-13b-steps")
    plain = System("FlexGen", ahead=1)
    rest = _rest_s(plain, memmap_drives(1), shares.flexgen_kv_share, _memmap_rate())
    return replace(plain, rest_s=rest)


def flexgen_sparq(channels: int = 16, tokens_share: float = 1 / 16) -> System:
    """FlexGen with SparQ: so many channels of K, then K and V of a share of the tokens.

    Single tokens are rows of 256 bytes on pages of 4 KiB: with 16 rows on a page, chosen at random,
    nearly every page has one. So pages save much less than tokens do.
    """
    model = find_model("opt-13b")
    rows = PAGE_BYTES // (2 * model.head_size)
    pages = 1 - (1 - tokens_share) ** rows
    return replace(
        flexgen(),
        name="FlexGen-SparQ",
        read_share=min(1.0, channels / model.head_size / 2 + pages),
    )


@cache
def instinfer(*, sparse: bool = False) -> System:
    """InstInfer: its drives attend, to all pages or to those that its sparse attention reads."""
    shares = find(Calibration, "opt-13b-steps")
    rate = find(NearStorage, "instinfer-csd").drive.read_bandwidth
    plain = System("InstInfer, dense", attends="drives", ahead=1)
    drives = attending_drives("instinfer-csd", 1)
    dense = replace(plain, rest_s=_rest_s(plain, drives, shares.instinfer_kv_share, rate))
    if not sparse:
        return dense
    return replace(dense, name="InstInfer, sparse", read_share=shares.sparse_read_share)


def instinfer_machine(drives: int) -> Machine:
    """InstInfer's testbed, with so many drives, each on a link of its own."""
    gpu_link = find(Link, "pcie4-x16").bandwidth
    drives_link = min(gpu_link, drives * find(Link, "pcie4-x4").bandwidth)
    return Machine(find(Gpu, "a6000"), gpu_link, drives_link, drives)


def _rest_s(plain: System, drives: Storage, share: float, rate: float) -> float:
    """Seconds of a step that neither KV nor the simulator explains.

    By the share of KV that is printed for OPT-13B at batch 64.
    """
    model = find_model("opt-13b")
    setting = Setting(instinfer_machine(1), drives, model, SHARES_BATCH, CONTEXT)
    whole = SHARES_BATCH * model.kv_bytes(CONTEXT) / rate / share
    return max(0.0, whole - decode(plain, setting).seconds)


def _memmap_rate() -> float:
    return find(IoPath, "flexgen-memmap").drive_bandwidth or 0.0


def deepspeed(kv: Literal["dram", "drives"]) -> System:
    """DeepSpeed's ZeRO-Inference with KV in ``dram`` or on ``drives``.

    Its attention layers move all KV of a layer back after the layer's computation, and wait for the
    copies unless ``--async_kv_offload`` is given (DeepSpeedExamples, zero_inference/run_model.py).
    """
    return System("DeepSpeed", kv=kv, whole_kv_back=True, overlaps=False)


def hilos(*, x_share: float = 0.0, spill_tokens: int = 16) -> System:
    """HILOS: attention on SmartSSDs, weights in DRAM, write-back every 16 tokens, X-cache."""
    return System(
        "HILOS",
        weights="dram",
        attends="drives",
        x_share=x_share,
        spill_tokens=spill_tokens,
        writes_first=spill_tokens == 1,
    )


def flexgen_with_weights_in_dram() -> System:
    """FlexGen on HILOS' host: KV on drives, weights in DRAM.

    Its code copies mapped files to a pinned buffer, and from there to the GPU, and waits after each
    (``copy_worker_func`` of its ``pytorch_backend.py``). Assumed: the two copies of a layer, K and
    V, go in step.
    """
    rate = (find(Host, "hilos-host").dram_bandwidth or 0.0) / COPY_PASSES
    return System("FlexGen", weights="dram", ahead=1, relay=rate)


def memmap_drives(count: int, drive: str = "980pro") -> Storage:
    """Drives as FlexGen reads them."""
    return Storage.alike(PlainDrive(find(Drive, drive), find(IoPath, "flexgen-memmap")), count)


def attending_drives(name: str, count: int) -> Storage:
    """Drives that attend."""
    return Storage.alike(AttendingDrive(find(NearStorage, name)), count)


def node_pool() -> System:
    """A pool of storage nodes like DockerSSD's, each of which attends to what it holds."""
    return replace(ours_offload(), name="pool of nodes")


def pool_drives(count: int, node: str = "ssd-node", network: str = "ethernet-25g") -> Storage:
    """So many storage nodes, each with a port of its own."""
    return Storage.alike(NodeDrive.of(find(StorageNode, node), find(Network, network)), count)


def flexgen_prefill_bytes(model: ModelShape, batch: int, tokens: int) -> float:
    """Bytes that FlexGen needs on its GPU for a batch of prompts, weights there: its cost model's.

    Scores of all pairs of tokens are the largest part.
    """
    h, wide = model.hidden, 4 * model.hidden
    inputs = 8 * tokens * h + 2 * tokens * h + 2 * model.heads * tokens**2
    rest = 2 * tokens * h + 4 * tokens * h + 2 * tokens * wide + 2 * tokens * h
    return model.weight_bytes() + batch * (inputs + rest)


def layerwise_prefill_bytes(model: ModelShape, batch: int, tokens: int) -> float:
    """Bytes that a prefill needs which writes KV layer by layer and keeps no scores."""
    layer = batch * tokens * model.kv_bytes_per_token() / model.attention_layers()
    inner = 2 * batch * tokens * 4 * model.hidden
    return model.weight_bytes() + 2 * layer + inner
