"""One half of an engine, or somebody who asks, as long as it is connected."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.messages import Role
from vllm_ssdkv.node.server.hosted_store import HostedStore
from vllm_ssdkv.node.server.leases import Lease


@dataclass(slots=True, eq=False)
class Session:
    """Session of one half of an engine.

    Attributes:
        name: Random bytes, which the second connection shows.
        role, run, rank: As the hello says.
        peer: Address of the other side.
        store: What it is about; None: of a status session.
        lease: What it has pinned.
        began: Of the monotonic clock.
        channels: Its connections that are open.
    """

    name: bytes
    role: Role
    run: str
    rank: int
    peer: str
    store: HostedStore | None
    lease: Lease
    began: float = field(default_factory=time.monotonic)
    channels: list[Channel] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """End all connections. Idempotent, from any thread."""
        self._ended.set()
        for channel in list(self.channels):
            channel.abort()

    @property
    def ended(self) -> bool:
        """Check whether it is over."""
        return self._ended.is_set()
