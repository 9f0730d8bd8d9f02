"""DockerSSD (IEEE Micro, extended; arXiv 2506.06769): rows P23 to P25.

A host that swaps KV takes ``F + k B``, a pool whose nodes read their own flash ``F / f + k B / q``,
in FLOP of the host: F = 2 P + 4 L A S for a token, B = 4 L A S bytes of KV. A is heads times their
size. The eight models are the paper's, with the shapes that their authors publish.
"""

from __future__ import annotations

from statistics import fmean

from vllm_ssdkv.profiling.simulation.hardware import StoragePool, find
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, find_model
from vllm_ssdkv.profiling.simulation.papers.result import Result, Target

PAPER = "DockerSSD (arXiv 2506.06769)"
LENGTH = 32768
MODELS = (
    *("lamda-137b", "gpt-3", "jurassic-1-178b", "pangu-200b"),
    *("gopher-280b", "mt-nlg-530b", "palm-540b", "megatron-1t"),
)
"""Models by parameters, ascending."""


def _attention(model: ModelShape, tokens: float) -> float:
    """4 L A S."""
    return 4 * len(model.layers) * model.heads * model.head_size * tokens


def _compute(model: ModelShape, tokens: float) -> float:
    return 2 * model.parameters + _attention(model, tokens)


def host_work(model: ModelShape, tokens: float) -> float:
    """FLOP of the host in the time of a token, with KV swapped."""
    pool = find(StoragePool, "dockerssd")
    return _compute(model, tokens) + pool.host_flop_per_byte * _attention(model, tokens)


def pool_work(model: ModelShape, tokens: float) -> float:
    """FLOP of the host in the time that the pool takes for a token."""
    pool = find(StoragePool, "dockerssd")
    reading = pool.host_flop_per_byte * _attention(model, tokens) / pool.pool_speedup
    return _compute(model, tokens) / pool.relative_flops + reading


def work_without_cache(model: ModelShape, tokens: float) -> float:
    """FLOP of a token for which all others are computed again; each pair of them once."""
    pairs = _attention(model, tokens) * tokens / 2
    return 2 * model.parameters * tokens + pairs


def speedup(model: ModelShape, tokens: float) -> float:
    """Speedup of the pool against the host."""
    return host_work(model, tokens) / pool_work(model, tokens)


def crossover(model: ModelShape) -> int:
    """First power of two tokens at which the pool is faster."""
    tokens = 1
    while speedup(model, tokens) <= 1:
        tokens *= 2
    return tokens


def crossing(model: ModelShape) -> float:
    """Length at which host and pool take as long: what is above 0 by the length alone is equal."""
    once = host_work(model, 0) - pool_work(model, 0)
    return once / (pool_work(model, 1) - host_work(model, 1) + once)


def results() -> list[Result]:
    """Rows P23 to P25."""
    models = [find_model(name) for name in MODELS]
    first, last = models[0], models[-1]
    shapes = "The shapes of the eight models are those that their authors publish."
    again = (
        "The paper does not say how a host without a cache computes pairs of tokens, nor over "
        "which tokens it takes the mean. Without pairs it would be 481x. With the mean over all "
        "tokens of a text it would be 521x and 3.38Kx, but P24 6.7."
    )
    return [
        *(
            Result(
                *("P23", part, "first power of two tokens at which the pool is faster"),
                Target.near(published, 0),
                float(crossover(model)),
                PAPER,
                "calibrated",
                note=f"{shapes} A is heads times their size. With the hidden size instead, "
                "LaMDA would begin at 512, which decided the choice.",
                margins={"as fast at": crossing(model)},
            )
            for part, published, model in (("smallest", 256, first), ("largest", 1024, last))
        ),
        Result(
            *("P24", "mean", "pool against hosts that swap, 32,768 tokens, mean of eight models"),
            Target.times(7.9),
            fmean(speedup(model, LENGTH) for model in models),
            PAPER,
            "calibrated",
            note="Both constants were fitted to the curve of which this is a point.",
        ),
        Result(
            *("P24", "asymptote", "the same, for any length"),
            Target.times(9.5),
            speedup(first, 2.0**60),
            PAPER,
            "calibrated",
            note="The constants of the pool alone give this.",
        ),
        *(
            Result(
                *("P25", part, "KV cache against none, 32,768 tokens, mean of eight models"),
                Target.times(published, text),
                fmean(work_without_cache(model, LENGTH) / work(model, LENGTH) for model in models),
                PAPER,
                "calibrated",
                note=again,
            )
            for part, published, text, work in (
                ("host", 421, "421x", host_work),
                ("pool", 3200, "3.2Kx", pool_work),
            )
        ),
    ]
