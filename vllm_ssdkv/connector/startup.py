"""Start-up of both roles: check, open the store, say in one summary what is in force."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import torch
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from vllm_ssdkv.base.errors import ConfigError, UnsupportedError
from vllm_ssdkv.base.sizes import MIB, approximate_size, format_size
from vllm_ssdkv.config.effects import without_effect
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.attention_backend import (
    SSDKVBackend,
    SSDKVCPUBackend,
    captures_steps,
)
from vllm_ssdkv.connector.compatibility import check_engine, oddities, why_no_prefixes
from vllm_ssdkv.connector.identity.kv_settings import kv_settings
from vllm_ssdkv.connector.identity.loaded_model import LoadedModel
from vllm_ssdkv.connector.identity.weight_files import digest_of_files
from vllm_ssdkv.connector.kv_cache_spec import TieredAttentionSpec
from vllm_ssdkv.connector.kv_layout import KVLayout
from vllm_ssdkv.connector.model_layout import (
    attention_spec,
    context_layers,
    directory_name,
    fingerprint,
    kv_layout,
    logits_are_plain,
)
from vllm_ssdkv.connector.names import BATCH_PLUGIN, RECOMPUTE
from vllm_ssdkv.connector.scheduler.admission_slots import AdmissionSlots
from vllm_ssdkv.connector.scheduler.identities import RankIdentities
from vllm_ssdkv.connector.scheduler.load_or_recompute import LoadOrRecompute
from vllm_ssdkv.connector.scheduler.scheduler import SSDKVScheduler
from vllm_ssdkv.connector.scheduler.scheduler_parts import EngineFacts, SchedulerStore
from vllm_ssdkv.connector.scheduler.speculation import Speculation
from vllm_ssdkv.connector.scheduler.suspension import Suspension
from vllm_ssdkv.connector.worker.amx import request_amx
from vllm_ssdkv.connector.worker.binding import Binding
from vllm_ssdkv.connector.worker.block_comparison import element_type
from vllm_ssdkv.connector.worker.rank_store import EmbeddedRank, RankAccess
from vllm_ssdkv.connector.worker.worker import SSDKVWorker
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry, round_up
from vllm_ssdkv.store.memory.memory_plan import MemoryPlan
from vllm_ssdkv.store.memory.summary_rows import device_row_bytes
from vllm_ssdkv.store.open import StorePlace, open_index, open_rank
from vllm_ssdkv.store.open_store import OpenStore
from vllm_ssdkv.store.own_store import OwnStore, owned
from vllm_ssdkv.store.tiered_store import TieredStore
from vllm_ssdkv.store.write_policy import open_write_policy

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingParallelConfig

    from vllm_ssdkv.connector.worker.guest_rank import GuestRank
    from vllm_ssdkv.connector.worker.node_rank import NodeRank
    from vllm_ssdkv.connector.worker.page_mode import PageMode
    from vllm_ssdkv.node.client.node_drives import NodeDrive, NodeDrives
    from vllm_ssdkv.offload.xcache.x_rule import XShape
    from vllm_ssdkv.store.context_store import ContextStore

logger = logging.getLogger(__name__)

_SCATTERED: Final = 0.384
"""Part of a page's tokens that lie as if each was chosen by itself: with blocks of 64 tokens and an
eighth of the tokens and channels, 106 % of the bytes of exact attention were read."""


@dataclass(frozen=True, slots=True)
class _Identity:
    layout: KVLayout
    fingerprint: Fingerprint
    place: StorePlace
    drives: Sequence[NodeDrive] = ()
    """Drives of nodes, in page mode."""


def _of_all_ranks(
    own: Callable[[], KVLayout], parallel: ParallelConfig, *, of_worker: bool
) -> tuple[KVLayout, Sequence[SlotGeometry]]:
    """Layout of this process's KV, and the geometry of every rank's slots. Workers of a pipeline
    tell each other; its scheduler knows the first stage only, and asks the store later.

    Raises:
        UnsupportedError: a worker's KV cannot be stored.
    """
    if parallel.pipeline_parallel_size == 1 or not of_worker:
        layout = own()
        return layout, [layout.geometry] * layout.ranks
    from vllm_ssdkv.connector.worker.pipeline import of_all_stages

    layout, stages = of_all_stages(own)
    ranks = layout.ranks // parallel.pipeline_parallel_size
    return layout, [one for one in stages for _ in range(ranks)]


def _identify(
    config: SSDKVConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, of_worker: bool
) -> _Identity:
    check_engine(config, vllm_config)
    parallel = vllm_config.parallel_config
    layout, geometries = _of_all_ranks(
        lambda: kv_layout(config, vllm_config, kv_cache_config), parallel, of_worker=of_worker
    )
    identity = fingerprint(config, vllm_config, layout, kv_cache_config)
    replica = replica_of(parallel)
    # The engine's id may be one that the user gave it, for ever.
    run = f"{vllm_config.kv_transfer_config.engine_id} {vllm_config.instance_id}"
    run += "" if replica is None else f" dp{replica}"
    model = str(vllm_config.model_config.model)
    name = directory_name(model, vllm_config.model_config.revision)
    drives: Sequence[NodeDrive] = ()
    if config.nodes and config.mode == "page":
        from vllm_ssdkv.connector.node_startup import drives_of_nodes

        config, drives = drives_of_nodes(config, run, model)
    place = StorePlace(
        config, geometries, identity, replica, model, run, name, sharers=layout.sharers
    )
    return _Identity(layout, identity, place, drives)


def replica_of(parallel: ParallelConfig | OffloadingParallelConfig) -> int | None:
    """Number of the engine among data-parallel ones; None: it may be the only one.

    vLLM tells the engines of a dense model that each is the only one, and leaves the number.
    """
    index = int(parallel.data_parallel_index)
    return index if index or parallel.data_parallel_size > 1 else None


def tell_what_has_no_effect(config: SSDKVConfig) -> None:
    """Warn of each option that was given in vain; one process of an engine does it."""
    plugins = os.environ.get("VLLM_PLUGINS", "").split(",")
    for vain in without_effect(config, batch_api=BATCH_PLUGIN in plugins):
        logger.warning("option %s has no effect unless %s", vain.option, vain.condition)


def _open_shared_files(config: SSDKVConfig, found: _Identity, rank: int) -> OpenStore:
    """Open them, after the rank that writes them has."""
    if found.layout.sharers == 1:
        return _open_files(config, found, rank)
    from vllm_ssdkv.connector.worker.pipeline import of_sharers

    return of_sharers(lambda: _open_files(config, found, rank))


def open_worker(
    config: SSDKVConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> SSDKVWorker:
    """This rank's half.

    Raises:
        SSDKVError: see the modules that check; the text names the way out.
    """
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    found = _identify(config, vllm_config, kv_cache_config, of_worker=True)
    _check_backend(config, vllm_config, kv_cache_config)
    tensor = vllm_config.parallel_config.tensor_parallel_size
    rank = int(get_pp_group().rank_in_group * tensor + get_tensor_model_parallel_rank())
    if vllm_config.device_config.device_type == "cpu":
        request_amx(found.place.counters)
    with ExitStack() as stack:
        layout, page_mode = found.layout, None
        access: RankAccess
        tell_weights: Callable[[bytes], None]
        tell_weights = functools.partial(found.place.tell_weights, rank)
        if config.mode == "page":
            contexts = _context_blocks(config, layout, vllm_config, kv_cache_config)
            access, page_mode = _open_page_mode(config, vllm_config, found, rank, contexts)
        elif config.nodes:
            access, layout = node, _ = _reach_node(config, found, rank)
            tell_weights = node.tell_weights
        elif config.tier is not None:
            access, tell_weights = _open_guest(config, config.tier, found, rank)
        else:
            access = EmbeddedRank(_open_shared_files(config, found, rank), TieredStore)
        stack.callback(access.close)
        modules = vllm_config.compilation_config.static_forward_context
        model = LoadedModel(
            (modules[name] for name in layout.all_layers),
            functools.partial(digest_of_files, vllm_config),
        )
        binding = Binding(model, rank, tell_weights)
        worker = SSDKVWorker(config, layout, access, page_mode, binding)
        stack.pop_all()
    return worker


def _open_page_mode(
    config: SSDKVConfig, vllm_config: VllmConfig, found: _Identity, rank: int, contexts: int
) -> tuple[EmbeddedRank[ContextStore], Callable[[torch.device], PageMode]]:
    """This rank's part of a store with contexts, and the way to open page mode on a device."""
    from vllm_ssdkv.connector.worker.device_memory import held_for_summaries
    from vllm_ssdkv.connector.worker.page_mode import ContextLayers, PageMode
    from vllm_ssdkv.connector.x_settings import x_shape
    from vllm_ssdkv.store.context_store import ContextStore

    layout, drives, held = found.layout, None, held_for_summaries()
    with ExitStack() as stack:
        if found.drives:
            from vllm_ssdkv.connector.node_startup import connect_drives

            drives = connect_drives(config, found.place, found.drives, rank)
            stack.callback(drives.close, 0.0)
        opened = _open_files(config, found, rank, contexts, drives, held)
        access = EmbeddedRank(opened, ContextStore, drives)
        stack.pop_all()
        stack.callback(access.close)
        if rank == 0 and held and not opened.plan.summaries_on_device:
            _tell_too_little_hbm(opened.plan, layout.geometry)
        if rank == 0:
            _tell_costly_tokens(config, layout)
        modules = vllm_config.compilation_config.static_forward_context
        shape = x_shape(config, vllm_config)
        inputs = [] if shape is None else [modules[name] for name in layout.layer_names]
        plain = logits_are_plain(vllm_config, layout)
        layers = ContextLayers(context_layers(vllm_config, layout), inputs, shape, plain)
        stack.pop_all()
    return access, functools.partial(PageMode.open, config, layout, access, layers)


