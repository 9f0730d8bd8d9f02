"""Start-up checks: what cannot be served is refused here, with the reason and the way out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from vllm import envs
from vllm.platforms import CpuArchEnum, current_platform

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.offload import DEVICES, OffloadConfig
from vllm_ssdkv.connector.kv_layout import FLOAT8_TYPES
from vllm_ssdkv.connector.obstacle import REUSE, Obstacle
from vllm_ssdkv.connector.scheduler.speculation import obstacles_to_page_mode
from vllm_ssdkv.kernels.operands.block_layout import head_size_problem

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

_LOOPING = {"IQuestLoopCoderForCausalLM"}
"""Architectures that page mode's walk over a context, one layer after the other, does not fit."""

_DECODES_IN_WINDOWS = {"UnlimitedOCRForCausalLM"}
"""Architectures in which only tokens that are decoded attend to a window."""

SOFT_CAP = "soft-capped logits"
ALIBI = "ALiBi"
KV_IN_FP8 = "KV in fp8"

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_engine(config: SSDKVConfig, vllm_config: VllmConfig, *, complete: bool = True) -> None:
    """Refuse engine settings and models that do not work with the connector.

    Args:
        config: Our options.
        vllm_config: vLLM's.
        complete: Whether it is. In the front end the size of a block is not known, and of what
            reuse mode asks for only that counts which no setting changes.

    Raises:
        UnsupportedError: every problem found, one per line, each with its way out.
    """
    in_reuse = list(obstacles_to_reuse(vllm_config))
    found = list(_engine(config, vllm_config))
    if config.mode == "page":
        found += _page_mode(config, vllm_config)
    else:
        found += [one for one in in_reuse if complete or not one.ways]
    if complete:
        found += _blocks(config, vllm_config)
    # Where one of them cannot be helped, the ways out of the others lead nowhere.
    hopeless = [one for one in found if _is_hopeless(one, in_reuse)]
    if found:
        elsewhere = in_reuse if config.mode == "page" else []
        tier = all(one.offloaded or one.ways for one in found)
        lines = [one.sentence(elsewhere, tier=tier) for one in hopeless or found]
        raise UnsupportedError(
            f"SSDKVConnector cannot start in mode {config.mode!r}:\n"
            + "\n".join(f"  - {line}" for line in lines)
        )
    if config.mode == "page" and complete and not current_platform.is_cpu():
        logger.warning(
            "ssdkv: mode page on CUDA was tested in Triton's interpreter only, and never on a GPU: "
            "compare some answers with those of vLLM alone"
        )


def _is_hopeless(one: Obstacle, in_reuse: list[Obstacle]) -> bool:
    left = [way for way in one.ways if way != REUSE]
    return not left and (not one.ways or any(not other.ways for other in in_reuse))


def refusal_of_layer(
    problem: str, vllm_config: VllmConfig | None, ways: tuple[str, ...] = (REUSE,)
) -> UnsupportedError:
    """The error for a layer that page mode does not serve, with the ways out for this model."""
    in_reuse = [] if vllm_config is None else list(obstacles_to_reuse(vllm_config))
    return Obstacle(problem, ways).error(in_reuse)


def _engine(config: SSDKVConfig, vllm_config: VllmConfig) -> Iterator[Obstacle]:
    """Settings that no mode serves, or no store that is elsewhere."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        for given, where, way in (
            (config.mode == "page", "in mode page", REUSE),
            (config.nodes, "with the option nodes", "leave nodes out"),
            (config.tier, "with the option tier", "leave tier out"),
        ):
            if given:
                text = f"--pipeline-parallel-size must be 1 {where}"
                yield Obstacle(text, ("use --tensor-parallel-size", way), offloaded=True)
        ray = parallel.distributed_executor_backend == "ray"
        # vLLM 0.33 has the newer one only, and no such variable.
        if ray and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True):
            yield Obstacle(
                "the older of vLLM's two executors for Ray passes on what the last stage of a "
                "pipeline tells and nothing of the others, so no load would end",
                (
                    "unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
                    "use --distributed-executor-backend mp",
                ),
            )
    for flag, size in (
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            yield Obstacle(f"{flag} must be 1", ("leave it out",), offloaded=True)
    yield from obstacles_to_hashes(vllm_config)


def obstacles_to_hashes(vllm_config: VllmConfig) -> Iterator[Obstacle]:
    """vLLM's hashes of blocks, if a later start has others."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and os.getenv("PYTHONHASHSEED") is None:
        yield Obstacle(
            f"--prefix-caching-hash-algo {algorithm} has another seed in each process: nothing "
            "would be found after a restart",
            ("use sha256", "set the environment variable PYTHONHASHSEED"),
        )


