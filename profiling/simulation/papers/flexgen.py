"""FlexGen's published cost model (Sheng et al., ICML 2023, section 4.3), and row P26.

Constants are those that its authors fitted to a T4 instance and published with the code
(cost_model.py of FlexGen); units there are 2^30 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_ssdkv.profiling.simulation.hardware import FlexGenCosts, find
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, find_model
from vllm_ssdkv.profiling.simulation.papers.result import Result, Target


@dataclass(frozen=True, slots=True)
class Policy:
    """Places of things, as shares of 1; the rest lies in DRAM.

    Attributes:
        weights: In the memory of the GPU.
        cache: Of KV, there.
        hidden: Of activations, there.
        batch: Sequences of a round.
        gpu_batch: Sequences that the GPU works on at a time.
    """

    weights: float
    cache: float
    hidden: float
    batch: int
    gpu_batch: int


PUBLISHED_POLICY = Policy(weights=0.2, cache=0.0, hidden=0.0, batch=144, gpu_batch=48)
"""Policy that was published for OPT-30B at prompts of 512 tokens."""


def throughput(
    model: ModelShape, policy: Policy, costs: FlexGenCosts, prompt: int, output: int
) -> float:
    """Tokens per second by the cost model, with nothing on disk."""
    h, wide, b = model.hidden, 4 * model.hidden, policy.batch
    layers = len(model.layers)
    weights = 8 * h**2 + 4 * h * wide
    outside = 1 - policy.weights
    cache, hidden = 1 - policy.cache, 1 - policy.hidden
    states = 2 * h * b * hidden
    prefill = max(
        (weights * outside + prompt * states) / costs.to_gpu,
        4 * (prompt + 1) * h * b * cache / costs.cache_from_gpu
        + prompt * states / costs.hidden_from_gpu,
        b * prompt * weights / costs.prefill_flops + 4 * b * prompt**2 * h / costs.scores_flops,
    )
    pairs = 4 * b * (prompt + output / 2) * h
    computing = (
        b * weights / costs.decode_flops
        + pairs * policy.cache / costs.decode_scores_flops
        + pairs * cache / (costs.cpu_flops * _cpu_factor(policy.gpu_batch, h, costs))
    )
    decode = (weights * outside + states) / costs.to_gpu + max(
        states / costs.hidden_from_gpu, computing
    )
    return b * output / (layers * (prefill + decode * (output - 1)))


def _cpu_factor(gpu_batch: int, hidden: int, costs: FlexGenCosts) -> float:
    """Part of its best that a CPU has for small batches and models."""
    few, small = max(0.0, math.log2(64 / gpu_batch)), max(0.0, math.log2(4096 / hidden))
    return max(0.1, 1 + costs.both_small * few * small - costs.few * few - costs.narrow * small)


def results() -> list[Result]:
    """Row P26."""
    ours = throughput(find_model("opt-30b"), PUBLISHED_POLICY, find(FlexGenCosts, "t4"), 512, 32)
    return [
        Result(
            *("P26", "", "FlexGen's cost model, OPT-30B on a T4, 512 + 32 tokens, tokens/s"),
            Target.near(7.32, 0.05),
            ours,
            "FlexGen (ICML 2023)",
            "arithmetic",
            note="A closed form, with the constants that its authors print.",
        )
    ]
