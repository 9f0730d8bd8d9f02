"""Calls of one session: what its scheduler or worker asks of the store's numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_ssdkv.base.errors import ProtocolError
from vllm_ssdkv.node.protocol.messages import (
    AskGauges,
    Bind,
    Bound,
    Claim,
    Claimed,
    Done,
    Drop,
    Find,
    ForgetAll,
    Gauges,
    GoOn,
    Grant,
    Last,
    Leave,
    Lookup,
    Message,
    Pin,
    Position,
    Publish,
    Slots,
    TellWeights,
    Touch,
    Unpin,
    pack,
    unpack,
    unpack_keys,
)
from vllm_ssdkv.node.server.existence import Existence
from vllm_ssdkv.node.server.hosted_store import HostedStore
from vllm_ssdkv.node.server.leases import Lease
from vllm_ssdkv.node.server.session import Session
from vllm_ssdkv.node.server.shared_index import SharedIndex
from vllm_ssdkv.store.format.slot_geometry import I64


class SessionCalls:
    """Carries out calls. Used by the thread of the session's ``calls`` connection."""

    def __init__(self, session: Session, store: Existence):
        self._session, self._store = session, store
        self._lease: Lease = session.lease
        self._handlers: dict[type[Message], Callable[..., Message | None]] = {
            Lookup: self._lookup,
            Find: self._find,
            Leave: self._leave,
            GoOn: self._go_on,
            Last: self._last,
            Touch: self._touch,
            Pin: self._pin,
            Unpin: self._unpin,
            Drop: self._drop,
            ForgetAll: self._forget_all,
            AskGauges: self._gauges,
        }

    def call(self, message: Message) -> Message | None:
        """Carry out one call; its answer, if it has one.

        Raises:
            ProtocolError: the message does not belong here, or cannot be what it says.
            NodeRefusedError: it cannot be carried out; the session goes on.
        """
        handler = self._handlers.get(type(message))
        if handler is None:
            kind, role = type(message).__name__, self._session.role
            raise ProtocolError("order", f"a {kind} came among the calls of a {role}")
        try:
            return handler(message)
        except (ValueError, IndexError) as error:
            raise ProtocolError("body", f"{type(message).__name__}: {error}") from error

    def _lookup(self, message: Lookup) -> Message:
        keys, expected = unpack_keys(message.keys), 0
        if message.chain:
            slots, epochs, expected = self._store.lookup_chain(
                self._lease, message.chain, keys, take_over=message.take_over
            )
        else:
            slots, epochs = self._store.lookup(self._lease, keys)
        return Slots(pack(slots), pack(epochs), expected)

    def _find(self, message: Find) -> Message:
        slots, epochs = self._store.find_each(self._lease, unpack_keys(message.keys))
        return Slots(pack(slots), pack(epochs))

    def _go_on(self, message: GoOn) -> None:
        self._store.go_on(self._lease, message.chain)

    def _leave(self, message: Leave) -> None:
        self._store.leave(self._lease, message.chain)

    def _last(self, message: Last) -> Message:
        keys = unpack_keys(message.keys)
        if not 0 <= message.end - message.first <= len(keys):
            raise ValueError(f"{len(keys)} keys for {message.first} to {message.end}")
        first, end = message.first, message.end
        return Position(self._store.last(self._lease, keys, first, end, message.tags))

    def _touch(self, message: Touch) -> None:
        self._store.touch(self._lease, unpack_keys(message.keys))

    def _pin(self, message: Pin) -> None:
        self._store.pin(self._lease, *_pairs(message.slots, message.epochs))

    def _unpin(self, message: Unpin) -> None:
        self._store.unpin(self._lease, *_pairs(message.slots, message.epochs))

    def _drop(self, message: Drop) -> None:
        self._store.drop(*_pairs(message.slots, message.epochs), message.cause)

    def _forget_all(self, _message: ForgetAll) -> Message:
        self._store.forget_all(self._lease)
        return Done()

    def _gauges(self, _message: AskGauges) -> Message:
        return Gauges(*self._store.gauges())


class HostedCalls(SessionCalls):
    """Calls about a store that the node keeps."""

    def __init__(self, session: Session, store: HostedStore):
        super().__init__(session, store)
        self._hosted = store
        if session.role == "scheduler":
            self._handlers |= {Bind: self._bind, Claim: self._claim}
        else:
            self._handlers = {TellWeights: self._tell_weights, AskGauges: self._gauges}

    def _tell_weights(self, message: TellWeights) -> Message:
        self._hosted.tell_weights(self._session.run, self._session.rank, message.digest)
        return Done()

    def _bind(self, message: Bind) -> Message:
        patience_s = min(message.patience_s, MOST_PATIENCE_S)
        return Bound(self._hosted.weights(self._session.run, patience_s, self._gone))

    def _gone(self) -> bool:
        """Check whether nobody waits for an answer any more."""
        channels = list(self._session.channels)
        return self._session.ended or any(channel.peer_left for channel in channels)

    def _claim(self, message: Claim) -> Message:
        keys = unpack_keys(message.keys)
        slots, epochs = self._hosted.claim(self._lease, keys, first=message.first)
        return Claimed(pack(slots), pack(epochs))


class SharedCalls(SessionCalls):
    """Calls about volumes that engines share."""

    def __init__(self, session: Session, store: SharedIndex):
        super().__init__(session, store)
        self._shared = store
        self._handlers |= {Grant: self._grant, Publish: self._publish}

    def _grant(self, message: Grant) -> Message:
        slots, epochs = self._shared.grant(self._lease, message.count)
        return Claimed(pack(slots), pack(epochs))

    def _publish(self, message: Publish) -> None:
        slots, epochs = _pairs(message.slots, message.epochs)
        keys = unpack_keys(message.keys)
        if len(keys) != len(slots):
            raise ValueError(f"{len(keys)} keys for {len(slots)} slots")
        self._shared.publish(self._lease, slots, epochs, keys)


MOST_PATIENCE_S = 600.0
"""Wait of a scheduler for its workers' weights, in seconds, at most."""


def _pairs(slots: bytes, epochs: bytes) -> tuple[I64, I64]:
    """Slots and epochs of a message.

    Raises:
        ValueError: not as many of one as of the other, or negative ones.
    """
    found, uses = unpack(slots), unpack(epochs)
    if len(found) != len(uses) or np.minimum(found, 0).any():
        raise ValueError(f"{len(found)} slots with {len(uses)} epochs")
    return found, uses
