"""Start-up of an engine whose store a node has: the node in place of directories and drives."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import ConfigError, CredentialsError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.kv_layout import KVLayout
from vllm_ssdkv.connector.scheduler.scheduler_parts import SchedulerStore
from vllm_ssdkv.connector.scheduler.suspension import Suspension
from vllm_ssdkv.node.client.node_link import NodeLink
from vllm_ssdkv.node.client.node_links import ConnectedShare, start_links
from vllm_ssdkv.node.client.pooled_index import PooledIndex
from vllm_ssdkv.node.client.pooled_store import PooledStore
from vllm_ssdkv.node.client.remote_index import RemoteIndex, RemotePlacement
from vllm_ssdkv.node.client.remote_store import RemoteStore
from vllm_ssdkv.node.client.session import Peer, as_name
from vllm_ssdkv.node.protocol.address import Address
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.messages import Role, StoreSpec
from vllm_ssdkv.store.devices.wear import WearLedger
from vllm_ssdkv.store.open import StorePlace
from vllm_ssdkv.store.write_policy import WritePolicy

logger = logging.getLogger(__name__)

BIND_S: Final = 60.0
"""Wait of a scheduler's start until all workers have told the node of their weights, in seconds."""


def peers_of(
    config: SSDKVConfig, place: StorePlace, layout: KVLayout, role: Role, rank: int = 0
) -> list[Peer]:
    """The nodes that the options name, and this half of the engine.

    Raises:
        ConfigError: an address of the option ``nodes`` is none, or ``node_keys`` has no keys.
    """
    spec = StoreSpec(
        dict(place.fingerprint.fields),
        place.geometry.layers,
        place.geometry.payload_bytes,
        place.tp_size,
        layout.block_tokens,
        as_name(place.model),
        as_name(place.name),
    )
    keys = _keys(config)
    run = as_name(place.run)
    return [Peer(Address.parse(node), keys, role, run, rank, spec) for node in config.nodes]


def _keys(config: SSDKVConfig) -> Credentials | None:
    """Keys of the option ``node_keys``.

    Raises:
        ConfigError: there are none where it says.
    """
    if config.node_keys is None:
        return None
    try:
        return Credentials.load(Path(config.node_keys), "engine")
    except CredentialsError as error:
        raise ConfigError(f"node_keys: {error}") from error


def volume_peers(config: SSDKVConfig, run: str, rank: int) -> list[Peer]:
    """The nodes that have the slots of a rank in page mode.

    Raises:
        ConfigError: an address of the option ``nodes`` is none, or ``node_keys`` has no keys.
    """
    keys = _keys(config)
    return [Peer(Address.parse(node), keys, "volume", as_name(run), rank) for node in config.nodes]


def open_remote_store(
    config: SSDKVConfig, place: StorePlace, layout: KVLayout, rank: int, counters: Counters
) -> tuple[RemoteStore | PooledStore, KVLayout]:
    """A rank's store in a node or in several, and the layout of its slots there.

    Raises:
        ConfigError: see :func:`peers_of`.
        StoreError: no node answers, or one refuses.
    """
    peers = peers_of(config, place, layout, "worker", rank)
    tokens, deadline_s = layout.block_tokens, config.io.deadline
    store: RemoteStore | PooledStore
    if len(peers) > 1:
        store = PooledStore(peers, counters, tokens, deadline_s)
    else:
        store = RemoteStore(peers[0], counters, tokens, deadline_s)
    welcome = store.open()
    geometry = dataclasses.replace(layout.geometry, encrypted=welcome.encrypted)
    if geometry.frame_bytes != welcome.frame_bytes:
        store.leave()
        raise ConfigError(
            f"nodes: the node {peers[0].address} has frames of {welcome.frame_bytes} bytes for "
            f"this model, this engine {geometry.frame_bytes}: use the same release of both"
        )
    return store, dataclasses.replace(layout, geometry=geometry)


def open_remote_index(
    config: SSDKVConfig, place: StorePlace, layout: KVLayout, stack: ExitStack
) -> tuple[SchedulerStore, list[bytes]]:
    """The scheduler's half in a node or in several, and the digest of each rank's weights.

    ``stack`` closes what was opened if the start fails.

    Raises:
        ConfigError: see :func:`peers_of`.
        StoreError: no node answers, or one refuses, or a rank has not told of its weights.
    """
    counters = place.counters
    peers = peers_of(config, place, layout, "scheduler")
    index: RemoteIndex | PooledIndex
    if len(peers) > 1:
        index, name_key = _pooled_index(config, peers, counters, stack), b""
    else:
        link = NodeLink(peers[0], counters, with_bytes=False)
        name_key = bytes(link.start().welcome.name_key)
        stack.callback(link.close)
        index = RemoteIndex(link, counters)
        stack.callback(index.close)
    weights = index.bind(BIND_S)
    # What is written, and how much, the node decides.
    policy = WritePolicy(config, [], WearLedger(None, [], counters), [], index.num_slots, counters)
    suspension = Suspension(
        index,
        counters,
        lambda _: None,
        [],
        way_out="other engines go on with the node and verify hits for themselves; find out why "
        "this one computes otherwise, and start it again",
    )
    placement = RemotePlacement(index)
    return SchedulerStore(index, placement, [], suspension, policy, counters, name_key), weights


def _pooled_index(
    config: SSDKVConfig, peers: Sequence[Peer], counters: Counters, stack: ExitStack
) -> PooledIndex:
    """Index of several nodes; each hides keys under a key of its own."""
    share = ConnectedShare(counters, len(peers))
    links = [
        NodeLink(
            *(peer, counters),
            with_bytes=False,
            connected=functools.partial(share.set, node),
            hides=True,
        )
        for node, peer in enumerate(peers)
    ]
    slots = start_links(links).num_slots
    for link in links:
        stack.callback(link.close)
    members = [RemoteIndex(link, counters, num_slots=slots) for link in links]
    for member in members:
        stack.callback(member.close)
    return PooledIndex(members, config.nodes, counters, config.replicas)
