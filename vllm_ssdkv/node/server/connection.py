"""One connection to the node, from its first frame to its last."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, get_args

from vllm_ssdkv.base.errors import (
    NodeError,
    NodeGoneError,
    NodeRefusedError,
    ProtocolError,
    SSDKVError,
)
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.metrics_node import CALLS, REFUSALS
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.frames import DEFAULT_LIMITS, VERSIONS, negotiate
from vllm_ssdkv.node.protocol.messages import AskStatus, Hello, Message, Part, Role, Status, Welcome
from vllm_ssdkv.node.server.attention import AttentionLink
from vllm_ssdkv.node.server.existence import Existence
from vllm_ssdkv.node.server.hosted_store import HostedStore
from vllm_ssdkv.node.server.leases import Lease
from vllm_ssdkv.node.server.newcomers import Newcomers
from vllm_ssdkv.node.server.scheduler_calls import HostedCalls, SharedCalls
from vllm_ssdkv.node.server.session import Session
from vllm_ssdkv.node.server.shared_index import SharedIndex, SharedIndexes
from vllm_ssdkv.node.server.store_registry import StoreRegistry
from vllm_ssdkv.node.server.volume_calls import VolumeCalls
from vllm_ssdkv.node.server.volume_link import VolumeLink
from vllm_ssdkv.node.server.volumes import VolumeShelf
from vllm_ssdkv.node.server.worker_link import WorkerLink

logger = logging.getLogger(__name__)

HELLO_S = 10.0
"""Seconds that a connection over a Unix socket has for its hello, and every peer for our answer."""

NEWCOMER_S = 3.0
"""Seconds that a connection over TCP has for its keys and its hello: anybody can open one."""

BEATS = 3
"""Heartbeats in the time of a lease."""

_VOLUMES_S = 600.0
"""Seconds that a volume session has to open its volumes, which may have to get their space."""

_JOINED: Final[dict[Role, tuple[Part, ...]]] = {
    "worker": ("bytes",),
    "volume": ("bytes", "attend"),
}
"""Connections that a session of each role may have beside that for calls."""


_LOOK_S = 0.02
"""Pause between looks whether sessions have ended, in seconds."""


class Calls(Protocol):
    """Calls of one session."""

    def call(self, message: Message) -> Message | None:
        """Carry out one call; its answer, if it has one."""


@dataclass(slots=True)
class NodeState:
    """State that all connections of a node share.

    Attributes:
        config: Options of the node.
        name: Random bytes of this start of it.
        registry: Its stores.
        counters: Its own metrics.
        status: How it is now.
        shelf: Its volumes.
        shared: Indexes of those that engines share.
        newcomers: Connections over TCP before their hello.
        draining: Set when it ends.
        lock: Guards all that follows.
        sessions: By name.
        links: Bytes of workers, by run and rank.
    """

    config: NodeConfig
    name: bytes
    registry: StoreRegistry
    counters: Counters
    status: Callable[[], Status]
    shelf: VolumeShelf
    shared: SharedIndexes
    newcomers: Newcomers
    draining: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    sessions: dict[bytes, Session] = field(default_factory=dict)
    links: dict[tuple[str, int], WorkerLink] = field(default_factory=dict)

    def claims_since(self, run: str) -> int | None:
        """Epoch of the slots that workers of a run may write in shared volumes; older ones are
        others' by now. None: it has no claims, since its scheduler has no session."""
        with self.lock:
            mine = [one for one in self.sessions.values() if one.run == run]
            since = [one.since for one in mine if isinstance(one.store, SharedIndex)]
        return max(since, default=None)

    def volumes_in_use(self) -> list[bytes]:
        """Names of the volumes that sessions have open."""
        with self.lock:
            return [name for one in self.sessions.values() for name in one.volume_names]

    def writes_ended(self, rank: int, run: str, pairs: list[tuple[int, int]], good: bool) -> None:
        """Tell the worker whose blocks were written, if it is still there."""
        with self.lock:
            link = self.links.get((run, rank))
        if link is not None:
            link.writes_ended(pairs, good)


