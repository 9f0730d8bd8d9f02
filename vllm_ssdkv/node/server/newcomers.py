"""Connections before their hello: few, for seconds, so that silent ones keep no engine out."""

from __future__ import annotations

import threading

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.node.protocol.channel import Channel

MOST = 64
MOST_OF_ONE_ADDRESS = 8


class Newcomers:
    """Connections over TCP that have not said hello: whoever comes ends the oldest one too many.

    Any thread may call.
    """

    def __init__(self, counters: Counters):
        """``counters``: for ``node_refusals``."""
        self._counters = counters
        self._lock = threading.Lock()
        self._hosts: dict[Channel, str] = {}
        """Their addresses, the oldest first."""

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, channel: Channel) -> None:
        """Take a connection in, and end the oldest of its address or of all where it is one too
        many."""
        host = Address.parse(channel.peer).host
        with self._lock:
            same = [other for other, its in self._hosts.items() if its == host]
            too_many = same if len(same) >= MOST_OF_ONE_ADDRESS else list(self._hosts)
            oldest = too_many[0] if too_many is same or len(too_many) >= MOST else None
            if oldest is not None:
                del self._hosts[oldest]
            self._hosts[channel] = host
        if oldest is not None:
            oldest.abort()
            self._counters.add("node_refusals", 1, cause="limit")

    def remove(self, channel: Channel) -> None:
        """Let a connection go that has said hello or has ended; any number of times."""
        with self._lock:
            self._hosts.pop(channel, None)
