"""Link of one rank to the volumes that it has on one node."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import NodeError, NodeGoneError, NodeRefusedError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.node_link import NodeLink
from vllm_ssdkv.node.client.session import Peer, Session
from vllm_ssdkv.node.client.volume_wire import VolumeWire
from vllm_ssdkv.node.protocol.messages import (
    AskDrives,
    AskVolumes,
    Drive,
    Drives,
    Message,
    OpenVolumes,
    Volumes,
    VolumesOpened,
)

logger = logging.getLogger(__name__)

OPEN_S = 60.0
"""Deadline of opening volumes, in seconds: new ones get their space."""

LOOK_S = 10.0
"""Deadline of looking at drives and volumes."""

_Answer = TypeVar("_Answer", bound=Message)


def ask(session: Session, message: Message, answer: type[_Answer], timeout: float) -> _Answer:
    """Call a node at the start of an engine.

    Raises:
        StoreError: it refuses, or does not answer; the text has the reason.
    """
    try:
        return session.call(message, answer, timeout)
    except NodeError as error:
        raise StoreError(f"nodes: {error}") from error


class VolumeLink:
    """Keeps a session with one node, with the volumes of one rank open in it.

    A node that was away and is back with the same volumes is used again.

    Attributes:
        peer: The node.
        since: Slots that engines share and that have an older epoch may be another one's by now.
        on_caught_up: Called with the number of a drive that was late and is no more, by threads of
            the link; must not block, and not call the link.

    Example:
        link = VolumeLink(peer, counters, "Qwen/Qwen3-8B", deadline_s=10.0)
        drives = link.start()
        link.open([name], [1 << 30], memory)
        link.wire
    """

    def __init__(
        self,
        peer: Peer,
        counters: Counters,
        model: str,
        deadline_s: float,
        *,
        shared: bool = False,
    ):
        """
        Args:
            peer: The node, and this rank.
            counters: Of this rank.
            model: Name of the model.
            deadline_s: Of each request.
            shared: Whether other engines may have the volumes, too.
        """
        self.peer, self.since = peer, 0
        self._on_change: list[Callable[[bool], None]] = []
        self.on_caught_up: list[Callable[[int], None]] = []
        self._model, self._deadline_s, self._shared = model, deadline_s, shared
        self._link = NodeLink(peer, counters, with_bytes=True, opened=self._opened)
        self._drives: list[Drive] = []
        self._names: list[bytes | None] | None = None
        self._nbytes: list[int] = []
        self._memory: NDArray[np.uint8] | None = None
        self._wire: VolumeWire | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def wire(self) -> VolumeWire | None:
        """Traffic of the session; None while the node is gone."""
        wire = self._wire
        return None if wire is None or wire.over else wire

    @property
    def session(self) -> Session | None:
        """The session, while the volumes are to be had."""
        wire = self.wire
        return None if wire is None or wire.session.ended else wire.session

    def tell_changes(self, tell: Callable[[bool], None]) -> None:
        """Call ``tell`` now and at each change, in order: with True if volumes are to be had, with
        False if the node is gone. It must not block, and not call the link."""
        with self._lock:
            self._on_change.append(tell)
            tell(self.wire is not None)

    def start(self) -> list[Drive]:
        """Open the first session; the node's drives.

        Raises:
            StoreError: the node does not answer or refuses.
        """
        session = self._link.start()
        self._drives = ask(session, AskDrives(self._model), Drives, LOOK_S).drives
        return self._drives

    def missing(self, name: bytes) -> bool:
        """Check whether the node has no volume of this name. Blocks.

        Raises:
            StoreError: the node does not answer.
        """
        session = self._link.session
        if session is None:
            raise StoreError(f"nodes: the node {self.peer.address} is gone")
        return not ask(session, AskVolumes([name]), Volumes, LOOK_S).volumes

    def open(
        self, names: Sequence[bytes | None], nbytes: Sequence[int], memory: NDArray[np.uint8]
    ) -> None:
        """Open the volumes, now and in each session to come.

        Args:
            names: Of the volume on each drive of the node; None: there is none.
            nbytes: Bytes of each.
            memory: The arena.

        Raises:
            StoreError: the node refuses, or does not answer.
        """
        self._names, self._nbytes, self._memory = list(names), list(nbytes), memory
        session = self._link.session
        if session is None:
            raise StoreError(f"nodes: the node {self.peer.address} is gone")
        try:
            self._open_volumes(session, again=False)
        except NodeError as error:
            raise StoreError(f"nodes: {error}") from error

    def _opened(self, session: Session) -> None:
        """A session was opened: have the volumes in it, if it is not the first.

        Raises:
            NodeError: they are not to be had; the session ends.
        """
        if self._names is None:
            return
        drives = session.call(AskDrives(self._model), Drives, LOOK_S).drives
        if [drive.name for drive in drives] != [drive.name for drive in self._drives]:
            raise NodeRefusedError(
                f"the node {self.peer.address} has other drives than when this engine started: "
                "start the engine again"
            )
        wanted = [name for name in self._names if name is not None]
        found = {
            volume.name for volume in session.call(AskVolumes(wanted), Volumes, LOOK_S).volumes
        }
        if set(wanted) - found:
            raise NodeRefusedError(
                f"the node {self.peer.address} has lost {len(set(wanted) - found)} volumes of this "
                "engine: start the engine again, which makes them anew"
            )
        self._open_volumes(session, again=True)

    def _open_volumes(self, session: Session, *, again: bool) -> None:
        channel, memory, names = session.bytes, self._memory, self._names
        if channel is None or memory is None or names is None:
            raise NodeGoneError("a volume session has no connection for bytes")
        opened = session.call(
            OpenVolumes(names, self._nbytes, self._model, self._deadline_s, self._shared, again),
            VolumesOpened,
            OPEN_S,
        )
        wire = VolumeWire(
            session,
            channel,
            memory,
            drives=len(names),
            window=opened.window,
            deadline_s=self._deadline_s,
            over=self._over,
            caught_up=self._drive_caught_up,
        )
        with self._lock:
            if self._closed:
                raise NodeGoneError("the engine ends")
            self.since, self._wire = opened.since, wire  # who finds the wire finds its epoch
            # Under the lock: the end of one session and the begin of the next are told in order,
            # and whoever closes finds threads that have started.
            wire.start()
            for tell in self._on_change:
                tell(True)

    def _drive_caught_up(self, drive: int) -> None:
        for tell in self.on_caught_up:
            tell(drive)

    def _over(self, wire: VolumeWire) -> None:
        with self._lock:
            if self._closed or wire is not self._wire:
                return
            logger.error("ssdkv: the node %s is gone", self.peer.address)
            for tell in self._on_change:
                tell(False)

    def close(self, timeout_s: float) -> bool:
        """End the session; False when its threads did not end in time."""
        with self._lock:
            self._closed = True
            wire = self._wire
        self._link.close()
        if wire is None:
            return True
        wire.end()
        return wire.join(timeout_s)
