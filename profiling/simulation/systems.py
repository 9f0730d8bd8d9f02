"""Systems of the papers, and ours, as settings of the simulator.

What papers leave out is assumed here, in one place each, and said. Figures of hardware are
descriptions; nothing here is fitted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from vllm_ssdkv.profiling.simulation.decode import System
from vllm_ssdkv.profiling.simulation.hardware import (
    Calibration,
    Drive,
    IoPath,
    NearStorage,
    find,
)
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, find_model
from vllm_ssdkv.profiling.simulation.storage import AttendingDrive, PlainDrive, Storage

CALIBRATED_BATCH = 64
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


def ours_offload() -> System:
    """The plugin with attention near storage."""
    return replace(ours_exact(), name="ours, offload", attends="drives")


def good_path() -> System:
    """A strong baseline: vLLM's tiers on O_DIRECT and io_uring, all KV over the link, in time."""
    return replace(ours_exact(), name="good I/O path")


def flexgen() -> System:
    """FlexGen with KV on an SSD: one layer ahead. Weights fit into its GPU's memory."""
    shares = find(Calibration, "opt-13b-steps")
    rest = _rest_s(shares.flexgen_kv_share, _memmap_rate())
    return System("FlexGen", ahead=1, rest_s=rest)


def instinfer(*, sparse: bool = False) -> System:
    """InstInfer: its drives attend, to all pages or to those that its sparse attention reads."""
    shares = find(Calibration, "opt-13b-steps")
    rate = find(NearStorage, "instinfer-csd").drive.read_bandwidth
    rest = _rest_s(shares.instinfer_kv_share, rate)
    dense = System("InstInfer, dense", attends="drives", ahead=1, rest_s=rest)
    if not sparse:
        return dense
    return replace(dense, name="InstInfer, sparse", read_share=shares.sparse_read_share)


def _rest_s(share: float, rate: float) -> float:
    """Seconds of a step beside KV, by the share of KV that is printed for OPT-13B, batch 64."""
    model = find_model("opt-13b")
    return CALIBRATED_BATCH * model.kv_bytes(CONTEXT) / rate * (1 / share - 1)


def _memmap_rate() -> float:
    return find(IoPath, "flexgen-memmap").drive_bandwidth


def deepspeed(kv: Literal["dram", "drives"]) -> System:
    """DeepSpeed with KV in ``dram`` or on ``drives``.

    Assumed, since no paper says it: a token is appended by making K and V of its layer anew, so all
    of it goes out and back, and copies wait for each other.
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
    )


def flexgen_with_weights_in_dram() -> System:
    """FlexGen on HILOS' host: KV on all drives by its own path, weights in DRAM."""
    return System("FlexGen, many drives", weights="dram", ahead=1)


def memmap_drives(count: int, drive: str = "980pro") -> Storage:
    """Drives as FlexGen reads them."""
    return Storage.alike(PlainDrive(find(Drive, drive), find(IoPath, "flexgen-memmap")), count)


def attending_drives(name: str, count: int) -> Storage:
    """Drives that attend."""
    return Storage.alike(AttendingDrive(find(NearStorage, name)), count)


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
