"""The cases of the harness: which are measured, in which order, and what each of them needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from transformers import PretrainedConfig

from vllm_ssdkv.base.sizes import MIB, format_size
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import RequestOptions
from vllm_ssdkv.config.selectors import SelectorName
from vllm_ssdkv.connector.kv_layout import paged_geometry
from vllm_ssdkv.profiling.decode_harness.decoder import Room
from vllm_ssdkv.profiling.decode_harness.models import (
    head_size,
    kv_bytes_per_token,
    kv_heads,
    llama_8b_config,
    small_config,
)
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.memory_plan import MemoryPlan
from vllm_ssdkv.store.memory.summary_rows import row_bytes
from vllm_ssdkv.store.open import sparse_memory

Tier = Literal["hbm", "dram", "ssd"]

BUDGET: Final = 1 / 8
"""Share of the tokens that a selector chooses from."""

DRAM_SHARE: Final = 1 / 5
"""Share of the contexts' KV that DRAM holds if they are read from the drive, as in the product's
own benchmark of decoding."""

STEPS_AHEAD: Final = 256
"""Tokens that may be decoded behind a context."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Scale of a measurement.

    Attributes:
        config: Of the model.
        contexts: Pairs of tokens and requests, in order of value.
        drive: The same where contexts are read from the drive.
        part: The same where all layers would not fit anywhere; measured with fewer.
        window: Tokens in HBM.
        staging: Bytes.
    """

    config: PretrainedConfig
    name: str
    dtype: torch.dtype
    contexts: tuple[tuple[int, int], ...]
    drive: tuple[int, int]
    part: tuple[int, int]
    window: int
    staging: int

    @classmethod
    def full(cls) -> Scale:
        """Llama 8B's shape."""
        return cls(
            llama_8b_config(),
            "Llama 8B's shape",
            torch.bfloat16,
            contexts=((32768, 1), (32768, 8), (131072, 1)),
            drive=(32768, 1),
            part=(131072, 8),
            window=256,
            staging=64 * MIB,
        )

    @classmethod
    def rehearsal(cls) -> Scale:
        """So small that a CPU goes through all cases in seconds."""
        return cls(
            small_config("llama", head_size=64),
            "a small Llama",
            torch.bfloat16,
            contexts=((1024, 1), (1024, 2), (2048, 1)),
            drive=(8192, 1),
            part=(1024, 4),
            window=32,
            staging=4 * MIB,
        )

    def room(self, context: int, requests: int) -> Room:
        """Room of a decoder for so many requests of this context."""
        return Room(requests, context + STEPS_AHEAD)


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: a selector, or how attention is computed where all KV is in HBM."""

    name: str
    asked: RequestOptions | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that share their contexts, where these are, and a store.

    Attributes:
        kind: Selector that the store is made for; ``sdpa`` where there is none.
        layers: Of the model; 0: as many as fit.
        note: What ``sparse`` changes, for people.
        sparse: Options beside the budget.
    """

    tier: Tier
    kind: SelectorName | Literal["sdpa"]
    context: int
    requests: int
    layers: int
    cases: tuple[Case, ...]
    note: str = ""
    sparse: tuple[tuple[str, str | int], ...] = ()


EXACT: Final = Case("exact", RequestOptions(selector="exact"))
BY_BOUNDS: Final = (
    EXACT,
    Case("bounds", RequestOptions(selector="bounds")),
    Case("window", RequestOptions(selector="window")),
)
BY_CODES: Final = (  # a graph that covers a mass takes a number of pages, too
    Case("codes", RequestOptions(selector="codes")),
    Case("adaptive", RequestOptions(selector="adaptive")),
)
BY_CHANNELS: Final = (Case("sparf", RequestOptions(selector="sparf")),)


_FULL: Final = (Case("full, transformers' SDPA"),)
_KERNEL: Final = (Case("full, our kernel"),)


def groups(scale: Scale) -> list[Group]:
    """All groups, in order of what they tell for their time.

    The contexts of ``sparf`` are half as large again, and take longest to be made.
    """
    layers = scale.config.num_hidden_layers
    found: list[Group] = []
    for context, requests in scale.contexts:
        found.append(Group("hbm", "sdpa", context, requests, layers, _FULL))
        found.append(Group("hbm", "exact", context, requests, layers, _KERNEL))
        found.append(Group("dram", "bounds", context, requests, layers, BY_BOUNDS))
        found.append(Group("dram", "adaptive", context, requests, layers, BY_CODES))
        if context == scale.contexts[0][0]:
            held = ("hbm_summaries", _text(_bounds_bytes(scale, context, requests)))
            note, cases = ", bounds in HBM", BY_BOUNDS[1:2]
            found.append(Group("dram", "bounds", context, requests, layers, cases, note, (held,)))
        if requests == 1 and context == scale.contexts[0][0]:
            found.append(Group("dram", "sparf", context, requests, layers, BY_CHANNELS))
            found.append(Group("ssd", "bounds", *scale.drive, layers, BY_BOUNDS[:2]))
    context, requests = scale.drive
    found.append(Group("ssd", "adaptive", context, requests, layers, BY_CODES))
    found.append(Group("ssd", "sparf", context, requests, layers, BY_CHANNELS))
    context, requests = scale.contexts[0]
    hot = ("hbm_pages", _text(max(MIB, 2 * _chosen_bytes(scale, context, requests))))
    note = ", pages kept in HBM"
    cases = BY_BOUNDS[1:2]
    found.append(Group("dram", "bounds", context, requests, layers, cases, note, (hot,)))
    found.append(Group("dram", "sparf", context, requests, layers, BY_CHANNELS, note, (hot,)))
    for context, requests in scale.contexts[1:]:
        found.append(Group("dram", "sparf", context, requests, layers, BY_CHANNELS))
    context, requests = scale.part
    found.append(Group("hbm", "sdpa", context, requests, 0, _FULL))
    found.append(Group("hbm", "exact", context, requests, 0, _KERNEL))
    found.append(Group("dram", "bounds", context, requests, 0, BY_BOUNDS))
    return found


