"""Start-up of an engine whose store a node has: the node in place of directories and drives."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from vllm_ssdkv.base.errors import ConfigError, CredentialsError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.scheduler.scheduler_parts import SchedulerStore
from vllm_ssdkv.node.client.node_drives import (
    NodeDrive,
    NodeDrives,
    find_drives,
    with_node_drives,
)
from vllm_ssdkv.node.client.node_existence import NodeExistence
from vllm_ssdkv.node.client.node_link import NodeLink
from vllm_ssdkv.node.client.remote_index import RemoteIndex
from vllm_ssdkv.node.client.remote_store import RemoteStore
from vllm_ssdkv.node.client.session import Peer, as_name
from vllm_ssdkv.node.client.shared_slots import SharedSlots
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.messages import Role, StoreSpec
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.open import StorePlace

logger = logging.getLogger(__name__)

BIND_S: Final = 60.0
"""Wait of a scheduler's start until all workers have told the node of their weights, in seconds."""


def peers_of(
    config: SSDKVConfig, place: StorePlace, block_tokens: int, role: Role, rank: int = 0
) -> list[Peer]:
    """The nodes that the options name, and this half of the engine.

    Raises:
        ConfigError: the file that the option ``node_keys`` names has no keys.
    """
    spec, keys = _spec_of(place, block_tokens), _keys(config)
    run = as_name(place.run)
    return [Peer(Address.parse(node), keys, role, run, rank, spec) for node in config.nodes]


def _spec_of(place: StorePlace, block_tokens: int) -> StoreSpec:
    """The store, as all halves of the engine say it alike."""
    return StoreSpec(
        dict(place.fingerprint.fields),
        place.geometries[0].layers,
        place.geometries[0].payload_bytes,
        place.ranks,
        block_tokens,
        as_name(place.model),
        as_name(place.name),
    )


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
        ConfigError: the file that the option ``node_keys`` names has no keys.
    """
    keys = _keys(config)
    return [Peer(Address.parse(node), keys, "volume", as_name(run), rank) for node in config.nodes]


def drives_of_nodes(
    config: SSDKVConfig, run: str, model: str
) -> tuple[SSDKVConfig, Sequence[NodeDrive]]:
    """The drives of nodes in page mode, and the options with these as their devices.

    Raises:
        ConfigError: see :func:`volume_peers`.
        StoreError: no node answers.
    """
    peers = volume_peers(config, run, 0)
    drives = find_drives(peers, model, Path(config.state_dir or ""))
    return with_node_drives(config, drives, peers), drives


def connect_drives(
    config: SSDKVConfig, place: StorePlace, drives: Sequence[NodeDrive], rank: int
) -> NodeDrives:
    """The same drives for one rank, which has sessions of its own."""
    peers = volume_peers(config, place.run, rank)
    shared = place.fingerprint.digest if config.share_contexts else b""
    return NodeDrives(peers, drives, place.model, place.counters, config.io.deadline, shared)


def open_shared_slots(
    config: SSDKVConfig, place: StorePlace, block_tokens: int, state: SlotIndex
) -> SharedSlots:
    """Slots of volumes that engines share. ``state``: index of the state directory, closed with it.

    Raises:
        ConfigError: see :func:`peers_of`.
        StoreError: the node does not answer, or slots lie otherwise in the volumes.
    """
    manifest = place.stored()
    # Of each device the name of its drive, which is that of its stub.
    drives = [Path(device.path).relative_to(place.state).parts[1] for device in manifest.devices]
    segments = [msgspec.structs.replace(segment, since=0) for segment in manifest.segments]
    lies = repr((drives, segments, place.geometries)).encode()
    layout = hashlib.blake2b(lies, digest_size=16).digest()
    spec = msgspec.structs.replace(
        _spec_of(place, block_tokens), slots=manifest.numbers, layout=layout
    )
    address, run = Address.parse(config.nodes[0]), as_name(place.run)
    peer = Peer(address, _keys(config), "scheduler", run, store=spec)
    link = NodeLink(peer, place.counters, with_bytes=False)
    link.start()
    member = NodeExistence(link, place.counters, manifest.numbers)
    return SharedSlots(member, config.nodes[0], place.counters, state)


def open_remote_store(
    config: SSDKVConfig, place: StorePlace, block_tokens: int, rank: int, counters: Counters
) -> tuple[RemoteStore, SlotGeometry]:
    """A rank's store in a node or in several, and the shape of its slots there.

    Raises:
        ConfigError: see :func:`peers_of`.
        StoreError: no node answers, or one refuses.
    """
    peers = peers_of(config, place, block_tokens, "worker", rank)
    store = RemoteStore(peers, counters, config.io.deadline)
    welcome = store.open()
    geometry = dataclasses.replace(place.geometries[rank], encrypted=welcome.encrypted)
    if geometry.frame_bytes != welcome.frame_bytes:
        store.leave()
        raise ConfigError(
            f"nodes: the node {peers[0].address} has frames of {welcome.frame_bytes} bytes for "
            f"this model, this engine {geometry.frame_bytes}: use the same release of both"
        )
    return store, geometry


def open_remote_index(
    config: SSDKVConfig, place: StorePlace, block_tokens: int, stack: ExitStack
) -> tuple[RemoteIndex, list[bytes]]:
    """The scheduler's half in a node or in several, and the digest of each rank's weights.

    ``stack`` closes what was opened if the start fails.

    Raises:
        ConfigError: see :func:`peers_of`.
        StoreError: no node answers, or one refuses, or a rank has not told of its weights.
    """
    peers = peers_of(config, place, block_tokens, "scheduler")
    index = RemoteIndex.open(peers, config.nodes, place.counters, config.replicas)
    stack.callback(index.close)
    return index, index.bind(BIND_S)


def store_on_nodes(config: SSDKVConfig, index: RemoteIndex, counters: Counters) -> SchedulerStore:
    """The store as the connector's scheduler holds it."""
    way_out = (
        "other engines go on with the node and verify hits for themselves; find out why this one "
        "computes otherwise, and start it again"
    )
    return SchedulerStore.elsewhere(config, index, counters, way_out, index.name_key)
