"""Byte streams of connections, plain and TLS: whatever goes without waiting, and waits apart.

Sockets never block. One thread may read and another write at a time.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_ssdkv.base.errors import NodeGoneError, NodeRefusedError
from vllm_ssdkv.node.protocol.frames import MOST_DESCRIPTORS

_MOST_VIEWS = 512
"""Buffers of one ``sendmsg``; Linux takes 1024."""

_TLS_PIECE = 1 << 20
"""Bytes that one call of a TLS stream is given; its lock is held no longer."""

_ROOM_FOR_DESCRIPTORS = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)


class Stream(Protocol):
    """Bytes in order to and from one peer.

    ``send`` and ``receive`` move what goes at once and return the number of bytes. They raise
    :class:`WouldBlockError` where nothing does, and NodeGoneError where the connection is broken.
    """

    def send(self, views: Sequence[memoryview], descriptors: Sequence[int]) -> int: ...

    def receive(self, into: memoryview) -> int: ...

    def receive_first(self, into: memoryview) -> tuple[int, list[int]]:
        """Receive the first bytes of a frame, and the file descriptors that come with them."""
        ...

    def wait(self, blocked: WouldBlockError, *, sending: bool, deadline: float) -> None:
        """Wait until what blocked may go on.

        Raises:
            NodeGoneError: it did not until ``deadline``, of ``time.monotonic``.
        """
        ...

    def peer_left(self) -> bool:
        """Check whether the other side has ended the connection, however much is unread. Never
        blocks."""
        ...

    def shutdown_sending(self) -> None: ...

    def abort(self) -> None:
        """End both directions; whoever waits here is woken. Any thread, any number of times."""
        ...

    def close(self) -> None:
        """Give the socket back; nobody else uses the stream."""
        ...


class WouldBlockError(Exception):
    """Nothing can be moved now; ``event`` of ``select.poll`` says when to try again."""

    def __init__(self, event: int):
        super().__init__()
        self.event = event


class PlainStream:
    """Unix or TCP socket without encryption."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._takes_descriptors = sock.family == socket.AF_UNIX
        self._peer = peer
        self._waits = _Waits(sock, peer)

    def send(self, views: Sequence[memoryview], descriptors: Sequence[int]) -> int:
        control = []
        if descriptors:
            rights = array.array("i", descriptors)
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        try:
            return self._socket.sendmsg(views[:_MOST_VIEWS], control, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise WouldBlockError(select.POLLOUT) from None
        except OSError as error:
            raise _gone(self._peer, error) from error

    def receive(self, into: memoryview) -> int:
        try:
            return self._socket.recv_into(into)
        except BlockingIOError:
            raise WouldBlockError(select.POLLIN) from None
        except OSError as error:
            raise _gone(self._peer, error) from error

    def receive_first(self, into: memoryview) -> tuple[int, list[int]]:
        if not self._takes_descriptors:
            return self.receive(into), []
        try:
            count, control, _, _ = self._socket.recvmsg_into(
                [into], _ROOM_FOR_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            raise WouldBlockError(select.POLLIN) from None
        except OSError as error:
            raise _gone(self._peer, error) from error
        descriptors = array.array("i")
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        return count, descriptors.tolist()

    def wait(self, blocked: WouldBlockError, *, sending: bool, deadline: float) -> None:
        self._waits.wait(blocked.event, sending=sending, deadline=deadline)

    def peer_left(self) -> bool:
        return self._waits.peer_left()

    def shutdown_sending(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self._socket.close()


class TlsStream:
    """TCP socket with TLS 1.3; :meth:`handshake` comes first.

    OpenSSL's connection is no thread's own: a lock is held for each call, which never blocks.
    """

    def __init__(
        self, sock: socket.socket, peer: str, context: ssl.SSLContext, *, server: bool
    ) -> None:
        sock.setblocking(False)
        self._peer = peer
        self._lock = threading.Lock()
        self._tls = context.wrap_socket(
            sock, server_side=server, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        self._waits = _Waits(self._tls, peer)

    def handshake(self, deadline: float) -> None:
        """Exchange keys.

        Raises:
            NodeRefusedError: one side does not take the other's certificate.
            NodeGoneError: the other side did not answer until ``deadline``, or speaks no TLS.
        """
        while True:
            try:
                with self._lock:
                    self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._waits.wait(select.POLLIN, sending=True, deadline=deadline)
            except ssl.SSLWantWriteError:
                self._waits.wait(select.POLLOUT, sending=True, deadline=deadline)
            except (ssl.SSLEOFError, ConnectionError) as error:
                raise NodeGoneError(
                    f"{self._peer} ended the exchange of keys ({error}); both sides need keys"
                ) from error
            except OSError as error:
                raise _tls_failed(self._peer, error) from error
            else:
                return

    def send(self, views: Sequence[memoryview], descriptors: Sequence[int]) -> int:
        if descriptors:
            raise ValueError("descriptors go through Unix sockets only")
        return self._attempt(lambda: self._tls.send(views[0][:_TLS_PIECE]))

    def receive(self, into: memoryview) -> int:
        return self._attempt(lambda: self._tls.recv_into(into[:_TLS_PIECE]))

    def receive_first(self, into: memoryview) -> tuple[int, list[int]]:
        return self.receive(into), []

    def _attempt(self, operation: Callable[[], int]) -> int:
        try:
            with self._lock:
                return operation()
        except ssl.SSLWantReadError:
            raise WouldBlockError(select.POLLIN) from None
        except ssl.SSLWantWriteError:
            raise WouldBlockError(select.POLLOUT) from None
        except (OSError, ValueError) as error:
            raise _tls_failed(self._peer, error) from error

    def wait(self, blocked: WouldBlockError, *, sending: bool, deadline: float) -> None:
        self._waits.wait(blocked.event, sending=sending, deadline=deadline)

    def peer_left(self) -> bool:
        return self._waits.peer_left()

    def shutdown_sending(self) -> None:
        """Nothing: half of a TLS connection cannot be ended."""

    def abort(self) -> None:
        # The method of SSLSocket would drop the TLS state under a thread that uses it.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        with self._lock:
            self._tls.close()


class _Waits:
    """Waits for a socket, one thread for each direction."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._descriptor = sock.fileno()
        self._peer = peer
        self._polls = {True: select.poll(), False: select.poll()}

    def wait(self, event: int, *, sending: bool, deadline: float) -> None:
        """Wait until ``event``, or an end of the connection, or ``deadline``."""
        poll = self._polls[sending]
        poll.register(self._descriptor, event)
        while (left := deadline - time.monotonic()) > 0:
            # Rounded up: a wait of 0 ms would spin.
            if poll.poll(min(left * 1000 + 1, _LONGEST_POLL_MS)):
                return
        done = "took nothing" if sending else "sent nothing"
        raise NodeGoneError(f"{self._peer} {done} until the deadline")

    def peer_left(self) -> bool:
        """Check whether the other side has ended the connection."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLRDHUP)
        return bool(poll.poll(0))


_LONGEST_POLL_MS = 1_000_000


def _gone(peer: str, error: OSError) -> NodeGoneError:
    return NodeGoneError(f"the connection to {peer} is broken ({error})")


def _tls_failed(peer: str, error: OSError | ValueError) -> NodeGoneError | NodeRefusedError:
    """Error for a TLS call that failed, by its cause."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return NodeRefusedError(
            f"the certificate of {peer} is not taken ({error.verify_message}); keys of both "
            "sides come from one call of `ssdkv node keys`"
        )
    reason = getattr(error, "reason", None) or ""
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return NodeRefusedError(
            f"{peer} does not take our certificate ({reason.lower().replace('_', ' ')}); keys of "
            "both sides come from one call of `ssdkv node keys`"
        )
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return NodeGoneError(f"no TLS with {peer} ({reason or error}); both sides need keys")
    return NodeGoneError(f"the connection to {peer} is broken ({error})")