def _chosen_bytes(scale: Scale, context: int, requests: int) -> int:
    """Bytes that all requests choose in one step, in all layers."""
    return int(BUDGET * context * requests * kv_bytes_per_token(scale.config, scale.dtype))


def _bounds_bytes(scale: Scale, context: int, requests: int) -> int:
    """Bytes of the bounds of all contexts, in whole pages, and of some blocks more."""
    room = scale.room(context, requests)
    kv = (room.blocks + SPARE_FRAMES) * room.block_tokens
    return int(kv * kv_bytes_per_token(scale.config, scale.dtype)) // SSDKVConfig().page_tokens


@dataclass(frozen=True, slots=True)
class Needed:
    """Bytes that a group takes of each kind of memory, beside the model."""

    hbm: int
    dram: int
    disk: int
    kv: int


def options(scale: Scale, group: Group, layers: int) -> SSDKVConfig:
    """Options of a group's store, all but the device: DRAM for all its contexts and their
    summaries, or for a fifth of them, divided as the product does by itself."""
    room = scale.room(group.context, group.requests)
    kind: Any = group.kind
    given: dict[str, Any] = {
        "mode": "page",
        "selector": kind,
        "hbm_window_tokens": scale.window,
        "io": {"staging": scale.staging},
    }
    if group.tier == "hbm":
        whole = -(-room.longest // 16) * 16
        return SSDKVConfig.from_extra_config(
            {**given, "hbm_window_tokens": whole, "dram_gib": _text(scale.staging + 256 * MIB)}
        )
    sparse: dict[str, Any] = {"budget": BUDGET, "exact_below": 0, **dict(group.sparse)}
    given["sparse"] = sparse
    config = SSDKVConfig.from_extra_config(given)
    geometry = paged_geometry(
        config,
        layers,
        kv_heads(scale.config),
        head_size(scale.config),
        room.block_tokens,
        scale.dtype,
    )
    channels = room.blocks * row_bytes(
        geometry, config.page_tokens, channels=config.scores_channels
    )
    if group.tier == "ssd":
        kv = room.blocks * geometry.frame_bytes
        dram = scale.staging + 2 * MIB + max(2 * MIB, int(DRAM_SHARE * kv) + channels)
        return SSDKVConfig.from_extra_config({**given, "dram_gib": _text(dram)})
    # Nothing is streamed through staging here; an eighth of it makes the tails of slots.
    staging = max(scale.staging, min(512 * MIB, 64 * 16 * geometry.tail_bytes))
    given["io"] = {"staging": staging}
    dram = _dram_for_all(SSDKVConfig.from_extra_config(given), geometry, staging, room.blocks)
    return SSDKVConfig.from_extra_config({**given, "dram_gib": _text(dram)})


SPARE_FRAMES: Final = 64
"""Frames beside those of the contexts: for blocks on their way into the store."""


def _dram_for_all(config: SSDKVConfig, geometry: SlotGeometry, staging: int, blocks: int) -> int:
    """Bytes of DRAM of which the product's own division has frames and summaries for ``blocks``."""
    choice = sparse_memory(config, blocks, blocks)
    nbytes = (blocks + SPARE_FRAMES) * geometry.frame_bytes
    while True:
        plan = MemoryPlan.of(
            geometry,
            nbytes,
            staging,
            most_bytes=2 * nbytes + staging,
            scrub=True,
            choice=choice,
        )
        # What the store lends does not count: nothing here may wait until it is given back.
        if plan.frames >= blocks + SPARE_FRAMES and plan.summary_rows >= blocks:
            return nbytes
        nbytes += max(MIB, nbytes // 32)


def _text(nbytes: int) -> str:
    return format_size(-(-nbytes // MIB) * MIB)


def needed(scale: Scale, group: Group, layers: int) -> Needed:
    """Memory that a group takes, with so many layers of the model."""
    room = scale.room(group.context, group.requests)
    each = kv_bytes_per_token(scale.config, scale.dtype)
    each = each // scale.config.num_hidden_layers * layers
    kv = room.blocks * room.block_tokens * each
    if group.tier == "hbm":
        return Needed(kv, 0, 0, kv)
    config = options(scale, group, layers)
    window = (group.requests * (scale.window + 1024) + 1024) * each
    window += config.sparse.hbm_summaries
    dram = config.dram_bytes(1)
    return Needed(window, dram, int(1.02 * kv * (1.6 if group.kind == "sparf" else 1.1)), kv)