def _open_files(
    config: SSDKVConfig,
    found: _Identity,
    rank: int,
    contexts: int = 0,
    drives: NodeDrives | None = None,
    held: int = 0,
) -> OpenStore:
    """This rank's files of a store; ``drives`` have the slots, where nodes do, and ``held`` bytes
    of HBM are there for summaries."""
    counters = found.place.counters
    opened = open_rank(found.place, rank, counters, contexts, remote=drives, hbm_summaries=held)
    try:
        counters.start_at_zero(opened.files.health.paths)
        engine = opened.files.engine.name
        counters.set("info", 1, mode=config.mode, io_engine=engine, selector=config.selector)
        if rank == 0:
            lines = opened.describe() + ([] if drives is None else drives.describe())
            if opened.plan.summary_rows:
                tokens = found.layout.block_tokens
                where = ", by summaries in HBM" if opened.plan.summaries_on_device else ""
                lines.append(
                    f"choosing from contexts of {opened.plan.summary_rows * tokens} tokens at a "
                    f"time{where}; requests that can run have up to {contexts * tokens}"
                )
            logger.info("%s", _summary(config, found, lines))
    except BaseException:
        opened.close()
        raise
    return opened


def _tell_too_little_hbm(plan: MemoryPlan, geometry: SlotGeometry) -> None:
    """Say that memory of the GPU is held for summaries, and they lie in DRAM all the same."""
    needed = plan.summary_rows * device_row_bytes(geometry)
    logger.warning(
        "ssdkv: sparse.hbm_summaries has room for fewer blocks than the %d whose summaries "
        "DRAM holds, where they stay: give it %s, or 0",
        plan.summary_rows,
        format_size(round_up(needed, MIB)),
    )