def _blocks(config: SSDKVConfig, vllm_config: VllmConfig) -> Iterator[Obstacle]:
    """Obstacles in the size of a block."""
    cache = vllm_config.cache_config
    if cache.prefix_match_unit not in (None, cache.block_size):
        yield Obstacle(
            f"--prefix-match-unit {cache.prefix_match_unit} is not the size of a block "
            f"({cache.block_size})",
            ("leave it out",),
        )
    if config.mode != "page":
        return
    if cache.block_size % config.page_tokens:
        yield Obstacle(
            f"--block-size {cache.block_size} is not a multiple of page_tokens "
            f"({config.page_tokens})",
            ("change one of them",),
        )
    if config.window_tokens < cache.block_size:
        yield Obstacle(
            f"hbm_window_tokens ({config.window_tokens}) is smaller than a block "
            f"({cache.block_size} tokens)",
            ("raise it", "lower --block-size"),
        )


def obstacles_to_reuse(vllm_config: VllmConfig) -> Iterator[Obstacle]:
    """Models that reuse mode does not serve, as far as their configuration tells: the KV cache
    itself, which ``model.attention_spec`` looks at, is known much later."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.attn_type == "encoder_only":
        yield Obstacle("the model attends to all tokens of an input, and keeps no KV")
    if model.is_encoder_decoder:
        yield Obstacle("the model has an encoder beside its decoder, whose KV belongs to one input")
    if model.is_attention_free:
        yield Obstacle(
            "the model has states (Mamba, linear attention) and no attention, without which "
            "nothing tells where they can be used again"
        )
    if (
        model.attention_chunk_size is not None
        and not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    ):
        yield Obstacle(
            "the model has layers that attend to chunks",
            ("start with --disable-hybrid-kv-cache-manager",),
            offloaded=True,
        )
    if model.is_hybrid:
        if model.use_mla:
            yield Obstacle(
                "the model has latent attention (MLA) beside layers with a state", offloaded=True
            )
        if not cache.enable_prefix_caching:
            yield Obstacle(
                "states are kept at the ends of blocks only for vLLM's own prefix caching",
                ("start with --enable-prefix-caching",),
            )
        if vllm_config.speculative_config is not None:
            yield Obstacle(
                "rejected drafts have changed the states of layers that have one",
                ("start without --speculative-config",),
                offloaded=True,
            )


def why_no_prefixes(vllm_config: VllmConfig) -> str:
    """Reason why no request of this engine may begin with stored blocks; empty: they may.

    vLLM turns its own prefix caching off where its hits would be wrong, as those of the store
    would. Nothing says whether vLLM or the user did it, so each place where vLLM does is known here
    (tests/contract/test_prefix_caching.py).
    """
    model = vllm_config.model_config
    if vllm_config.cache_config.enable_prefix_caching:
        return ""
    if not model.is_prefix_caching_supported:
        return "its pooler needs all tokens of a request in one step"
    if set(model.architectures) & _DECODES_IN_WINDOWS:
        return "KV of a token that was decoded is not what a prompt would make"
    if not current_platform.is_cpu():
        return ""
    if current_platform.get_cpu_architecture() == CpuArchEnum.RISCV:
        return "attention on RISC-V computes all of a prompt in one step"
    if model.use_mla and not vllm_config.scheduler_config.enable_chunked_prefill:
        return "latent attention (MLA) on a CPU without AMX computes all of a prompt in one step"
    return ""


def _heads(model: ModelConfig) -> set[tuple[int, int]]:
    """Sizes and numbers of KV heads that the model's layers have."""
    arch = model.model_arch_config
    layers = (arch[i] for i in range(arch.total_num_hidden_layers))
    return {(layer.head_size, layer.total_num_kv_heads) for layer in layers}


def _page_mode(config: SSDKVConfig, vllm_config: VllmConfig) -> Iterator[Obstacle]:
    """Obstacles to page mode."""
    yield from obstacles_to_page_mode(config, vllm_config)
    if vllm_config.kv_transfer_config.kv_role != "kv_both":
        yield Obstacle(
            "an engine in page mode reads what it stores", ('set kv_role to "kv_both"', REUSE)
        )
    if config.offload is not None:
        from vllm_ssdkv.connector.x_settings import obstacles_to_x

        yield from obstacles_to_x(config, vllm_config)
    model = vllm_config.model_config
    yield from _page_mode_model(model, vllm_config)
    yield from obstacles_to_oddities(config, *oddities(vllm_config))
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if not serves_dtype(cache_dtype, model.dtype):
        yield Obstacle(
            f"--kv-cache-dtype {cache_dtype} is not served in page mode", ("leave it out", REUSE)
        )
    if model.dtype not in SUPPORTED_DTYPES:
        yield Obstacle(
            f"--dtype {model.dtype} is not served in page mode",
            ("use float32, float16 or bfloat16", REUSE),
        )
    if vllm_config.parallel_config.use_ubatching:
        yield Obstacle(
            "steps are cut into micro-batches", ("leave out --enable-dbo and --ubatch-size",)
        )
    if config.sparse.hbm_summaries and config.keeps_page_records and model.enable_cumem_allocator:
        yield Obstacle(
            "sparse.hbm_summaries: memory of the GPU loses its content while an engine sleeps",
            ("leave out --enable-sleep-mode and --enable-cumem-allocator", "leave it out"),
        )
    workers = vllm_config.parallel_config.tensor_parallel_size
    if config.offload is not None and not model.use_mla:
        yield from _near(config.offload, model)
    threads = 0 if config.offload is None else config.offload.threads or 0
    if workers * threads > (cpus := os.cpu_count() or 1):
        yield Obstacle(
            f"offload.threads: {threads} threads of each of {workers} workers are more than the "
            f"machine's {cpus} CPUs",
            ("lower it", "leave it out"),
        )


