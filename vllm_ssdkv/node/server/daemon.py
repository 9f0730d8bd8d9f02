"""A node: listens, serves sessions, and ends in order."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from vllm_ssdkv import __version__
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.frames import VERSIONS
from vllm_ssdkv.node.protocol.messages import SessionStatus, Status, StoreSpec, StoreStatus
from vllm_ssdkv.node.protocol.sockets import Listener
from vllm_ssdkv.node.server.connection import HELLO_S, Connection, NodeState
from vllm_ssdkv.node.server.drive_room import DriveRoom
from vllm_ssdkv.node.server.hosted_store import HostedStore
from vllm_ssdkv.node.server.newcomers import Newcomers
from vllm_ssdkv.node.server.node_metrics import (
    NodeCollector,
    Source,
    serve_metrics,
    start_at_zero,
)
from vllm_ssdkv.node.server.shared_index import SharedIndex, SharedIndexes
from vllm_ssdkv.node.server.store_options import directory_of, store_options
from vllm_ssdkv.node.server.store_registry import StoreRegistry
from vllm_ssdkv.node.server.volumes import VolumeShelf

logger = logging.getLogger(__name__)

_MORE_CONNECTIONS = 32
"""Connections beyond three for each session (calls, bytes, attention): over Unix sockets without a
hello yet, and those that end. :class:`Newcomers` bounds those over TCP."""


class Node:
    """A store with an address, for the engines that name it.

    Any thread may call. A connection has a thread of its own.

    Example:
        node = Node(config)
        node.start()
        signal.sigwait({signal.SIGTERM})
        node.close()
    """

    def __init__(self, config: NodeConfig):
        """Listen at all addresses; nobody is answered before :meth:`start`.

        Raises:
            ConfigError: an option does not fit this machine.
            NodeError: an address is not to be had, or lacks keys.
        """
        self.config = config
        self._began = time.monotonic()
        self._closed = False
        self._threads: set[threading.Thread] = set()
        self._threads_lock = threading.Lock()
        counters = Counters()
        start_at_zero(counters)
        self.counters = counters
        self._registry = StoreRegistry(config, self._open_store)
        self._room = DriveRoom(config, self._registry.names, counters)
        shelf = VolumeShelf(config, self._room)
        self._state = NodeState(
            config,
            secrets.token_bytes(16),
            self._registry,
            counters,
            self.status,
            shelf,
            SharedIndexes(shelf),
            Newcomers(counters),
        )
        credentials = None
        if config.keys is not None:
            credentials = Credentials.load(Path(config.keys), "node")
        self._server: WSGIServer | None = None
        self.metrics_port = 0
        """Port of ``/metrics``; 0: there is none."""
        self._listeners: list[Listener] = []
        with ExitStack() as stack:
            for text in config.listen:
                address, mode = Address.parse(text), int(config.socket_mode, 8)
                listener = Listener(address, credentials, mode=mode)
                stack.callback(listener.close)
                self._listeners.append(listener)
            if config.metrics is not None:
                collector = NodeCollector(counters, self._sources)
                self._server, self.metrics_port = serve_metrics(config.metrics, collector, counters)
            stack.pop_all()

    @property
    def addresses(self) -> list[Address]:
        """Addresses at which it listens, with the ports that were chosen for port 0."""
        return [listener.address for listener in self._listeners]

    def start(self) -> None:
        """Begin to serve."""
        for listener in self._listeners:
            accept = functools.partial(self._accept, listener)
            self._start_thread(accept, f"ssdkv-node {listener.address}")
        where = ", ".join(map(str, self.addresses))
        logger.info("ssdkv node %s, process %d, listens at %s", __version__, os.getpid(), where)

    def _start_thread(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        with self._threads_lock:
            self._threads.add(thread)
        thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # the node goes on
            logger.exception("ssdkv node: a thread ends")
        finally:
            with self._threads_lock:
                self._threads.discard(threading.current_thread())

    def _accept(self, listener: Listener) -> None:
        most = 3 * self.config.most_sessions + _MORE_CONNECTIONS
        newcomers = self._state.newcomers
        while (channel := listener.accept()) is not None:
            with self._threads_lock:
                full = len(self._threads) - len(newcomers) >= most
            if full:
                self.counters.add("node_refusals", 1, cause="limit")
                channel.close()
                continue
            if not channel.is_unix:
                newcomers.add(channel)
            connection = Connection(channel, self._state)
            self._start_thread(connection.serve, "ssdkv-node-session")

    def _open_store(self, spec: StoreSpec) -> HostedStore:
        config = store_options(self.config, spec)
        for device in self.config.devices:
            Path(device.path).mkdir(mode=0o700, exist_ok=True)
        name = f"node {self._state.name.hex()}"
        with self._room.promise_store(config):
            return HostedStore(spec, config, name, self._state.writes_ended)

    def _sources(self) -> list[Source]:
        stores, shared = self._registry.stores(), self._state.shared.indexes()
        self.counters.set("node_stores", len(stores) + len(shared))
        self.counters.set("node_claims", sum(store.claims for store in (*stores, *shared)))
        with self._state.lock:
            pins = sum(len(session.lease) for session in self._state.sessions.values())
        self.counters.set("node_pins", pins)
        return [
            Source(
                (store.spec.model, directory_of(store.spec)),
                [store.counters, *(host.counters for host in store.ranks)],
            )
            for store in stores
        ]

    def status(self) -> Status:
        """Stores and sessions of now."""
        with self._state.lock:
            sessions = [
                SessionStatus(
                    session.peer,
                    session.role,
                    session.run,
                    session.rank,
                    "" if session.store is None else session.store.spec.model,
                    time.monotonic() - session.began,
                    len(session.lease),
                    0 if session.store is None else session.store.claims_of(session.run),
                )
                for session in self._state.sessions.values()
            ]
        stores = [_store_status(store) for store in self._registry.stores()]
        stores += [_shared_status(index) for index in self._state.shared.indexes()]
        return Status(
            __version__,
            VERSIONS[-1],
            time.monotonic() - self._began,
            self._state.draining.is_set(),
            stores,
            sessions,
        )

    def close(self) -> bool:
        """End all sessions, have what was saved written, and close all stores; False when writes
        did not end within the option ``drain``. Blocks; once."""
        if self._closed:
            return True
        self._closed = True
        deadline = time.monotonic() + self.config.drain
        self._state.draining.set()
        logger.info("ssdkv node: ends; engines go on without it")
        for listener in self._listeners:
            listener.stop()
        with self._state.lock:
            sessions = list(self._state.sessions.values())
        for session in sessions:
            session.end()
        self._join(max(HELLO_S, self.config.lease))
        drained = self._registry.close(max(0.0, deadline - time.monotonic()))
        self._state.shared.close()
        for listener in self._listeners:
            listener.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        logger.info(
            "ssdkv node: ended%s", "" if drained else "; writes that did not end in time are lost"
        )
        return drained

    def _join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._threads_lock:
                threads = list(self._threads)
            if not threads:
                return
            with contextlib.suppress(RuntimeError):
                threads[0].join(max(0.0, min(1.0, deadline - time.monotonic())))
        logger.warning("ssdkv node: a connection does not end")


def _store_status(store: HostedStore) -> StoreStatus:
    gauges, _ = store.gauges()
    frames = [host.frames() for host in store.ranks]
    return StoreStatus(
        store.spec.model,
        store.path,
        store.spec.ranks,
        store.spec.block_tokens,
        gauges["ready"] + gauges["free"],
        gauges["ready"],
        gauges["pinned"],
        sum(there for there, _ in frames),
        sum(used for _, used in frames),
        store.geometry.frame_bytes,
    )


def _shared_status(index: SharedIndex) -> StoreStatus:
    gauges, _ = index.gauges()
    return StoreStatus(
        index.spec.model,
        index.path,
        index.spec.ranks,
        index.spec.block_tokens,
        gauges["ready"] + gauges["free"],
        gauges["ready"],
        gauges["pinned"],
        0,
        0,
        0,
    )
