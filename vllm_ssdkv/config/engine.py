"""Every option of the product, typed, frozen and validated; the only place that reads options.

The options are the JSON object ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``.
Each field states what it means and why its default is what it is: ``docs/options.md`` is generated
from here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.host import (
    DEFAULT_DRAM_LIMIT,
    available_memory,
    default_capacity,
    default_root,
    is_block_device,
)
from vllm_ssdkv.base.sizes import (
    GIB,
    MIB,
    SIZE_TEXT,
    approximate_size,
    format_size,
    parse_size,
    size_or_none,
)
from vllm_ssdkv.config.batch import BatchConfig
from vllm_ssdkv.config.encryption import EncryptionConfig
from vllm_ssdkv.config.io import IoConfig
from vllm_ssdkv.config.offload import OffloadConfig
from vllm_ssdkv.config.problems import checked_options
from vllm_ssdkv.config.schema import (
    PATH_TEXT,
    Allowed,
    Condition,
    OptionModel,
    PathText,
    PerRequest,
    Reason,
    checked_name,
    names_text,
    or_text,
)
from vllm_ssdkv.config.selectors import (
    EXACT,
    SELECTORS,
    SelectorName,
    registered_name,
    takes_scorer,
)
from vllm_ssdkv.config.sparse import LEAST_CHOOSING, ScorerName, SparseConfig
from vllm_ssdkv.config.tiers import TIERS

MIN_CAPACITY: Final = 16 * MIB
MAX_DEVICES: Final = 64
MAX_NODES: Final = 64
"""Addresses that the option ``nodes`` may have."""

LEAST_NODE_DEADLINE_S: Final = 1.0
"""Least ``io.deadline`` of an engine whose slots lie on nodes: a moment's pause of a node's drive
must not take it out of use."""

_OF_A_STORE: Final = (
    *("devices", "state_dir", "recover", "dram_gib", "admission", "trim"),
    *("encryption", "retain_share"),
)
"""Options of a store, which a node has in place of its engines."""

_OF_DRIVES: Final = tuple(name for name in _OF_A_STORE if name not in {"dram_gib", "admission"})
"""Options of drives among them."""

_CHANGE_NO_CHOICE: Final = frozenset(
    {"channel_pages", "exact_below", "hbm_pages", "hbm_summaries", "page_cache", "page_policy"}
    | {"prefetch", "summaries"}
)
"""Options of the group ``sparse`` that do not change to what a query attends: where pages and
summaries are kept and when they are read, and which requests choose at all."""

MAX_DRAM_GIB: Final = 65536
WINDOW: Final = 1024
"""Default window in tokens."""
SPARSE_WINDOW: Final = 256
"""Default window in tokens with a selector that chooses."""


_PAGE: Final = Condition(lambda config, _: config.mode == "page", 'mode is "page"')
_ON_NODES: Final = Condition(lambda config, _: bool(config.nodes), "nodes has an entry")
_MAY_COMPUTE: Final = Condition(
    lambda config, _: config.mode == "reuse" or config.load == "always",
    'mode is "reuse": page mode always loads',
)
_SEVERAL: Final = Condition(lambda config, _: len(config.devices) > 1, "devices has another entry")
_RAW: Final = Condition(
    lambda config, _: not config.trim or any(is_block_device(d.path) for d in config.devices),
    "devices has a raw block device: data files are never trimmed",
)

# In the annotations below Field(...) comes before a validator: pydantic then applies its bounds to
# the number inside `int | None` instead of to what the validator returned, which may be None.


def _tier_or_none(value: str | None) -> str | None:
    return None if value is None else checked_name(TIERS, value)


def gib_or_none(value: object) -> object:
    """A text becomes GiB; anything else is left to the type check."""
    if isinstance(value, str):
        if value.strip().replace(".", "", 1).isdigit():
            raise ValueError(f"as a text it needs its unit, such as {value.strip()}GiB")
        return parse_size(value) / GIB
    if isinstance(value, int | float) and value > MAX_DRAM_GIB:
        raise ValueError("a number is GiB; for bytes give a text with a unit")
    return value


def _page_tokens(value: int) -> int:
    if value < 16 or value & (value - 1):
        raise ValueError("not a power of two that 16 divides")
    return value


class DeviceConfig(OptionModel):
    """One SSD: a directory on it, or a raw block device."""

    path: Annotated[
        PathText,
        Allowed(PATH_TEXT),
        Field(
            description="Directory (created if missing) or raw block device. A plain string in "
            "the list of devices is this path."
        ),
        Reason("Only the user knows where the SSDs are mounted."),
    ]
    capacity: Annotated[
        int | None,
        Field(
            ge=MIN_CAPACITY,
            description="Maximum number of bytes that all ranks together store on this device.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: a quarter of the free space, at most 64GiB, so that a first try fills no disk; "
            "all of a raw block device. An existing store keeps its size."
        ),
    ] = None
    weight: Annotated[
        float | None,
        Field(
            gt=0,
            le=64,
            description="Share of the data relative to the other devices: a device that is twice "
            "as fast gets twice the weight. If another device has a weight, null is 1.",
        ),
        Reason(
            "null everywhere: several devices are measured at their first use (64 MiB or 0.3 s "
            "each), and the store remembers the result, so that restarts change nothing."
        ),
        _SEVERAL,
    ] = None
    tbw: Annotated[
        int | None,
        Field(
            ge=MIN_CAPACITY,
            description="Rated write endurance of the drive in bytes (TBW). It is used only for "
            "vllm:ssdkv_wear_used, the share of it that this store has used.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason("null: only the drive's data sheet states it."),
    ] = None
    daily_write_budget: Annotated[
        int | None,
        Field(
            ge=MIN_CAPACITY,
            description="Maximum number of bytes written to the device per day (UTC). Once it is "
            "used up, reuse mode stores nothing more: blocks are striped over all devices, so the "
            "first budget counts for all. Page mode goes on, and writes only the data that a "
            "running request needs.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(size_or_none),
        Reason(
            "null: no limit; the wear that a cache may cause is the user's decision. Page mode "
            "has no hard limit, because requests that wait for midnight would be an outage."
        ),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return or_text(handler(core_schema))


class SSDKVConfig(OptionModel):
    """All options. Build it with :meth:`from_extra_config`; instances never change."""

    mode: Annotated[
        Literal["reuse", "page"],
        Field(
            description="`reuse` keeps copies of computed KV blocks, so that a prefix is never "
            "computed twice. `page` also serves contexts larger than the KV memory of the GPU, "
            "with this package's attention backend. The two modes cannot share a store: name "
            "other directories when you change the mode."
        ),
        Reason(
            "reuse works with any attention backend and nearly every model (docs/not-there.md), "
            "and never changes a result."
        ),
    ] = "reuse"
    devices: Annotated[
        tuple[DeviceConfig, ...],
        Allowed(
            f'a list of up to {MAX_DEVICES} paths, such as ["/mnt/nvme0/kv"], or of objects with '
            "path and the other fields of a device"
        ),
        Field(
            strict=False,
            max_length=MAX_DEVICES,
            description="SSDs that hold the store, striped over all of them.",
        ),
        Reason(
            "Empty: one directory per model, mode and kind of selector below "
            "$XDG_CACHE_HOME/ssdkv (~/.cache/ssdkv), so that a first try needs no option. `ssdkv "
            "ls` lists them, `ssdkv rm` removes one."
        ),
    ] = ()
    replicas: Annotated[
        Literal[1, 2],
        Field(
            description="Number of copies of each block, on different devices. With `2`, ssdkv "
            "reads the other copy if a drive fails or a page is damaged; this halves capacity and "
            "write rate, and doubles the wear. An existing store changes to another value "
            "gradually, as its slots are reused. With several `nodes` in mode `reuse` it is the "
            "number of nodes that keep each block."
        ),
        Reason(
            "1: lost blocks are recomputed, which costs time and never changes a token. Set 2 if "
            "you cannot spare that time when a drive fails."
        ),
    ] = 1
    state_dir: Annotated[
        PathText | None,
        Allowed(PATH_TEXT),
        Field(description="Directory of store.json and the journal."),
        Reason(
            "null: the first device that is a directory. It must be given if every device is a "
            "raw block device."
        ),
    ] = None
    recover: Annotated[
        Literal["quiet", "strict", "none"],
        Field(
            description="Reaction of a start to a damaged journal or manifest. `quiet` keeps the "
            "intact part, and counts and logs the rest. `strict` does not start, and names the "
            "file. `none` starts with an empty store in any case."
        ),
        Reason(
            "Lost blocks are recomputed and damaged ones are never served; nobody should have to "
            "repair a cache before it works."
        ),
    ] = "quiet"
    dram_gib: Annotated[
        float | None,
        Allowed('a number of GiB or a size such as "4GiB"'),
        Field(
            gt=0,
            le=MAX_DRAM_GIB,
            description="Memory of the DRAM tier of this engine, shared equally by its workers. "
            "It includes io.staging.",
        ),
        BeforeValidator(gib_or_none, json_schema_input_type=float | str | None),
        Reason(
            "null: 10 % of the available memory, at most 4 GiB, so that a first try leaves memory "
            "to other programs; up to half of the available memory if the blocks are so large."
        ),
    ] = None
    hbm_window_tokens: Annotated[
        int | None,
        Field(
            ge=16,
            description="Number of a request's newest tokens that stay in HBM (page mode). It is "
            "a multiple of page_tokens, and not less than vLLM's --block-size and the sliding "
            "window of the model's layers, if some have one.",
        ),
        Reason(
            "null: 1024, which covers most local attention and is small next to any context worth "
            "paging; 256 with a `selector` that chooses. "
            "There the window counts in the budget: with an eighth and a window of 1024, no "
            "request of less than 16384 tokens would choose."
        ),
        _PAGE,
    ] = None
    page_tokens: Annotated[
        int,
        Allowed("16 or 16 times a power of two"),
        Field(
            le=4096, description="Number of tokens of one KV head and layer that are read together."
        ),
        AfterValidator(_page_tokens),
        Reason(
            "16: at head size 128 and 16 bits, a page is 4 KiB of K and 4 KiB of V, two sectors."
        ),
        _PAGE,
    ] = 16
    selector: Annotated[
        SelectorName,
        Allowed(names_text(SELECTORS, EXACT)),
        AfterValidator(partial(checked_name, SELECTORS, other=EXACT)),
        Field(
            description="Part of the context that a decoded token attends to (page mode). `exact` "
            "attends to all of it. `bounds` chooses pages by bounds of their logits, `spread` by "
            "mean and variance of their keys, and `codes` by logits of their tokens from K in two "
            "bits. `sparf` chooses pages or tokens by logits from a few channels of K; the store "
            "then holds a second copy of K. `adaptive` takes pages by the scores of one of them "
            "until these cover enough of the attention. `swarm` takes clusters of pages that the "
            "request's queries chose together. `window` attends to the first and the newest "
            "tokens only, for comparison. `module:Class` is a class of your own (docs/guests.md). "
            "Prompts are always exact. Stores for `exact`, channels, `spread`, `codes` and the "
            "others cannot replace each other."
        ),
        Reason("exact: lossless."),
        PerRequest(
            (
                Allowed(names_text(SELECTORS, EXACT, guests=False)),
                AfterValidator(registered_name),
            )
        ),
    ] = "exact"
    sparse: Annotated[
        SparseConfig,
        Field(description="Limits and memory of the selectors other than `exact`."),
    ] = SparseConfig()
    offload: Annotated[
        OffloadConfig | None,
        Field(
            description="Device near storage that attends to contexts, while the accelerator "
            "attends to the window (page mode). Steps that compute part of a prompt do not use "
            "it. It changes no token beyond rounding."
        ),
        Reason(
            "null: off. It pays if the link to the accelerator is slower than the host's "
            "attention, and takes cores that vLLM may need."
        ),
    ] = None
    load: Annotated[
        Literal["auto", "always"],
        Field(
            description="Choice between loading and recomputing a stored prefix (reuse mode). "
            "`auto` loads it unless the measured speeds say that computing is faster; `always` "
            "loads it in any case. Page mode always loads."
        ),
        Reason(
            "auto: a hit is never slower than a miss, however slow the drives. Set `always` if "
            "you would rather wait for a drive than spend GPU time."
        ),
        _MAY_COMPUTE,
    ] = "auto"
    verify_hits: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000_000,
            description="Verify one hit in this many, the first four after a start, and the "
            "first one after a reset of the cache: compute the last block of the hit and compare "
            "it with the stored one. If they differ by more than rounding, the store is "
            "suspended until `ssdkv resume`, and an alert fires. 0 verifies none.",
        ),
        Reason(
            "256: the keys already exclude KV of other weights or settings. This finds unforeseen "
            "errors, and costs the time of one block in 256 hits."
        ),
    ] = 256
    admission: Annotated[
        Literal["all", "second_use"],
        Field(
            description="Blocks that are written to the devices. `all` writes every block. "
            "`second_use` writes the blocks that requests recently computed or found a second "
            "time; the count takes 8 to 16 bytes of memory per slot, and starts anew with the "
            "engine. In page mode other blocks are written only when they leave the window."
        ),
        Reason(
            "all: a prefix is found the first time that it is asked for again. second_use reduces "
            "wear if most prompts never come back, but computes each prefix twice."
        ),
    ] = "all"
    retain_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of the slots that requests may retain, at most (`retain` in "
            "`kv_transfer_params`, docs/quickstart.md). Other blocks are evicted before retained "
            "ones, and `admission` lets them in. Beyond the share the least recently used retained "
            "block becomes an ordinary one. After a restart all blocks are ordinary. 0: requests "
            "that ask for it get an error in their answer.",
        ),
        Reason(
            "0.25: sessions keep their blocks for a while, and three quarters of the store still "
            "serve everybody."
        ),
    ] = 0.25
    on_reset: Annotated[
        Literal["keep", "forget"],
        Field(
            description="Effect of a reset of vLLM's cache (`sleep`, `/pause`, "
            "`release_kv_cache_memory`, `/reset_prefix_cache?reset_external=true`). `keep` hides "
            "the store until the weights have been hashed again, then shows the blocks of these "
            "weights. `forget` never finds the stored blocks again."
        ),
        Reason(
            "keep: the keys contain the hash of the weights, so blocks of other weights are not "
            "found. `ssdkv rm` erases a store."
        ),
    ] = "keep"
    trim: Annotated[
        bool,
        Field(
            description="Tell raw block devices by TRIM about unused space: everything when a "
            "store is created there, and all slots that a reset of the cache dropped. This "
            "happens in idle moments, at 1 GiB per second at most. Data files are never trimmed."
        ),
        Reason(
            "false: slots are soon written again, which frees the old bytes just as well, and "
            "drives may answer late while they trim. It is worthwhile if caches are reset often."
        ),
        _RAW,
    ] = False
    encryption: Annotated[
        EncryptionConfig | None,
        Field(
            description="Encryption of the store with AES-256-GCM (docs/security.md). An existing "
            "store keeps its key, or stays unencrypted."
        ),
        Reason(
            "null: off. Somebody has to keep the key, and encryption takes about a core for every "
            "few GB/s; self-encrypting drives protect the same data."
        ),
    ] = None
    io: Annotated[
        IoConfig,
        Field(description="Transfer of bytes between the devices and memory."),
    ] = IoConfig()
    nodes: Annotated[
        tuple[str, ...],
        Allowed(
            f'a list of up to {MAX_NODES} addresses, such as ["unix:///run/ssdkv.sock"], each '
            "unix:///path or tcp://host:port"
        ),
        Field(
            strict=False,
            max_length=MAX_NODES,
            description="Nodes (`ssdkv node run`) that keep the store, for all engines that name "
            "them. Name several alike in every engine. Drives and memory are then options of the "
            "nodes, and refused here. In mode `page` they keep contexts (docs/shared-cache.md).",
        ),
        Reason("Empty: the engine keeps its own store."),
    ] = ()
    share_contexts: Annotated[
        bool,
        Field(
            description="Share contexts with other engines of this model on the same node "
            "(docs/shared-cache.md)."
        ),
        Reason("false: volumes are one engine's."),
        _PAGE,
        _ON_NODES,
    ] = False
    node_keys: Annotated[
        PathText | None,
        Allowed(PATH_TEXT),
        Field(
            description="Directory of the keys that `ssdkv node keys` made for engines. A node at "
            "a tcp:// address needs them, unless the address is local to this machine."
        ),
        Reason("null: Unix sockets are protected by mode."),
    ] = None
    tier: Annotated[
        str | None,
        Allowed(names_text(TIERS)),
        AfterValidator(_tier_or_none),
        Field(
            description="Class of your own that keeps the blocks, in place of the drives of this "
            "engine (mode `reuse`; docs/guests.md)."
        ),
        Reason("null: the engine keeps its own store, or `nodes` do."),
    ] = None
    batch: Annotated[
        BatchConfig,
        Field(description="Limits of the Files and Batches API."),
    ] = BatchConfig()

    @classmethod
    def from_extra_config(cls, options: Mapping[str, object]) -> SSDKVConfig:
        """Check ``kv_connector_extra_config`` and freeze it.

        Raises:
            ConfigError: as :func:`checked_options` says it.
        """
        return checked_options(cls, options, "kv_connector_extra_config", _json_value)

    def with_absolute_paths(self, options: Mapping[str, object]) -> dict[str, object]:
        """The options that this was made from, with every path as it is in force: processes that
        run in other directories then mean the same."""
        return {name: _in_force(value, getattr(self, name)) for name, value in options.items()}

    @model_validator(mode="after")
    def _no_contradictions(self) -> SSDKVConfig:
        lines: list[str] = []
        seen: dict[str, int] = {}
        for position, device in enumerate(self.devices):
            real = os.path.realpath(device.path)
            if real in seen:
                lines.append(
                    f"devices[{position}].path: {json.dumps(device.path)} is the same place as "
                    f"devices[{seen[real]}].path; give each device once"
                )
            seen.setdefault(real, position)
        if self.replicas > max(1, len(self.devices)) and not self.nodes:
            lines.append(
                f"replicas: {self.replicas} copies need {self.replicas} devices, "
                f"{max(1, len(self.devices))} is given; name another drive in devices, or leave "
                "replicas at 1"
            )
        if (
            self.devices
            and self.state_dir is None
            and all(is_block_device(device.path) for device in self.devices)
        ):
            lines.append(
                "state_dir: missing; every device is a raw block device, so give a directory "
                "for store.json and the journal"
            )
        if self.window_tokens % self.page_tokens:
            lines.append(
                f"hbm_window_tokens: {self.hbm_window_tokens} is not a multiple of "
                f"page_tokens ({self.page_tokens})"
            )
        if self.selector != "exact" and self.mode != "page":
            lines.append(
                f'selector: "{self.selector}" needs mode "page"; mode "{self.mode}" loads whole '
                "prefixes, and never changes a result"
            )
        lines.extend((*self._node_problems(), *self._tier_problems()))
        if self.offload is not None:
            lines.extend(self._offload_problems())
        tokens = self.sparse.budget_tokens
        if self.selector != "exact" and tokens is not None and tokens <= self.window_tokens:
            lines.append(
                f"sparse.budget_tokens: {tokens} is not more than hbm_window_tokens "
                f"({self.window_tokens}), which counts in it: raise it, or lower the window"
            )
        given = "floor" in self.sparse.model_fields_set
        if given and self.sparse.floor > self.sparse.budget and tokens is None:
            lines.append(
                f"sparse.floor: {self.sparse.floor:g} is more than sparse.budget "
                f"({self.sparse.budget:g}): lower it, or raise the budget"
            )
        if self.dram_gib is not None and self.least_dram > self.dram_gib * GIB:
            lines.append(
                f"io.staging: {format_size(self.least_dram)} is more than dram_gib "
                f"({self.dram_gib:g} GiB), of which it is a part"
            )
        targets = {
            "faults": [rule.device for rule in self.io.faults],
            "throttle": [rule.device for rule in self.io.throttle],
        }
        count = max(1, len(self.devices)) if not self.nodes else MAX_DEVICES
        for name, positions in targets.items():
            lines.extend(
                f"io.{name}[{i}].device: {position} is not a position in devices ({count} entries)"
                for i, position in enumerate(positions)
                if position is not None and position >= count
            )
        if lines:
            raise ValueError("\n".join(lines))
        return self

    def _node_problems(self) -> Iterator[str]:
        if not self.nodes:
            if self.node_keys is not None:
                yield "node_keys: has no meaning without nodes: name a node there, or leave it out"
            return
        from vllm_ssdkv.base.node_address import Address  # a start without nodes needs none

        for node in self.nodes:
            try:
                Address.parse(node)
            except ConfigError as error:
                yield f"nodes: {error}"
        for node in sorted({node for node in self.nodes if self.nodes.count(node) > 1}):
            yield f"nodes: {node} is given twice; name each node once"
        if self.mode == "page":
            yield from self._page_node_problems()
            return
        if self.replicas > len(self.nodes):
            yield (
                f"replicas: {self.replicas} nodes are to keep a block, one is given: name another "
                "one in nodes, or set replicas in the node, for two of its devices"
            )
        given: list[str] = [name for name in _OF_A_STORE if name in self.model_fields_set]
        given += [f"io.{name}" for name in sorted(self.io.model_fields_set - {"deadline"})]
        for name in given:
            yield f"{name}: is an option of the node where there are nodes: set it there"

    def _tier_problems(self) -> Iterator[str]:
        if self.tier is None:
            return
        if self.mode != "reuse":
            yield 'tier: needs mode "reuse": contexts of mode "page" are read by pages'
        if self.nodes:
            yield "tier: the nodes keep the blocks: leave out nodes, or leave out tier"
        if self.on_reset == "forget":
            yield 'on_reset: a tier of your own cannot be told to forget: set it to "keep"'
        if self.replicas > 1:
            yield "replicas: a tier of your own decides how many copies it keeps: leave it at 1"
        given: list[str] = [
            *(name for name in _OF_DRIVES if name in self.model_fields_set),
            *(f"io.{name}" for name in sorted(self.io.model_fields_set - {"deadline"})),
        ]
        for name in given:
            yield f"{name}: has no meaning with a tier of your own: leave it out"

    def _page_node_problems(self) -> Iterator[str]:
        """Problems of a store in page mode whose slots lie on nodes."""
        if self.devices:
            yield (
                "devices: the slots lie on the drives of the nodes: leave out devices, or leave "
                "out nodes"
            )
        if self.state_dir is None:
            yield (
                'state_dir: missing; with nodes and mode "page" index and journal stay with the '
                "engine, so give a directory on a disk of its machine"
            )
        if self.io.deadline < LEAST_NODE_DEADLINE_S:
            yield (
                f"io.deadline: {self.io.deadline:g} s is less than a node takes, "
                f"{LEAST_NODE_DEADLINE_S:g} s: raise it, or leave out nodes"
            )
        for name in sorted(self.io.model_fields_set & {"engine", "queue_depth", "direct"}):
            yield f"io.{name}: is an option of the node where there are nodes: set it there"
        if self.share_contexts:
            if len(self.nodes) > 1 or self.replicas > 1:
                yield (
                    "share_contexts: one node keeps the shared contexts, once: name one in nodes "
                    "and leave replicas at 1, or leave share_contexts out"
                )
            if self.encryption is not None:
                yield (
                    "share_contexts: engines encrypt with keys of their own, so no other engine "
                    "can read what one has stored: leave one of the two out"
                )

    def _offload_problems(self) -> Iterator[str]:
        if self.mode != "page":
            yield (
                'offload: needs mode "page"; mode "reuse" loads a prefix before it is attended '
                "to: leave offload out, or change the mode"
            )
        if self.offload is not None and self.offload.kind == "node":
            if not self.nodes:
                yield (
                    'offload.kind: "node" without nodes: name their addresses there, or set it to '
                    '"host"'
                )
            if self.encryption is not None:
                yield (
                    'offload.kind: "node" with encryption: a node cannot attend to what it cannot '
                    "read: leave one of the two out"
                )
        peer = self.offload is not None and self.offload.peer
        if peer and self.encryption is not None:
            yield (
                "offload.peer: pages of an encrypted store come through the host's memory, which "
                "decrypts them: leave it out"
            )
        if peer and self.page_tokens != 16:
            yield (
                f"offload.peer: the FPGA makes checksums of pages of 16 tokens, not of "
                f"{self.page_tokens}: leave it out, or set page_tokens to 16"
            )
        if self.selector != "exact" and self.sparse.hbm_pages is not None:
            yield (
                "sparse.hbm_pages: with offload chosen pages are attended to on the host, and "
                "none is kept in the memory of the GPU: leave one of the two out"
            )

    @property
    def scores_channels(self) -> bool:
        """Check whether the selector scores by channels of K: slots hold these twice."""
        return self.scorer == "sparf"

    @property
    def keeps_page_records(self) -> bool:
        """Check whether summaries are records of pages without sums of V: the host needs none."""
        rest = self.scorer == "spread" and self.sparse.estimate_rest
        return self.selector != "exact" and not self.scores_channels and not rest

    @property
    def scorer(self) -> ScorerName:
        """Name of the selector that pages are scored by, and slots hold summaries for."""
        if takes_scorer(self.selector):
            return self.sparse.scorer
        own: dict[str, ScorerName] = {"spread": "spread", "codes": "codes", "sparf": "sparf"}
        return own.get(self.selector, "bounds")

    @property
    def orders_tokens(self) -> bool:
        """Check whether the tokens of a block go into its pages by likeness."""
        return self.selector != "exact" and self.sparse.token_order != "position"

    @property
    def window_tokens(self) -> int:
        """Newest tokens of a request in HBM, see ``hbm_window_tokens``."""
        if self.hbm_window_tokens is not None:
            return self.hbm_window_tokens
        least = WINDOW if self.selector == "exact" else SPARSE_WINDOW
        return -(-least // self.page_tokens) * self.page_tokens

    @property
    def exact_below(self) -> int:
        """Tokens of the shortest request that chooses, see ``sparse.exact_below``."""
        if self.sparse.exact_below is not None:
            return self.sparse.exact_below
        if self.sparse.budget_tokens is not None:
            return max(LEAST_CHOOSING, self.sparse.budget_tokens)
        return max(LEAST_CHOOSING, math.ceil(2 * self.window_tokens / self.sparse.budget))

    @property
    def choice(self) -> bytes:
        """Digest of every option that changes to what a query attends, 16 bytes; empty for a
        query that attends to everything."""
        if self.selector == "exact":
            return b""
        sparse = self.sparse.model_dump(mode="json", exclude={*_CHANGE_NO_CHOICE, "scorer"})
        if sparse["budget_tokens"] is not None:
            del sparse["budget"]  # it is not used
        fpga = self.offload is not None and self.offload.kind == "fpga"
        named = [self.selector, self.scorer, self.window_tokens, self.page_tokens, fpga, sparse]
        version = SELECTORS.version(self.selector)
        if version is not None:
            named.append(version)
        text = json.dumps(named, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def may_choose(self, tokens: int) -> bool:
        """Check whether a request of so many tokens may choose, with some budget of its own."""
        if self.selector == "exact":
            return False
        given = self.sparse.exact_below
        return tokens >= (LEAST_CHOOSING if given is None else given)

    @property
    def stages(self) -> bool:
        """Check whether data pass through ``io.staging``: reads of page mode, encrypted bytes."""
        return self.mode == "page" or self.encryption is not None

    @property
    def least_dram(self) -> int:
        """Bytes that a worker needs for what was given: ``io.staging``, where it is used."""
        return (self.io.staging or 0) if self.stages else 0

    def dram_bytes(self, workers: int) -> int:
        """Bytes of the DRAM tier of each of the engine's ``workers``, staging included.

        Reads the available memory when ``dram_gib`` was not given: call it once, at start.

        Raises:
            ConfigError: the share of a worker cannot hold ``io.staging``.
        """
        if self.dram_gib is None:
            total = min(DEFAULT_DRAM_LIMIT, available_memory() // 10)
            return max(self.least_dram, total // workers)
        share = int(self.dram_gib * GIB) // workers
        if share < self.least_dram:
            raise ConfigError(
                f"dram_gib: {self.dram_gib:g} GiB over {workers} workers is "
                f"{approximate_size(share)} each, less than io.staging "
                f"({format_size(self.least_dram)})"
            )
        return share

    def most_dram_bytes(self, workers: int) -> int:
        """Bytes that each of the workers may take where :meth:`dram_bytes` is too little.

        What was given is not exceeded; else it is half of the available memory.
        """
        if self.dram_gib is not None:
            return self.dram_bytes(workers)
        return available_memory() // 2 // workers

    def device_paths(self, model_key: str) -> tuple[str, ...]:
        """The devices, or the default directory of the model with fingerprint ``model_key``."""
        if self.devices:
            return tuple(device.path for device in self.devices)
        return (str(default_root() / model_key),)

    def device_weights(self) -> tuple[float, ...] | None:
        """One weight per entry of :meth:`device_paths`; None: they are to be measured."""
        given = [device.weight for device in self.devices]
        if len(given) > 1 and not any(given):
            return None
        return tuple(weight or 1.0 for weight in given) or (1.0,)

    def device_capacities(
        self, model_key: str, known: Mapping[str, int] = MappingProxyType({})
    ) -> tuple[int, ...]:
        """Bytes per entry of :meth:`device_paths`, all ranks together.

        Reads the free space where no capacity was given.

        Args:
            model_key: Name of the model's default directory.
            known: Path to the capacity that an existing store has there; options go before it.

        Raises:
            ConfigError: a device cannot be examined, or has less room than a store needs.
        """
        given = tuple(device.capacity for device in self.devices) or (None,)
        found: list[int] = []
        for path, capacity in zip(self.device_paths(model_key), given, strict=True):
            if capacity is None and path in known:
                found.append(known[path])
            elif capacity is None:
                found.append(_examined_capacity(path))
            else:
                found.append(capacity)
        return tuple(found)

    def state_path(self, model_key: str) -> Path:
        """Directory of store.json and the journal."""
        if self.state_dir is not None:
            return Path(self.state_dir)
        paths = self.device_paths(model_key)
        return Path(next((path for path in paths if not is_block_device(path)), paths[0]))


def _examined_capacity(path: str) -> int:
    try:
        capacity = default_capacity(Path(path))
    except OSError as error:
        raise ConfigError(f"device {path}: cannot be examined: {error}") from error
    if capacity < MIN_CAPACITY:
        raise ConfigError(
            f"device {path}: a quarter of the free space is {approximate_size(capacity)}, less "
            f"than {format_size(MIN_CAPACITY)}; free some space or give its capacity"
        )
    return capacity


def _in_force(given: object, value: object) -> object:
    """``given`` with the texts that validation has changed, which are paths."""
    if isinstance(value, DeviceConfig) and not isinstance(given, Mapping):
        return value.path
    if isinstance(value, BaseModel) and isinstance(given, Mapping):
        return {name: _in_force(inner, getattr(value, name)) for name, inner in given.items()}
    if isinstance(value, tuple) and isinstance(given, Sequence) and not isinstance(given, str):
        return [_in_force(*pair) for pair in zip(given, value, strict=True)]
    return value if isinstance(value, str) else given


def _json_value(value: object) -> object:
    """Paths are the one Python type that callers of ``LLM(...)`` hand over besides JSON's own."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a value of type {type(value).__name__}")
