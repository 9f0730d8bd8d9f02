"""Drives of nodes as devices of an engine's own store (mode ``page``).

Each (node, drive) is one device. Its directory below ``state_dir``, the *stub*, has superblocks and
a copy of the manifest, so that claims, locks and recovery need not know of nodes; what lies behind
the superblocks is in a volume of the node, which has the name of the data file.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec
import numpy as np

from vllm_ssdkv.base.errors import ConfigError, FormatError, NodeError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import DeviceConfig, SSDKVConfig
from vllm_ssdkv.node.client.node_engine import NodeEngine
from vllm_ssdkv.node.client.session import Peer, Session, as_name
from vllm_ssdkv.node.client.volume_link import LOOK_S, VolumeLink, ask
from vllm_ssdkv.node.client.volume_wire import VolumeWire
from vllm_ssdkv.node.protocol.messages import AskDrives, Drive, Drives, shared_volume
from vllm_ssdkv.store.devices.data_device import OpenDevice
from vllm_ssdkv.store.devices.data_file import read_superblock
from vllm_ssdkv.store.devices.health import DeviceHealth
from vllm_ssdkv.store.devices.remote_devices import ABOUT, AboutStub, RemoteVolume
from vllm_ssdkv.store.memory.arena import Arena

logger = logging.getLogger(__name__)

STUBS: Final = "nodes"
"""Directory of the stubs below the state directory."""

_CONNECT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class NodeDrive:
    """One drive of a node, as a device of the store.

    Attributes:
        node: Number of the node, in the order of the option ``nodes``.
        number: Number of the drive there.
        drive: As the node has told it.
        stub: Directory of the device here.
    """

    node: int
    number: int
    drive: Drive
    stub: Path


def find_drives(peers: Sequence[Peer], model: str, state: Path) -> list[NodeDrive]:
    """Ask all nodes for their drives. Neighbours in the list are of different nodes, as far as
    there are some: the second copy of a block lies on the next device.

    Raises:
        ConfigError: two addresses are of one node.
        StoreError: a node does not answer or refuses; the text names it and the way out.
    """
    of_node = [_drives_of(peer, model) for peer in peers]
    by_turns = zip_longest(*(list(enumerate(drives)) for drives in of_node))
    found: list[NodeDrive] = []
    for turn in by_turns:
        for node, entry in enumerate(turn):
            if entry is not None:
                number, drive = entry
                stub = state / STUBS / str(UUID(bytes=drive.name))
                found.append(NodeDrive(node, number, drive, stub))
    names = [one.drive.name for one in found]
    for one in found:
        first = found[names.index(one.drive.name)]
        if first is not one:
            raise ConfigError(
                f"nodes: {peers[first.node].address} and {peers[one.node].address} have the same "
                f"drive {one.drive.path}: name each node once"
            )
    return found


def _drives_of(peer: Peer, model: str) -> list[Drive]:
    try:
        session = Session.open(peer, with_bytes=False, timeout=_CONNECT_S)
    except NodeError as error:
        raise StoreError(
            f"nodes: the node {peer.address} cannot be used: {error}; see that it runs (`ssdkv "
            "node status`), or leave it out of nodes: what lies there has a copy on another node "
            "with replicas 2, and is computed again otherwise"
        ) from error
    try:
        return ask(session, AskDrives(as_name(model)), Drives, LOOK_S).drives
    finally:
        session.close()


def with_node_drives(
    config: SSDKVConfig, drives: Sequence[NodeDrive], peers: Sequence[Peer]
) -> SSDKVConfig:
    """The options with the stubs of these drives as devices. Makes the stubs; blocks on I/O.

    Raises:
        ConfigError: ``state_dir`` cannot be, or there are fewer drives than copies.
        StoreError: a stub cannot be made.
    """
    if len(drives) < config.replicas:
        raise ConfigError(
            f"replicas: {config.replicas} copies need {config.replicas} drives, the nodes have "
            f"{len(drives)}: name another node, or leave replicas at 1"
        )
    state = Path(config.state_dir or "")
    if not state.exists() and not state.parent.exists():
        raise ConfigError(f"state_dir {state}: neither it nor its parent exists")
    if config.replicas > 1 and len(peers) == 1:
        logger.warning(
            "ssdkv: both copies of a block lie on drives of the node %s: name another node, and a "
            "node that is gone costs nothing",
            peers[0].address,
        )
    devices = []
    for one in drives:
        node = str(peers[one.node].address)
        about = AboutStub(node, one.drive.path, one.drive.room, config.share_contexts)
        capacity = _make_stub(one.stub, about)
        devices.append(DeviceConfig(path=str(one.stub), capacity=capacity, weight=1.0))
    return config.model_copy(update={"devices": tuple(devices)})


def _make_stub(stub: Path, about: AboutStub) -> int:
    """Make a stub, or note where its drive is now; bytes that the store may have on it, which stay
    as they were when the stub was made."""
    try:
        stub.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = stub / ABOUT
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            known = msgspec.json.decode(path.read_bytes(), type=AboutStub)
            about = msgspec.structs.replace(about, capacity=known.capacity)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(msgspec.json.encode(about))
        temporary.rename(path)
    except OSError as error:
        raise StoreError(f"{stub}: cannot be made: {error.strerror}") from error
    return about.capacity


class NodeDrives:
    """All drives of all nodes that one rank has volumes on. Any thread, except for opening.

    Attributes:
        links: One for each node.
        node_of: Number of the node of each device of the store, int64, [devices].
        drive_of: Number of the drive there, int64, [devices].

    Example:
        drives = NodeDrives(peers, found, "Qwen/Qwen3-8B", counters, deadline_s=10.0)
        opened = open_rank(place, rank, counters, remote=drives)
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        drives: Sequence[NodeDrive],
        model: str,
        counters: Counters,
        deadline_s: float,
        fingerprint: bytes = b"",
    ):
        """
        Args:
            peers: The nodes, and this rank.
            drives: As :func:`find_drives` found them.
            model: Name of the model.
            counters: Of this rank.
            deadline_s: Of each request.
            fingerprint: Digest of the KV, by which engines that share volumes name them; empty:
                volumes are of this engine alone.

        Raises:
            StoreError: a node does not answer, or has other drives by now.
        """
        self._drives, self._fingerprint, self._rank = list(drives), fingerprint, peers[0].rank
        name, shared = as_name(model), bool(fingerprint)
        self.links = [VolumeLink(peer, counters, name, deadline_s, shared=shared) for peer in peers]
        self.node_of = np.zeros(0, dtype=np.int64)
        self.drive_of = np.zeros(0, dtype=np.int64)
        try:
            for node in range(len(self.links)):
                self._start(node)
        except BaseException:
            self.close(0.0)
            raise

    def _start(self, node: int) -> None:
        """Open the session with a node, which must have the drives that it had a moment ago."""
        link = self.links[node]
        there = [one.drive.name for one in self._drives if one.node == node]
        if [drive.name for drive in link.start()] != there:
            raise StoreError(
                f"nodes: the drives of the node {link.peer.address} have changed while the engine "
                "started: start it again"
            )

    def _of(self, path: Path) -> NodeDrive:
        """The drive that a device is; of data-parallel engines directories lie below stubs."""
        for one in self._drives:
            if one.stub in (path, path.parent):
                return one
        raise StoreError(f"{path} is no drive of the nodes")

    def check(self, device: OpenDevice) -> None:
        """See :class:`~vllm_ssdkv.store.devices.remote_devices.RemoteDevices`."""
        if self._fingerprint:
            return  # what others have stored is theirs: headers of slots say what is there
        try:
            block = read_superblock(device)
        except FormatError:
            return  # whoever claims the file says what is wrong
        link = self.links[self._of(device.path.parent).node]
        if block is None or not link.missing(block.device.bytes):
            return
        logger.error(
            "ssdkv: the node %s has not the volume %s: it is made anew",
            link.peer.address,
            block.device,
        )
        try:
            os.ftruncate(device.fd, 0)
            os.ftruncate(device.fd, device.nbytes)
        except OSError as error:
            raise StoreError(f"{device.path}: {error.strerror}") from error

    def open_engine(self, volumes: Sequence[RemoteVolume], arena: Arena) -> NodeEngine:
        """See :class:`~vllm_ssdkv.store.devices.remote_devices.RemoteDevices`."""
        places = [self._of(Path(volume.path)) for volume in volumes]
        self.node_of = np.array([place.node for place in places], dtype=np.int64)
        self.drive_of = np.array([place.number for place in places], dtype=np.int64)
        memory = arena.view(0, arena.nbytes)
        for node, link in enumerate(self.links):
            count = sum(one.node == node for one in self._drives)
            names: list[bytes | None] = [None] * count
            nbytes = [0] * count
            for place, volume in zip(places, volumes, strict=True):
                if place.node == node:
                    names[place.number] = self._name(place, volume)
                    nbytes[place.number] = volume.nbytes
            link.open(names, nbytes, memory)
        return NodeEngine(arena, self.node_of, self.drive_of, self._wire)

    def _name(self, place: NodeDrive, volume: RemoteVolume) -> bytes:
        if not self._fingerprint:
            return volume.name.bytes
        return shared_volume(place.drive.name, self._fingerprint, self._rank).bytes

    def _wire(self, node: int) -> VolumeWire | None:
        return self.links[node].wire

    def watch(self, health: DeviceHealth) -> None:
        """See :class:`~vllm_ssdkv.store.devices.remote_devices.RemoteDevices`."""
        for node, link in enumerate(self.links):
            mine = np.flatnonzero(self.node_of == node).tolist()

            def tell(here: bool, mine: Sequence[int] = mine, link: VolumeLink = link) -> None:
                health.writes_since = max(health.writes_since, link.since)
                for device in mine:
                    if here:
                        health.restore(device)
                    else:
                        health.quarantine(device, f"the node {link.peer.address} is gone")

            # A drive that was late, and whose failures took it out of use, is used again.
            def caught_up(drive: int, mine: Sequence[int] = mine) -> None:
                for device in mine:
                    if self.drive_of[device] == drive:
                        health.restore(device)

            link.on_caught_up.append(caught_up)
            link.tell_changes(tell)

    def describe(self) -> list[str]:
        """Lines of the start-up summary."""
        return [
            f"node {link.peer.address}: {int((self.node_of == node).sum())} drive(s)"
            for node, link in enumerate(self.links)
        ]

    def close(self, timeout_s: float) -> bool:
        """End all sessions; False when threads did not end in time."""
        ended = [link.close(timeout_s) for link in self.links]
        return all(ended)
