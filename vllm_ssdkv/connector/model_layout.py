"""Layout of the model's KV: the part that a slot holds, and the facts that make it the same KV.

Both roles build these from the same vLLM configuration, so scheduler and workers agree on slot
sizes and fingerprint without talking to each other.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import vllm
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.tiers import TIERS
from vllm_ssdkv.connector.compatibility import refusal_of_layer
from vllm_ssdkv.connector.identity.weight_files import weight_files
from vllm_ssdkv.connector.kv_cache_spec import TieredAttentionSpec
from vllm_ssdkv.connector.kv_layout import (
    FLOAT8_TYPES,
    KVLayout,
    joined_geometry,
    paged_geometry,
)
from vllm_ssdkv.connector.obstacle import REUSE, WITHOUT_US, Obstacle
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

_SAMPLE_BYTES = 64 * 1024

_CHANNELS_OF_PAGE: Final = 4
"""Most channels in a page of them on SSD. Where a query chooses an eighth of the channels, a token
then reads at most a third of the bytes of exact attention with an eighth of the pages; of pages
with 8 channels it would read 0.46, and with 16 nearly all of K."""

MOST_PARTS = 255
"""Blocks of all KV cache groups to a block of ours: a byte of their keys tells them apart."""


def attention_spec(kv_cache_config: KVCacheConfig) -> AttentionSpec:
    """The spec of the model's attention layers; of several KV cache groups, that of the first.

    Raises:
        UnsupportedError: groups that do not share their blocks, or layers whose state is not kept
            at the ends of blocks, or beside drafts, or without attention to everything.
    """
    specs = _group_specs(kv_cache_config)
    _check_states(specs)
    first = next(spec for spec in specs if isinstance(spec, AttentionSpec))
    if len(specs) > 1:
        for spec in specs:
            # Of as many bytes, those of some may have more tokens than those of others. vLLM's hits
            # end within larger blocks of states.
            alike = spec.page_size_bytes == first.page_size_bytes
            if isinstance(spec, MambaSpec):
                alike = alike and spec.block_size == math.gcd(*(one.block_size for one in specs))
            if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, MambaSpec) or not alike:
                raise Obstacle(
                    f"the model has {len(specs)} KV cache groups ({_kinds(specs)}); of several "
                    "SSDKVConnector serves full and sliding-window attention and layers with a "
                    "state whose blocks have as many bytes, those of states as few tokens as any",
                    _one_group(specs),
                    offloaded=True,
                ).error()
    parts = sum(_block_tokens(specs) // spec.block_size for spec in specs)
    if parts > MOST_PARTS:
        sizes = ", ".join(str(size) for size in sorted({spec.block_size for spec in specs}))
        raise Obstacle(
            f"the model's KV cache groups have blocks of {sizes} tokens, {parts} of them for the "
            f"same tokens; SSDKVConnector serves up to {MOST_PARTS} such blocks",
            offloaded=True,
        ).error()
    return first


def _group_specs(kv_cache_config: KVCacheConfig) -> list[AttentionSpec | MambaSpec]:
    groups = kv_cache_config.kv_cache_groups
    return [_group_spec(group.kv_cache_spec, alone=len(groups) == 1) for group in groups]


def _block_tokens(specs: Sequence[KVCacheSpec]) -> int:
    """Tokens of a block of ours, which is vLLM's scheduler's: whole blocks of every group."""
    return math.lcm(*(spec.block_size for spec in specs))


def _check_states(specs: Sequence[AttentionSpec | MambaSpec]) -> None:
    """Raises UnsupportedError for layers with a state that cannot be found again."""
    recurrent = [spec for spec in specs if isinstance(spec, MambaSpec)]
    if recurrent and not any(isinstance(spec, FullAttentionSpec) for spec in specs):
        raise UnsupportedError(
            f"the model's KV cache is {_kinds(specs)}; SSDKVConnector serves layers with a state "
            f"(Mamba, linear attention) only beside layers that attend to everything: {WITHOUT_US}"
        )
    if any(spec.mamba_cache_mode != "align" for spec in recurrent):
        raise UnsupportedError(
            "the states of Mamba and linear-attention layers are kept at the ends of blocks only "
            "with vLLM's own prefix caching: start with --enable-prefix-caching"
        )
    if any(spec.num_speculative_blocks for spec in recurrent):
        raise UnsupportedError(
            "the model has layers with a state, which drafts that are rejected have changed: start "
            "without --speculative-config"
        )


def _kinds(specs: Sequence[KVCacheSpec]) -> str:
    return ", ".join(sorted({type(spec).__name__ for spec in specs}))


def _layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Specs of a group's layers that differ; vLLM tells its scheduler one of them."""
    return (
        list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    )


