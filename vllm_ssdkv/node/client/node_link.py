"""Link to a node: one session at a time, made anew in the background when one has ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from vllm_ssdkv.base.errors import (
    NodeError,
    NodeGoneError,
    NodeRefusedError,
    SSDKVError,
    StoreError,
)
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.session import Peer, Session
from vllm_ssdkv.node.protocol.messages import Welcome, pack_keys
from vllm_ssdkv.store.integrity.store_key import block_name

logger = logging.getLogger(__name__)

START_S: Final = 10.0
"""Wait of an engine's start for its node, in seconds."""

CONNECT_S: Final = 3.0
"""Deadline of each later attempt."""

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Pauses between attempts double from the first to the longest."""

_LOOK_S: Final = 0.05
"""Pause between looks whether a session has ended, in seconds."""


class NodeLink:
    """Keeps a session with one node. Any thread may read :attr:`session`.

    A session that ends is followed by another one as soon as the node answers. What is known of
    slots belongs to one session: whoever uses it looks whether it is still the same.

    Example:
        link = NodeLink(peer, counters, with_bytes=False)
        link.start()
        session = link.session
    """

    def __init__(
        self,
        peer: Peer,
        counters: Counters,
        *,
        with_bytes: bool,
        opened: Callable[[Session], None] | None = None,
        connected: Callable[[bool], None] | None = None,
        pooled: bool = False,
    ):
        """
        Args:
            peer: The node, and this half of the engine.
            counters: Where sessions are counted.
            with_bytes: Whether sessions have a connection for bytes. Those that have ended are
                then closed by whoever uses it.
            opened: Called with each new session before anybody else has it, in the thread that
                opened it; a NodeError of it ends the session.
            connected: Told whether the node answers; None: the gauge says it.
            pooled: Whether the engine has several nodes. Keys are then hidden here, under the key
                of names of each node; those of a single node come as it stores them.
        """
        self.peer = peer
        self._counters, self._with_bytes, self._opened = counters, with_bytes, opened
        self._session: Session | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ssdkv-node-link", daemon=True)
        self._refusal = ""
        self._frames: tuple[int, bool] | None = None
        self._pooled = pooled
        self._name_key: bytes | None = None
        self._connected = connected or self._set_gauge

    def _set_gauge(self, connected: bool) -> None:
        self._counters.set("node_connected", float(connected))

    @property
    def session(self) -> Session | None:
        """The session, while the node answers."""
        found = self._session
        return None if found is None or found.ended else found

    @property
    def name_key(self) -> bytes:
        """The node's key of names; empty before the first session, or where it hides none."""
        return self._name_key or b""

    def start(self, timeout: float = START_S) -> Session:
        """Open the first session, and keep one from now on.

        Raises:
            StoreError: the node does not answer or refuses; the text names address and way out.
        """
        deadline = time.monotonic() + timeout
        pause = FIRST_PAUSE_S
        while True:
            try:
                session = self._open(max(0.1, deadline - time.monotonic()))
                break
            except NodeError as error:
                if not isinstance(error, NodeGoneError) or time.monotonic() + pause > deadline:
                    raise StoreError(
                        f"nodes: the node {self.peer.address} cannot be used: {error}; see that "
                        "it runs (`ssdkv node status`), or leave out the option nodes"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        self._thread.start()
        return session

    def start_later(self, like: Welcome) -> None:
        """Keep trying to open the first session, in the background.

        ``like``: welcome of another node of the pool, whose stores have frames of one size.
        """
        self._frames = (like.frame_bytes, like.encrypted)
        self._connected(False)
        self._thread.start()

    def _open(self, timeout: float) -> Session:
        session = Session.open(self.peer, with_bytes=self._with_bytes, timeout=timeout)
        try:
            self._check(session.welcome)
            if self._opened is not None:
                self._opened(session)
        except BaseException:
            session.close()
            raise
        if self._session is not None and not self._with_bytes:
            self._session.close()
        self._session = session
        self._connected(True)
        return session

    def _check(self, welcome: Welcome) -> None:
        """Refuse a store whose blocks lie otherwise, or have other names, than at the start."""
        frames, name_key = (welcome.frame_bytes, welcome.encrypted), bytes(welcome.name_key)
        if self._frames not in (None, frames) or self._name_key not in (None, name_key):
            raise NodeRefusedError(
                f"the store of the node {self.peer.address} is another one than when this engine "
                "started: start the engine again"
            )
        self._frames, self._name_key = frames, name_key

    def pack_keys(self, keys: Sequence[bytes]) -> bytes:
        """Keys as this node's store names them, for a message.

        Before the first session nobody knows how they are hidden: the names are then those of no
        block.
        """
        if not self._pooled or self._name_key == b"":
            return pack_keys(keys)
        return pack_keys([block_name(self._name_key or b"", key) for key in keys])

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            session = self._session
            if session is not None and not session.ended:
                continue
            self._connected(False)
            if session is not None:
                self._counters.add("node_sessions_lost", 1)
            logger.warning(
                "ssdkv: the node %s does not answer: nothing is found in it or stored until it "
                "does; %s",
                self.peer.address,
                "the other nodes of the pool serve on" if self._pooled else "requests are computed",
            )
            if not self._reconnect():
                return

    def _reconnect(self) -> bool:
        """Open a session; False: the link was closed meanwhile."""
        pause = FIRST_PAUSE_S
        while not self._stopping.wait(pause):
            try:
                self._open(CONNECT_S)
            except SSDKVError as error:
                if str(error) != self._refusal and pause >= LONGEST_PAUSE_S:
                    self._refusal = str(error)
                    logger.warning(
                        "ssdkv: the node %s cannot be reached: %s", self.peer.address, error
                    )
            except Exception:  # whatever it is, the engine must find its node again
                self._counters.add("thread_errors", 1, thread="node")
                logger.exception("ssdkv: connecting to %s failed", self.peer.address)
            else:
                logger.info("ssdkv: the node %s answers again", self.peer.address)
                return True
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return False

    def close(self) -> None:
        """End the session and the thread."""
        self._stopping.set()
        session = self._session
        if session is not None:
            session.end()
        if self._thread.is_alive():
            self._thread.join(CONNECT_S + 1.0)
        for one in (session, self._session):  # the thread may have opened another one meanwhile
            if one is not None:
                one.end()
                if not self._with_bytes:
                    one.close()
        self._connected(False)
