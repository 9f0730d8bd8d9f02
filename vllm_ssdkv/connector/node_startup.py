"""Start-up of an engine whose store a node has: the node in place of directories and drives."""

from __future__ import annotations

import dataclasses
import logging
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


def peer_of(config: SSDKVConfig, place: StorePlace, layout: KVLayout, role: Role) -> Peer:
    """The node that the options name, and this half of the engine, rank 0.

    Raises:
        ConfigError: the option ``nodes`` has no address, or ``node_keys`` no keys.
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
    keys = None
    if config.node_keys is not None:
        try:
            keys = Credentials.load(Path(config.node_keys), "engine")
        except CredentialsError as error:
            raise ConfigError(f"node_keys: {error}") from error
    return Peer(Address.parse(config.nodes[0]), keys, role, as_name(place.run), store=spec)


def open_remote_store(
    config: SSDKVConfig, place: StorePlace, layout: KVLayout, rank: int, counters: Counters
) -> tuple[RemoteStore, KVLayout]:
    """A rank's store in a node, and the layout of its slots there.

    Raises:
        ConfigError: see :func:`peer_of`.
        StoreError: the node does not answer or refuses.
    """
    peer = dataclasses.replace(peer_of(config, place, layout, "worker"), rank=rank)
    store = RemoteStore(peer, counters, layout.block_tokens, config.io.deadline)
    welcome = store.open()
    geometry = dataclasses.replace(layout.geometry, encrypted=welcome.encrypted)
    if geometry.frame_bytes != welcome.frame_bytes:
        store.link.close()
        raise ConfigError(
            f"nodes: the node {peer.address} has frames of {welcome.frame_bytes} bytes for this "
            f"model, this engine {geometry.frame_bytes}: use the same release of both"
        )
    return store, dataclasses.replace(layout, geometry=geometry)


def open_remote_index(
    config: SSDKVConfig, place: StorePlace, layout: KVLayout, stack: ExitStack
) -> tuple[SchedulerStore, list[bytes]]:
    """The scheduler's half in a node, and the digest of each rank's weights.

    ``stack`` closes what was opened if the start fails.

    Raises:
        ConfigError: see :func:`peer_of`.
        StoreError: the node does not answer or refuses, or a rank has not told of its weights.
    """
    counters = place.counters
    link = NodeLink(peer_of(config, place, layout, "scheduler"), counters, with_bytes=False)
    welcome = link.start().welcome
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
    store = SchedulerStore(
        index, placement, [], suspension, policy, counters, bytes(welcome.name_key)
    )
    return store, weights