def _group_spec(spec: KVCacheSpec, *, alone: bool) -> AttentionSpec | MambaSpec:
    """The spec of a group's first layer; ``alone``: it is the only group."""
    specs = _layer_specs(spec)
    spec = specs[0]
    served = alone or all(one.page_size_bytes == spec.page_size_bytes for one in specs[1:])
    # Whole blocks are bytes; page mode looks into them.
    unlike = isinstance(spec, TieredAttentionSpec) and any(one != spec for one in specs)
    if unlike or not served:
        raise Obstacle(
            "the model's layers have KV of several sizes; SSDKVConnector serves them in mode "
            '"reuse", where they are one KV cache group',
            (REUSE,) if served else (),
            offloaded=True,
        ).error()
    if any(getattr(one, "non_causal", False) for one in specs):
        raise Obstacle(
            "the model's attention is not causal: KV of a prefix depends on what follows it, and "
            "cannot be used again"
        ).error()
    if not isinstance(spec, AttentionSpec | MambaSpec):
        raise Obstacle(
            f"the model's KV cache is {type(spec).__name__}; SSDKVConnector stores attention KV "
            "and states"
        ).error()
    return spec


def _one_group(specs: Sequence[AttentionSpec | MambaSpec]) -> tuple[str, ...]:
    """The way out for attention layers of one size: vLLM then keeps all of their blocks alike."""
    kinds = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
    sizes = {spec.page_size_bytes // spec.block_size for spec in specs}
    if all(type(spec) in kinds for spec in specs) and len(sizes) == 1:
        return ("start with --disable-hybrid-kv-cache-manager",)
    return ()


def kv_layout(
    config: SSDKVConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> KVLayout:
    """Layout of the KV and of the slots that hold it.

    Raises:
        UnsupportedError: see :func:`attention_spec`; or no layer has KV, a block is not a whole
            number of pages, its channels cannot be read in part, or it is too large for a slot.
    """
    layers = [tuple(group.layer_names) for group in kv_cache_config.kv_cache_groups]
    names = max(layers, key=len, default=())
    if not names:
        raise UnsupportedError(
            "a stage of the pipeline has no layer with KV: give it some by the environment "
            "variable VLLM_PP_LAYER_PARTITION, or lower --pipeline-parallel-size"
        )
    spec, specs = attention_spec(kv_cache_config), _group_specs(kv_cache_config)
    named, dtype = cache_dtype(vllm_config), spec.dtype
    if config.mode == "page":
        if dtype.itemsize == 1:
            dtype = FLOAT8_TYPES[named]
        if spec.head_size_v != spec.head_size:
            raise refusal_of_layer(
                f"the model's heads have {spec.head_size} channels of K and {spec.head_size_v} of "
                "V; page mode serves as many of each",
                vllm_config,
            )
        if spec.block_size % config.page_tokens:
            raise UnsupportedError(
                f"--block-size {spec.block_size} is not a multiple of page_tokens "
                f"({config.page_tokens}); change one of them"
            )
        if config.scores_channels and config.sparse.channel_pages == "ssd":
            _check_channel_pages(spec, config.page_tokens)
    sizes = _layer_bytes(kv_cache_config)
    try:
        geometry = _geometry(config, spec, len(names), sizes)
    except ValueError as error:
        raise UnsupportedError(
            f"a block of this model makes a {error}: lower --block-size, or raise "
            "--tensor-parallel-size"
        ) from error
    parallel, sharers = vllm_config.parallel_config, _sharers(config, vllm_config, kv_cache_config)
    chain = next((one for one in specs if isinstance(one, FullAttentionSpec)), spec)
    of_chain = kv_cache_config.kv_cache_groups[specs.index(chain)]
    return KVLayout(
        names,
        _block_tokens(specs),
        spec.num_kv_heads,
        spec.head_size,
        dtype,
        geometry,
        parallel.tensor_parallel_size * parallel.pipeline_parallel_size // sharers,
        kv_cache_config.num_blocks,
        tuple(others for others in layers if others is not names),
        kv_cache_config.has_mamba_layers,
        named,
        vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config),
        kv_cache_config.has_mamba_layers
        or (not sizes and any(one.page_size_padded for one in specs)),
        chain.block_size,
        max(_layer_specs(of_chain.kv_cache_spec), key=lambda one: one.page_size_bytes).dtype,
        tuple(of_chain.layer_names),
        sizes,
        sharers,
    )


def _sharers(config: SSDKVConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tensor-parallel ranks to a stored copy: all, where vLLM says that their KV is identical
    (MLA), and the store is this engine's."""
    ranks: int = vllm_config.parallel_config.tensor_parallel_size
    alone = config.mode == "reuse" and not config.nodes and config.tier is None
    return ranks if alone and kv_cache_config.kv_tp_replicas == ranks else 1


def _layer_bytes(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Bytes of a block of each layer, where they are of several sizes; else none.

    Specs do not tell: vLLM's scheduler has one of a group. Where blocks are outermost a layer's is
    as long as the way to the next layer, else as the way to the next block.
    """
    sizes = {
        name: min(tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }
    if len(kv_cache_config.kv_cache_groups) > 1 or len(set(sizes.values())) < 2:
        return ()
    return tuple(sizes[name] for name in kv_cache_config.kv_cache_groups[0].layer_names)


def _geometry(
    config: SSDKVConfig, spec: AttentionSpec, layers: int, sizes: Sequence[int]
) -> SlotGeometry:
    if config.mode == "page":
        heads, size = spec.num_kv_heads, spec.head_size
        geometry = paged_geometry(config, layers, heads, size, spec.block_size, spec.dtype)
    elif sizes:
        geometry = joined_geometry(sizes)
    else:
        geometry = SlotGeometry("opaque", layers, 1, 1, spec.page_size_bytes)
    return geometry if config.encryption is None else replace(geometry, encrypted=True)


def context_layers(vllm_config: VllmConfig, layout: KVLayout) -> tuple[int, ...]:
    """Numbers of the layers that attend to more than a sliding window, ascending; the model must be
    there."""
    modules = vllm_config.compilation_config.static_forward_context
    return tuple(
        i
        for i, name in enumerate(layout.layer_names)
        if getattr(modules[name], "sliding_window", None) is None
    )


def logits_are_plain(vllm_config: VllmConfig, layout: KVLayout) -> bool:
    """Check whether the logits of all layers are products of queries and keys alone, and none has
    attention sinks; the model must be there."""
    modules = vllm_config.compilation_config.static_forward_context
    rules = [modules[name].impl.softmax for name in layout.layer_names]
    return all(rule.is_plain and rule.sinks is None for rule in rules)


def _check_channel_pages(spec: AttentionSpec, page_tokens: int) -> None:
    """Raises UnsupportedError when a page of channels has more than :data:`_CHANNELS_OF_PAGE`."""
    whole, groups = 2 * spec.head_size, spec.block_size // page_tokens
    least = -(-whole // _CHANNELS_OF_PAGE)
    if groups < least or whole % groups:
        raise UnsupportedError(
            f'sparse.channel_pages "ssd" needs a --block-size of at least {least * page_tokens} '
            f"tokens, of a number of pages that divides {whole}, not {spec.block_size}: a page of "
            "smaller blocks has so many channels that nearly all of K would be read. Give another "
            'one, or set channel_pages to "dram"'
        )


def fingerprint(
    config: SSDKVConfig, vllm_config: VllmConfig, layout: KVLayout, kv_cache_config: KVCacheConfig
) -> Fingerprint:
    """Shape of the KV in a store: what its bytes are, not whose.

    Weights and settings are in the keys (:class:`BlockKeys`), tokens, salts and media in vLLM's
    block hashes.
    """
    parallel = vllm_config.parallel_config
    stages = parallel.pipeline_parallel_size
    fields: dict[str, str | int] = {
        "kv_dtype": str(layout.dtype),
        "cache_dtype": layout.cache_dtype,
        "layers": len(layout.layer_names),
        "kv_heads_per_rank": layout.kv_heads,
        "head_size": layout.head_size,
        "block_size": layout.block_tokens,
        "slot": layout.geometry.kind,
        "page_bytes": layout.geometry.payload_bytes,
        "tp_size": parallel.tensor_parallel_size // layout.sharers,
    }
    if stages > 1:
        del fields["page_bytes"]
        fields |= _of_all_stages(vllm_config.model_config, parallel)
    elif layout.layer_bytes:
        fields["page_bytes"] = _sizes_identity(layout.layer_bytes)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1:
        # Which of a slot's layers are whose, and which keys are of which group.
        specs = _group_specs(kv_cache_config)
        sizes = {spec.block_size for spec in specs}
        fields["groups"] = "; ".join(
            _group_identity(group, spec, stages)
            + (f", blocks of {spec.block_size}" * (len(sizes) > 1))
            for group, spec in zip(groups, specs, strict=True)
        )
    draft = vllm_config.speculative_config
    if draft is not None and draft.uses_draft_kv_cache():
        # The drafter's layers are layers of the slots.
        fields["draft"] = str(draft.method)
    if config.selector != "exact":
        # Selectors and budgets share a store: keys tell apart what they have decoded. What a slot
        # holds beside KV differs only by how pages are scored.
        fields["attention"] = "sparse"
        if config.scores_channels:
            fields["summaries"] = "channels"
        elif config.scorer == "codes":
            fields["summaries"] = f"codes of {config.sparse.code_bits} bits"
        elif config.scorer == "spread":
            rest = config.sparse.estimate_rest
            fields["summaries"] = "spread, sums of V" if rest else "spread"
        if config.orders_tokens:
            # Attention does not mind, but a page then has other tokens than its positions say.
            fields["token_order"] = config.sparse.token_order
    if config.tier is not None:
        fields["tier"] = f"{config.tier} {TIERS.version(config.tier)}"
    return Fingerprint(fields)


def _of_all_stages(model: ModelConfig, parallel: ParallelConfig) -> dict[str, str | int]:
    """Fields that are the same whichever layers a stage has, as it knows no others: the model's.
    The superblocks of a rank have the size of its slots."""
    layers, stages = model.get_total_num_hidden_layers(), parallel.pipeline_parallel_size
    begins = [get_pp_indices(layers, stage, stages)[0] for stage in range(stages)]
    return {
        "kv_dtype": str(model.dtype),
        "layers": layers,
        "kv_heads_per_rank": model.get_num_kv_heads(parallel),
        "head_size": model.get_head_size(),
        "stages": f"from layers {' '.join(map(str, begins))}",
    }


def cache_dtype(vllm_config: VllmConfig) -> str:
    """``--kv-cache-dtype``; "auto" also where the model's own dtype was named."""
    named = str(vllm_config.cache_config.cache_dtype)
    own = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return "auto" if named == own else named


def _group_identity(group: KVCacheGroupSpec, spec: KVCacheSpec, stages: int) -> str:
    if isinstance(spec, MambaSpec):
        held = f"state {spec.mamba_type.name} of {spec.shapes} {spec.dtypes}"
    else:
        held = f"window {getattr(spec, 'sliding_window', None)}"
    if stages > 1:  # which know their own layers only: other releases may share them out otherwise
        return f"layers by vLLM {vllm.__version__}, {held}"
    names = hashlib.blake2b("\n".join(group.layer_names).encode(), digest_size=8).hexdigest()
    return f"{len(group.layer_names)} layers {names}, {held}"


def _sizes_identity(sizes: Sequence[int]) -> str:
    """Text that names the places of layers of several sizes."""
    order = hashlib.blake2b(" ".join(map(str, sizes)).encode(), digest_size=8).hexdigest()
    counted = ", ".join(f"{count} layers of {size}" for size, count in Counter(sizes).items())
    return f"{counted}, in order {order}"


def directory_name(model: str, revision: str | None) -> str:
    """Names the model in the default directory: a model that was moved or copied is the same.

    A local one by samples of its weight files. Nothing else depends on it: whose KV a block is,
    its key says.
    """
    root = Path(model)
    if not root.exists():
        return f"{model}@{revision or 'main'}"
    files = weight_files(model) or [root]
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        if file.is_file():
            with file.open("rb") as stream:
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
