"""One half of an engine, or somebody who asks, as long as it is connected."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.messages import Part, Role
from vllm_ssdkv.node.server.existence import Existence
from vllm_ssdkv.node.server.leases import Lease
from vllm_ssdkv.node.server.volumes import VolumeSet

_LOOK_S = 0.2
"""Pause between looks whether a session has ended, in seconds."""


@dataclass(slots=True, eq=False)
class Session:
    """Session of one half of an engine.

    Attributes:
        name: Random bytes, which the second connection shows.
        role, run, rank: As the hello says.
        peer: Address of the other side.
        store: What it is about; None: of a status session or a volume session.
        lease: What it has pinned.
        since: Of a scheduler whose volumes are shared: its slots have this epoch or a later one.
        began: Of the monotonic clock.
        channels: Its connections that are open.
        parts: Purposes of all connections that it ever had.
        volumes: Of a volume session that has opened them.
        volume_names: Their names.
    """

    name: bytes
    role: Role
    run: str
    rank: int
    peer: str
    store: Existence | None
    lease: Lease
    since: int = 0
    began: float = field(default_factory=time.monotonic)
    channels: list[Channel] = field(default_factory=list)
    parts: set[Part] = field(default_factory=set)
    volumes: VolumeSet | None = None
    volume_names: list[bytes] = field(default_factory=list)
    _opened: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)

    def have(self, volumes: VolumeSet, names: list[bytes]) -> None:
        """Have these volumes, which end with the session."""
        self.volumes, self.volume_names = volumes, names
        self._opened.set()

    def wait_for_volumes(self, timeout_s: float) -> VolumeSet | None:
        """Volumes of the session, once it has opened them; None: it did not."""
        deadline = time.monotonic() + timeout_s
        while not self.ended and time.monotonic() < deadline:
            if self._opened.wait(_LOOK_S):
                return self.volumes
        return None

    def end(self) -> None:
        """End all connections. Idempotent, from any thread."""
        self._ended.set()
        for channel in list(self.channels):
            channel.abort()

    @property
    def ended(self) -> bool:
        """Check whether it is over."""
        return self._ended.is_set()