def _tell_costly_tokens(config: SSDKVConfig, layout: KVLayout) -> None:
    """Say that choosing tokens by channels on SSD reads more than attending to everything."""
    sparse = config.sparse
    if (config.selector, sparse.granularity, sparse.channel_pages) != ("sparf", "token", "ssd"):
        return
    groups = layout.block_tokens // config.page_tokens
    size, of_page = layout.head_size, 2 * layout.head_size // groups
    chosen = min(size, sparse.channels or max(1, size // 8))
    missed = math.comb(size - of_page, chosen) / math.comb(size, chosen)
    budget = sparse.budget
    if sparse.budget_tokens is not None:
        budget = min(1.0, sparse.budget_tokens / max(1, config.exact_below))
    tokens = 1 - (1 - budget) ** (_SCATTERED * config.page_tokens)
    share = (1 - missed) / 2 + tokens
    if share > 1:
        logger.warning(
            'ssdkv: sparse.granularity "token" with sparse.channel_pages "ssd" reads about %.0f %% '
            "of the bytes that exact attention reads, with --block-size %d: set selector "
            '"codes" or "adaptive"',
            100 * share,
            layout.block_tokens,
        )


def _reach_node(config: SSDKVConfig, found: _Identity, rank: int) -> tuple[NodeRank, KVLayout]:
    """This rank's part of a store that a node has, and the layout of slots there."""
    from vllm_ssdkv.connector.node_startup import open_remote_store
    from vllm_ssdkv.connector.worker.node_rank import NodeRank

    counters, layout = found.place.counters, found.layout
    store, geometry = open_remote_store(config, found.place, layout.block_tokens, rank, counters)
    counters.start_at_zero(())
    counters.set("info", 1, mode=config.mode, io_engine="node", selector=config.selector)
    if rank == 0:
        logger.info("%s", _summary(config, found, store.describe()))
    return NodeRank(store, counters, rank), replace(layout, geometry=geometry)


def _open_guest(
    config: SSDKVConfig, tier: str, found: _Identity, rank: int
) -> tuple[GuestRank, Callable[[bytes], None]]:
    """This rank's part of a tier that a user brings, and what tells the scheduler of weights."""
    from vllm_ssdkv.connector.guest_startup import open_guest_store

    opened = open_guest_store(config, tier, found.place, rank)
    counters = found.place.counters
    counters.start_at_zero(())
    counters.set("info", 1, mode=config.mode, io_engine="tier", selector=config.selector)
    if rank == 0:
        logger.info("%s", _summary(config, found, [f"blocks in the tier {tier}"]))
    return opened


def _context_blocks(
    config: SSDKVConfig,
    layout: KVLayout,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
) -> int:
    """Blocks of the contexts that requests may choose from at a time, at most: a request with a
    context keeps a window in HBM, and is no longer than the model allows."""
    longest = vllm_config.model_config.max_model_len
    if not config.may_choose(longest):
        return 0
    in_hbm = kv_cache_config.num_blocks * layout.block_tokens // config.window_tokens
    requests = min(vllm_config.scheduler_config.max_num_seqs, in_hbm + 1)
    return int(requests * (longest // layout.block_tokens + 1))


def open_scheduler(
    config: SSDKVConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> SSDKVScheduler:
    """The scheduler's half.

    Raises:
        ConfigError: page mode, and the store cannot hold one request of the maximum length.
        SSDKVError: see the modules that check.
    """
    found = _identify(config, vllm_config, kv_cache_config, of_worker=False)
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != RECOMPUTE:
        # vLLM reads the policy after this constructor. Its default ends requests whose load
        # failed; a cache must never do that: what cannot be read is computed again.
        transfer.kv_load_failure_policy = RECOMPUTE
    config = with_hits_to_verify(config, found.layout)
    settings = kv_settings(
        vllm_config,
        str(kv_cache_config.kv_cache_layout),
        chooses=config.selector != "exact",
    )
    max_model_len = vllm_config.model_config.max_model_len
    with ExitStack() as stack:
        if config.nodes and config.mode == "reuse":
            from vllm_ssdkv.connector.node_startup import open_remote_index, store_on_nodes

            tokens = found.layout.block_tokens
            index, weights = open_remote_index(config, found.place, tokens, stack)
            store = store_on_nodes(config, index, found.place.counters)
        elif config.tier is not None:
            from vllm_ssdkv.connector.guest_startup import open_guest_index

            store, weights = open_guest_index(config, config.tier, found.place, stack)
        else:
            weights = found.place.bind(settings)
            store = open_store(config, found.place, stack)
            if config.nodes and config.share_contexts:
                store = _share(config, found, store, stack)
        identities = RankIdentities(settings, weights)
        if config.mode == "page":
            _check_room(found, store, max_model_len)
        x_share, shape = _x_of(config, vllm_config)
        reuses = may_reuse(vllm_config)
        _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        engine = EngineFacts(
            found.layout.block_tokens,
            max_model_len,
            found.layout.ranks,
            Speculation.of(vllm_config, found.layout.block_tokens),
            finds=reuses and transfer.is_kv_consumer,
            stores=reuses and transfer.is_kv_producer,
            selects=not oddities(vllm_config),
            sees_media=sees_media(vllm_config),
            x_share=x_share,
            x_shape=shape,
            hashes_per_block=found.layout.block_tokens // hash_tokens,
            kv_events=publishes_events(
                vllm_config, own=store.own is not None and store.own.alone is not None
            ),
            steps_ahead=vllm_config.max_concurrent_batches,
            sharers=found.layout.sharers,
            captures=config.mode == "page" and captures_steps(vllm_config),
        )
        choice = LoadOrRecompute(
            # In page mode computing writes every block of the hit once more.
            always=config.mode == "page" or config.load == "always",
            block_tokens=found.layout.block_tokens,
            chunk_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            ranks=found.place.workers,
            counters=store.counters,
        )
        seats = AdmissionSlots(vllm_config.scheduler_config)
        scheduler = SSDKVScheduler(config, engine, store, identities, choice, seats)
        stack.pop_all()
    return scheduler


def _x_of(
    config: SSDKVConfig, vllm_config: VllmConfig
) -> tuple[float | Literal["auto"], XShape | None]:
    """Share of the contexts that is stored as X, or how it is found, and the shape of layers."""
    if config.offload is None or config.offload.x_share == 0:
        return 0.0, None
    from vllm_ssdkv.connector.x_settings import why_x_does_not_pay, x_shape

    shape = x_shape(config, vllm_config)
    if shape is not None:
        return config.offload.x_share, shape
    logger.warning("ssdkv: offload.x_share has no effect: %s", why_x_does_not_pay(vllm_config))
    return 0.0, None


def with_hits_to_verify(config: SSDKVConfig, layout: KVLayout) -> SSDKVConfig:
    """The options, with ``verify_hits`` off where a comparison would say nothing."""
    if not config.verify_hits:
        return config
    # vLLM gives its scheduler the spec of one layer, which may be an indexer's: workers know more.
    of_one_layer = bool(layout.layer_bytes) and layout.cache_dtype == "auto"
    if element_type(layout) is None and not of_one_layer:
        logger.warning(
            "ssdkv: KV of --kv-cache-dtype %s cannot be compared: verify_hits has no effect",
            layout.cache_dtype,
        )
        return config.model_copy(update={"verify_hits": 0})
    return config


def open_store(config: SSDKVConfig, place: StorePlace, stack: ExitStack) -> SchedulerStore:
    """Index, journal and manifest. ``stack`` closes what was opened if the start fails.

    Raises:
        StoreError: see :func:`open_index`.
    """
    counters = place.counters
    index, rebalancer = open_index(place, counters)
    stack.callback(index.close)
    stack.callback(rebalancer.close)
    policy = open_write_policy(place, rebalancer.placement, index.num_slots, counters)
    stack.callback(policy.close)
    manifest = place.stored()
    paths, whole = [device.path for device in manifest.devices], config.mode == "page"
    return SchedulerStore(
        index,
        rebalancer,
        Suspension(index, counters, place.suspend, [place.state], manifest.suspended),
        policy,
        counters,
        place.name_key(),
        OwnStore.of(index, rebalancer, paths, counters, whole=whole),
    )


def _share(
    config: SSDKVConfig, found: _Identity, store: SchedulerStore, stack: ExitStack
) -> SchedulerStore:
    """The same store, whose slots a node grants to several engines.

    Raises:
        StoreError: see :func:`open_shared_slots`.
    """
    from vllm_ssdkv.connector.node_startup import open_shared_slots

    own, counters = owned(store.own), store.counters
    shared = open_shared_slots(config, found.place, found.layout.block_tokens, owned(own.alone))
    stack.callback(shared.close)
    shared.usable = lambda: not own.rebalancer.out_of_use().any()
    way_out = "other engines go on with the node; find out why this one computes otherwise"
    return SchedulerStore(
        shared,
        shared,
        Suspension(None, counters, lambda _: None, [], way_out=way_out),
        store.write_policy,
        counters,
        own=OwnStore.of(shared, own.rebalancer, own.weights.paths, counters, whole=True),
    )


def _check_room(found: _Identity, store: SchedulerStore, max_model_len: int) -> None:
    """Check that page mode has room.

    Raises:
        ConfigError: the store cannot hold one request of the maximum length.
        StoreFailedError: it could, but it is suspended.
    """
    block_tokens = found.layout.block_tokens
    longest = max_model_len // block_tokens + 1
    own = owned(store.own)
    gauges = own.index.gauges()
    slots = gauges["free"] + gauges["evictable"]  # a suspended store gives up nothing
    slots += own.rebalancer.slots_to_come
    if slots >= longest:
        return
    if store.suspension:
        raise store.suspension.no_room()
    needed = round_up(found.place.capacity_for(longest), MIB)
    raise ConfigError(
        f"the store has {slots} slots of {block_tokens} tokens, a request of --max-model-len "
        f"{max_model_len} needs {longest}: raise the capacity of the devices to "
        f"{format_size(needed)} in all, or lower --max-model-len"
    )


def may_reuse(vllm_config: VllmConfig) -> bool:
    """Check whether requests may begin with stored blocks: not where vLLM has turned its own prefix
    caching off because hits would be wrong."""
    reason = why_no_prefixes(vllm_config)
    if reason:
        logger.warning(
            "ssdkv: vLLM finds no prefixes of this model again, as %s: nothing is found in the "
            "store, and nothing is stored",
            reason,
        )
    return not reason


def publishes_events(vllm_config: VllmConfig, *, own: bool) -> bool:
    """Check whether vLLM publishes KV events; ``own``: the store is this engine's."""
    events = vllm_config.kv_events_config
    wanted = bool(events is not None and events.enable_kv_cache_events)
    if wanted and not own:
        logger.warning(
            "ssdkv: no KV events of stored blocks: this engine does not see what others store in "
            "a node or a guest tier, and what is evicted there"
        )
    return wanted


def sees_media(vllm_config: VllmConfig) -> bool:
    """Check whether the tensors of images and the like reach the scheduler's process."""
    media = vllm_config.model_config.multimodal_config
    if media is None:
        return True
    reason = ""
    if media.mm_processor_cache_type == "shm":
        reason = "--mm-processor-cache-type shm keeps them from the scheduler"
    elif vllm_config.ec_transfer_config is not None:
        reason = "--ec-transfer-config brings what others have made of them"
    if reason:
        logger.warning(
            "ssdkv: contents of images, videos and sounds are not known, as %s: blocks of a "
            "request from its first one on are neither stored nor found",
            reason,
        )
    return not reason


def check_failure_policy(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError unless a MultiConnector, our parent, has failed loads computed again.
    It gives its children copies of its configuration, so nothing can be set here.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    parent = get_kv_transfer_group()._kv_transfer_config
    ours = vllm_config.kv_transfer_config
    if parent is not ours and parent.kv_load_failure_policy != RECOMPUTE:
        raise UnsupportedError(
            f"{parent.kv_connector} ends requests whose load failed: add "
            f'"kv_load_failure_policy": "{RECOMPUTE}" to --kv-transfer-config, beside '
            '"kv_connector"'
        )


def _check_backend(
    config: SSDKVConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    """Page mode needs our attention backend in force; vLLM only logs when a plugin fails.

    Raises:
        UnsupportedError: it is not; says which flag is missing.
    """
    if config.mode != "page":
        return
    if isinstance(attention_spec(kv_cache_config), TieredAttentionSpec):
        return
    if torch.cuda.is_available():
        raise UnsupportedError(
            f"page mode needs the attention backend {SSDKVBackend.__name__}: start with "
            "--attention-backend CUSTOM"
        )
    raise UnsupportedError(
        f"page mode needs the attention backend {SSDKVCPUBackend.__name__}, which is not in "
        "force: the plugin did not load. Leave VLLM_PLUGINS unset or include ssdkv in it, and run "
        "`ssdkv doctor`"
    )


def _summary(config: SSDKVConfig, found: _Identity, store: Sequence[str]) -> str:
    layout = found.layout
    window = f", window {config.window_tokens} tokens in HBM" if config.mode == "page" else ""
    lines = [
        f"mode {config.mode}, selector {config.selector}{window}, blocks of "
        f"{layout.block_tokens} tokens in {approximate_size(layout.geometry.slot_bytes)} per rank, "
        f"{layout.ranks} rank(s), fingerprint {found.fingerprint.digest.hex()[:12]}",
        *store,
    ]
    return "SSDKV\n" + "\n".join(f"  {line}" for line in lines)
