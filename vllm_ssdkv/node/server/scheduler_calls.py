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
    Last,
    Leave,
    Lookup,
    Message,
    Pin,
    Position,
    Slots,
    TellWeights,
    Touch,
    Unpin,
    pack,
    unpack,
    unpack_keys,
)
from vllm_ssdkv.node.server.hosted_store import HostedStore
from vllm_ssdkv.node.server.leases import Lease
from vllm_ssdkv.node.server.session import Session
from vllm_ssdkv.store.format.slot_geometry import I64


class SessionCalls:
    """Carries out calls. Used by the thread of the session's ``calls`` connection."""

    def __init__(self, session: Session, store: HostedStore):
        self._session, self._store = session, store
        self._lease: Lease = session.lease
        of_scheduler: dict[type[Message], Callable[..., Message | None]] = {
            Bind: self._bind,
            Lookup: self._lookup,
            Find: self._find,
            Leave: self._leave,
            GoOn: self._go_on,
            Last: self._last,
            Claim: self._claim,
            Touch: self._touch,
            Pin: self._pin,
            Unpin: self._unpin,
            Drop: self._drop,
            ForgetAll: self._forget_all,
            AskGauges: self._gauges,
        }
        of_worker: dict[type[Message], Callable[..., Message | None]] = {
            TellWeights: self._tell_weights,
            AskGauges: self._gauges,
        }
        self._handlers = of_scheduler if session.role == "scheduler" else of_worker

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

    def _tell_weights(self, message: TellWeights) -> Message:
        self._store.tell_weights(self._session.run, self._session.rank, message.digest)
        return Done()

    def _bind(self, message: Bind) -> Message:
        patience_s = min(message.patience_s, MOST_PATIENCE_S)
        return Bound(self._store.weights(self._session.run, patience_s, self._gone))

    def _gone(self) -> bool:
        """Check whether nobody waits for an answer any more."""
        channels = list(self._session.channels)
        return self._session.ended or any(channel.peer_left for channel in channels)

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

    def _claim(self, message: Claim) -> Message:
        keys = unpack_keys(message.keys)
        slots, epochs = self._store.claim(self._lease, keys, first=message.first)
        return Claimed(pack(slots), pack(epochs))

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