def _page_mode_model(model: ModelConfig, vllm_config: VllmConfig) -> Iterator[Obstacle]:
    """Models that page mode does not serve."""
    if model.use_mla:
        yield Obstacle("the model uses MLA, which page mode does not serve", (REUSE,))
        return  # its heads are not those of its KV
    if model.is_mm_prefix_lm:
        yield Obstacle(
            "tokens of an image attend to those behind them, which page mode does not compute",
            ("start with --language-model-only", REUSE),
        )
    looping = sorted(_LOOPING & set(model.architectures))
    if looping:
        yield Obstacle(f"{looping[0]} attends to a layer's KV several times in a step", (REUSE,))
    if model.is_hybrid or model.is_attention_free:
        yield Obstacle(
            "the model has layers with a state (Mamba, linear attention) in place of KV, which "
            "page mode does not serve",
            (REUSE,),
        )
        return
    text = model.hf_text_config
    for has, what in (
        (model.is_encoder_decoder, "an encoder beside its decoder"),
        (model.attention_chunk_size is not None, "layers that attend to chunks"),
        (len(_heads(model)) > 1, "layers with different heads"),
        (getattr(text, "num_kv_shared_layers", 0), "layers that share KV"),
    ):
        if has:
            yield Obstacle(f"the model has {what}, which page mode does not serve", (REUSE,))
    problem = next(filter(None, (head_size_problem(size) for size, _ in _heads(model))), "")
    if problem:
        yield Obstacle(problem, (REUSE,))


def oddities(vllm_config: VllmConfig) -> list[str]:
    """Names of what selectors and devices that attend do not know: logits that are no scaled
    products, and numbers of 8 bits."""
    model = vllm_config.model_config
    found = {
        SOFT_CAP: getattr(model.hf_text_config, "attn_logit_softcapping", None),
        ALIBI: model.uses_alibi,
        KV_IN_FP8: vllm_config.cache_config.cache_dtype in FLOAT8_TYPES,
    }
    return [what for what, has in found.items() if has]


def obstacles_to_oddities(config: SSDKVConfig, *found: str) -> Iterator[Obstacle]:
    """Options that do not know what an engine has of :func:`oddities`."""
    for what in filter(None, found):
        # The least and the largest of numbers of 8 bits are such numbers; a mean is none.
        more = ("bounds",) if what == KV_IN_FP8 else ()
        if config.selector not in ("exact", "window", *more):
            names = '"exact", "window" or "bounds"' if more else '"exact" or "window"'
            yield Obstacle(
                f'selector "{config.selector}" does not know {what}', (f"set it to {names}", REUSE)
            )
        elif what == ALIBI and config.orders_tokens:
            yield Obstacle(
                f'sparse.token_order "{config.sparse.token_order}" forgets at which position of '
                "its block a token stands, and the model has ALiBi",
                ('set it to "position"', 'set selector to "exact"'),
            )
        elif what == KV_IN_FP8 and config.selector != "exact" and not current_platform.is_cpu():
            yield Obstacle(
                f'selector "{config.selector}" does not know {what} on a GPU',
                ('set it to "exact"', REUSE),
            )
        elif what == KV_IN_FP8 and config.orders_tokens:
            yield Obstacle(
                f'sparse.token_order "{config.sparse.token_order}" does not know {what}',
                ('set it to "position"', 'set selector to "exact"'),
            )
        if config.offload is not None:
            yield Obstacle(
                f'offload.kind: "{config.offload.kind}" does not compute {what}',
                ("leave offload out",),
            )


def _near(options: OffloadConfig, model: ModelConfig) -> Iterator[Obstacle]:
    """Models that the device that attends does not serve."""
    device = DEVICES.resolve(options.kind)
    problems = (device.problem(size, model.dtype) for size, _ in _heads(model))
    for problem in sorted({problem for problem in problems if problem}):
        yield Obstacle(f"offload.kind: {problem}", ('set it to "host"', "leave offload out"))


def serves_dtype(cache_dtype: str, dtype: torch.dtype | None) -> bool:
    """Check whether page mode serves a ``--kv-cache-dtype``: the model's type, by name or by
    ``auto``, or one of 8 bits with a scale of each layer."""
    own = cache_dtype == "auto" or f"torch.{cache_dtype}" == str(dtype)
    return own or cache_dtype in FLOAT8_TYPES