def _calls(session: Session, store: Existence) -> Calls:
    """Calls of a session about a store."""
    if isinstance(store, HostedStore):
        return HostedCalls(session, store)
    if isinstance(store, SharedIndex):
        return SharedCalls(session, store)
    raise TypeError(f"a session has no {type(store).__name__}")


class Connection:
    """Serves one channel, in the thread that calls :meth:`serve`."""

    def __init__(self, channel: Channel, state: NodeState):
        self._channel, self._state = channel, state
        self._session: Session | None = None
        self._link: WorkerLink | VolumeLink | None = None
        self._part: Part = "calls"

    def serve(self) -> None:
        """Serve the channel to its end, and close it. Raises nothing that a peer can cause."""
        channel, cause = self._channel, "gone"
        deadline = time.monotonic() + (HELLO_S if channel.is_unix else NEWCOMER_S)
        try:
            channel.handshake(deadline - time.monotonic())
            session = self._session = self._greet(deadline)
            self._go_on(session)
        except ProtocolError as error:
            cause = "refused"
            self._refuse(error.cause, str(error))
        except NodeGoneError:
            pass
        except NodeRefusedError as error:  # the peer's own words, or keys that do not fit
            self._count_refusal("keys")
            logger.warning("ssdkv node: %s: %s", channel.peer, error)
        except Exception:
            cause = "refused"
            logger.exception("ssdkv node: the connection of %s ends", channel.peer)
            with contextlib.suppress(NodeError):
                channel.refuse("the node failed; its log says how")
        finally:
            self._state.newcomers.remove(channel)
            # Behind the reason: the end of a session ends its connections.
            if self._session is not None:
                self._close_link(self._session)
                self._leave(self._session)
            channel.close()
            if self._session is not None:
                self._ended(self._session, cause)

    def _refuse(self, cause: str, reason: str) -> None:
        self._count_refusal(cause)
        logger.warning("ssdkv node: %s is refused (%s): %s", self._channel.peer, cause, reason)
        with contextlib.suppress(NodeError):
            self._channel.refuse(reason)

    def _count_refusal(self, cause: str) -> None:
        self._state.counters.add("node_refusals", 1, cause=cause if cause in REFUSALS else "order")

    # ---- the first frame ----

    def _greet(self, deadline: float) -> Session:
        """Take the hello, which has to begin by ``deadline``, and answer it.

        Raises:
            ProtocolError: it cannot be accepted.
        """
        channel, state = self._channel, self._state
        frame = channel.receive(max(0.0, deadline - time.monotonic()))
        state.newcomers.remove(channel)
        hello = frame.message
        if not isinstance(hello, Hello) or frame.payload_bytes or frame.descriptors:
            raise ProtocolError("order", "a connection begins with a hello")
        version = negotiate(VERSIONS, hello.oldest, hello.newest)
        if state.draining.is_set():
            raise ProtocolError("closing", "the node ends; connect again when it is back")
        self._part = hello.part
        session = self._joined(hello) if hello.session else self._begun(hello)
        try:
            welcome = self._welcome(session, version)
            descriptors = []
            if self._part == "bytes" and channel.is_unix and isinstance(session.store, HostedStore):
                descriptors = [session.store.ranks[session.rank].arena.fd]
            channel.agree(version, DEFAULT_LIMITS)
            channel.silence_s = state.config.lease
            channel.send(
                welcome,
                call_id=frame.call_id,
                answer=True,
                descriptors=descriptors,
                timeout=HELLO_S,
            )
        except BaseException:
            self._leave(session)
            raise
        return session

    def _begun(self, hello: Hello) -> Session:
        """A new session."""
        state = self._state
        if hello.part != "calls":
            raise ProtocolError("order", "a session begins with the connection for calls")
        with state.lock:
            if len(state.sessions) >= state.config.most_sessions:
                raise ProtocolError(
                    "limit", f"the node has {len(state.sessions)} sessions (most_sessions)"
                )
        store: Existence | None = None
        if hello.role == "volume" and not hello.run:
            raise ProtocolError("order", "the hello of a volume session names no run")
        if hello.role in ("scheduler", "worker"):
            if hello.store is None or hello.rank >= hello.store.ranks or not hello.run:
                raise ProtocolError("order", f"the hello of a {hello.role} names no store or run")
            if hello.store.slots and hello.role == "worker":
                raise ProtocolError("order", "workers have volumes where engines share these")
            try:
                take = state.shared.take if hello.store.slots else state.registry.take
                store = take(hello.store)
            except SSDKVError as error:
                raise ProtocolError("store", str(error)) from error
        name = secrets.token_bytes(16)
        session = Session(
            name, hello.role, hello.run, hello.rank, self._channel.peer, store, Lease(hello.run)
        )
        if isinstance(store, SharedIndex):
            session.since = store.next_epoch
        with state.lock:
            state.sessions[name] = session
            session.channels.append(self._channel)
            session.parts.add(hello.part)
        self._count_sessions()
        return session

    def _joined(self, hello: Hello) -> Session:
        """The session that this connection is the second one of."""
        state = self._state
        with state.lock:
            session = state.sessions.get(hello.session)
            fits = (
                session is not None
                and not session.ended
                and session.role == hello.role
                and (session.run, session.rank) == (hello.run, hello.rank)
                and hello.part in _JOINED.get(session.role, ())
                and hello.part not in session.parts
            )
            if session is None or not fits:
                raise ProtocolError("order", "there is no such session to join")
            session.channels.append(self._channel)
            session.parts.add(hello.part)
        return session

    def _welcome(self, session: Session, version: int) -> Welcome:
        config, store = self._state.config, session.store
        common = (version, session.name, self._state.name, config.lease, config.lease / BEATS)
        if store is None:
            return Welcome(*common)
        if not isinstance(store, HostedStore):
            return Welcome(*common, num_slots=store.num_slots)
        host = store.ranks[session.rank]
        return Welcome(
            *common,
            num_slots=store.num_slots,
            encrypted=store.geometry.encrypted,
            name_key=store.name_key,
            frames=host.frames()[0],
            frame_bytes=store.geometry.frame_bytes,
            arena_bytes=host.arena.nbytes,
            in_flight=config.transfer,
        )

    # ---- what follows ----

    def _go_on(self, session: Session) -> None:
        state = self._state
        if session.role == "volume" and self._part == "attend":
            self._serve_attention(session)
        elif session.role == "volume" and self._part != "calls":
            self._serve_volumes(session)
        elif session.store is None:
            in_use, since = state.volumes_in_use, state.claims_since
            self._serve_calls(VolumeCalls(session, state.shelf, state.config, in_use, since))
        elif self._part == "bytes":
            self._serve_bytes(session)
        else:
            self._serve_calls(_calls(session, session.store))

    def _serve_calls(self, calls: Calls) -> None:
        channel, lease_s = self._channel, self._state.config.lease
        while True:
            frame = channel.receive(None)
            message = frame.message
            if message is None or frame.is_answer or frame.payload_bytes or frame.descriptors:
                raise ProtocolError("order", "what came is no call")
            self._count_call(type(message).__name__)
            if (
                isinstance(message, AskStatus)
                and self._session is not None
                and self._session.role == "status"
            ):
                channel.send(
                    self._state.status(), call_id=frame.call_id, answer=True, timeout=HELLO_S
                )
                continue
            try:
                answer = calls.call(message)
            except NodeRefusedError as error:
                channel.send_error(frame.call_id, str(error), timeout=lease_s)
                continue
            if answer is not None:
                channel.send(answer, call_id=frame.call_id, answer=True, timeout=lease_s)

    def _serve_volumes(self, session: Session) -> None:
        """Serve a connection of a volume session that is not the one for calls."""
        state, channel = self._state, self._channel
        volumes = session.wait_for_volumes(_VOLUMES_S)
        if volumes is None:
            raise ProtocolError("order", "a session without volumes has no bytes")
        channel.start_heartbeat(state.config.lease / BEATS)
        link = VolumeLink(channel, volumes, state.config, state.counters)
        self._link = link
        if volumes.shared:
            state.shared.writers.add(session.run, link)
        link.serve(self._count_call)

    def _serve_attention(self, session: Session) -> None:
        """Serve the connection for attention of a volume session."""
        state = self._state
        volumes = session.wait_for_volumes(_VOLUMES_S)
        if volumes is None:
            raise ProtocolError("order", "a session without volumes has nothing to attend to")
        AttentionLink(self._channel, volumes, state.config, state.counters).serve(self._count_call)

    def _serve_bytes(self, session: Session) -> None:
        state, store = self._state, session.store
        if not isinstance(store, HostedStore):
            raise ProtocolError("order", "a session without a store has no bytes")
        config = state.config
        link = WorkerLink(
            session, store, self._channel, state.counters, config.lease, config.transfer
        )
        self._link = link
        with state.lock:
            state.links[session.run, session.rank] = link
        self._channel.most_descriptors = 1
        self._channel.start_heartbeat(config.lease / BEATS)
        link.serve(self._count_call)

    def _close_link(self, session: Session) -> None:
        link, state, place = self._link, self._state, (session.run, session.rank)
        if link is None:
            return
        if isinstance(link, WorkerLink):
            with state.lock:
                if state.links.get(place) is link:
                    del state.links[place]
        link.close()
        if isinstance(link, VolumeLink) and link.volumes.shared:
            state.shared.writers.remove(session.run, link)

    def _count_call(self, name: str) -> None:
        if name in CALLS:
            self._state.counters.add("node_calls", 1, call=name)

    # ---- the end ----

    def _leave(self, session: Session) -> None:
        """This connection is over, and with it the session, unless it was for attention alone."""
        state = self._state
        with state.lock:
            if self._part == "attend":
                session.parts.discard("attend")
            else:
                # Nobody joins it from here on, and who has just done so ends, too.
                session.end()
            if self._channel in session.channels:
                session.channels.remove(self._channel)
            last = not session.channels and state.sessions.pop(session.name, None) is not None
            run_over = last and not any(
                other.run == session.run and other.store is session.store
                for other in state.sessions.values()
            )
        if last and session.volumes is not None:
            session.volumes.close()
        store = session.store
        if not last or store is None:
            return
        if isinstance(store, SharedIndex):
            self._end_volumes(session.run)
        released = store.end(session.lease)
        state.counters.add("node_pins_released", released)
        if isinstance(store, SharedIndex):
            state.shared.give_back(store)
        elif isinstance(store, HostedStore):
            if run_over:
                store.forget_run(session.run)
            state.registry.give_back(store)

    def _end_volumes(self, run: str) -> None:
        """End the volume sessions of a run whose claims end: before others get its slots, its last
        writes must be over. Blocks, with a deadline: a drive that hangs does not end."""
        state = self._state
        deadline = time.monotonic() + 2 * state.config.io.deadline
        with state.lock:
            sessions = state.sessions.values()
            ending = [one for one in sessions if (one.role, one.run) == ("volume", run)]
        for session in ending:
            session.end()
        # Not those that begin meanwhile: workers connect anew at once.
        while time.monotonic() < deadline:
            with state.lock:
                if not any(one.name in state.sessions for one in ending):
                    return
            time.sleep(_LOOK_S)

    def _ended(self, session: Session, cause: str) -> None:
        if session.channels:
            return
        if self._state.draining.is_set():
            cause = "closing"
        self._state.counters.add("node_sessions_ended", 1, cause=cause)
        self._count_sessions()

    def _count_sessions(self) -> None:
        with self._state.lock:
            roles = [session.role for session in self._state.sessions.values()]
        for role in get_args(Role):
            self._state.counters.set("node_sessions", roles.count(role), role=role)
