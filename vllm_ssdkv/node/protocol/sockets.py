"""Connecting to nodes and listening for engines, with keys wherever bytes leave the machine."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import time
from pathlib import Path
from typing import Any

from vllm_ssdkv.base.errors import CredentialsError, NodeError, NodeGoneError
from vllm_ssdkv.base.node_address import Address, SocketAddress
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.streams import PlainStream, TlsStream

_BACKLOG = 128
_UNIX_BUFFER_BYTES = 4 << 20
"""Asked for; the system gives what ``net.core.wmem_max`` allows."""


def connect(address: Address, credentials: Credentials | None, timeout: float) -> Channel:
    """Connect to a node, and exchange keys where there are some.

    Args:
        credentials: For TCP; None: only to this machine. Unix sockets use none.
        timeout: Seconds for all of it; a name server's answer comes on top.

    Raises:
        CredentialsError: the address is another machine's, and there are no keys.
        NodeGoneError: nobody answers there.
        NodeRefusedError: one side does not take the other's certificate.
    """
    deadline = time.monotonic() + timeout
    if address.path is not None:
        return _connect_unix(address, address.path, deadline)
    failed: NodeError = NodeGoneError(f"{address} has no address")
    for resolved in address.resolve():
        check_credentials(address, resolved, credentials)
        try:
            return _connect_tcp(address, resolved, credentials, deadline)
        except NodeGoneError as error:
            failed = error
    raise failed


def check_credentials(
    address: Address, resolved: SocketAddress, credentials: Credentials | None
) -> None:
    """Refuse to use a network without keys.

    Raises:
        CredentialsError: the address is not this machine's own, and there are no keys.
    """
    if credentials is None and not resolved.is_loopback:
        raise CredentialsError(
            f"{address} is not an address of this machine alone ({resolved.address[0]}), and "
            "there are no keys; make some with `ssdkv node keys DIR` and set them for the node and "
            "for its engines, or use a Unix socket or 127.0.0.1"
        )


def _connect_unix(address: Address, path: str, deadline: float) -> Channel:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _connect(sock, path, str(address), deadline)
    except NodeError:
        sock.close()
        raise
    return _unix_channel(sock, str(address))


def _connect_tcp(
    address: Address, resolved: SocketAddress, credentials: Credentials | None, deadline: float
) -> Channel:
    sock = socket.socket(resolved.family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _connect(sock, resolved.address, str(address), deadline)
        channel = _tcp_channel(sock, str(address), credentials, server=False)
    except NodeError:
        sock.close()
        raise
    try:
        channel.handshake(max(0.0, deadline - time.monotonic()))
    except NodeError:
        channel.close()
        raise
    return channel


def _connect(
    sock: socket.socket, target: str | tuple[Any, ...], name: str, deadline: float
) -> None:
    """Connect a socket; its queue may be full on a Unix socket, which is no event to wait for."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NodeGoneError(f"{name} did not answer until the deadline")
        sock.settimeout(left)
        try:
            sock.connect(target)
        except BlockingIOError:
            time.sleep(min(left, 0.02))
        except TimeoutError:
            continue
        except OSError as error:
            raise NodeGoneError(f"nobody answers at {name} ({error})") from error
        else:
            return


def _unix_channel(sock: socket.socket, peer: str) -> Channel:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
    return Channel(PlainStream(sock, peer), peer, is_unix=True)


def _tcp_channel(
    sock: socket.socket, peer: str, credentials: Credentials | None, *, server: bool
) -> Channel:
    """Channel on a connected TCP socket. Buffers are the system's, which grow by themselves."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise NodeGoneError(f"the connection to {peer} is broken ({error})") from error
    if credentials is None:
        return Channel(PlainStream(sock, peer), peer, is_unix=False)
    context = credentials.context(server=server)
    return Channel(TlsStream(sock, peer, context, server=server), peer, is_unix=False)


class Listener:
    """Socket of a node. One thread accepts; any thread may call :meth:`stop`.

    Args:
        mode: Of a Unix socket's file: who may write it may connect.

    Attributes:
        address: Where it listens, with the port that was chosen for port 0.

    Example:
        listener = Listener(Address.parse("unix:///run/ssdkv.sock"), None)
        while (channel := listener.accept()) is not None:
            serve_in_a_thread(channel)

    Raises:
        CredentialsError: the address is not this machine's own, and there are no keys.
        NodeError: another node listens there, or the address cannot be had.
    """

    def __init__(
        self, address: Address, credentials: Credentials | None, *, mode: int = 0o600
    ) -> None:
        self._credentials = credentials if address.path is None else None
        self._stopped, self._stop = os.pipe2(os.O_CLOEXEC)
        self._inode: tuple[int, int] | None = None
        try:
            if address.path is not None:
                self._socket = self._listen_unix(address, address.path, mode)
                self.address = address
            else:
                self._socket = _listen_tcp(address, credentials)
                self.address = Address(None, address.host, self._socket.getsockname()[1])
        except NodeError:
            self._close_pipe()
            raise
        self._socket.setblocking(False)

    def _listen_unix(self, address: Address, path: str, mode: int) -> socket.socket:
        _remove_stale(address, path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # The file has the socket's mode from its first moment; the process's umask is not
            # touched, because it belongs to all threads.
            os.fchmod(sock.fileno(), mode & 0o600)
            sock.bind(path)
            Path(path).chmod(mode)
            found = os.stat(path)
            self._inode = (found.st_dev, found.st_ino)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            raise NodeError(f"cannot listen at {address} ({error})") from error
        return sock

    def accept(self) -> Channel | None:
        """Wait for an engine; None after :meth:`stop`.

        The caller does the channel's handshake, in another thread than this one.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._stopped, select.POLLIN)
        while True:
            ready = poll.poll()
            if any(descriptor == self._stopped for descriptor, _ in ready):
                return None
            try:
                sock, source = self._socket.accept()
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    # The engine waits in the queue; accepting at once again would only spin.
                    time.sleep(0.1)
                continue
            with contextlib.suppress(NodeError):
                return self._channel(sock, source)
            sock.close()

    def _channel(self, sock: socket.socket, source: object) -> Channel:
        if self.address.path is not None:
            return _unix_channel(sock, str(self.address))
        host, port = source[:2] if isinstance(source, tuple) else ("", 0)
        peer = str(Address(None, host, port))
        return _tcp_channel(sock, peer, self._credentials, server=True)

    def stop(self) -> None:
        """Let :meth:`accept` return None; any number of times."""
        with contextlib.suppress(OSError):
            os.write(self._stop, b"\0")

    def close(self) -> None:
        """Give the address back, once, after the last :meth:`accept`."""
        self._socket.close()
        self._close_pipe()
        path = self.address.path
        if path is not None:
            with contextlib.suppress(OSError):
                found = os.stat(path)
                # Not that of another node which came after.
                if (found.st_dev, found.st_ino) == self._inode:
                    os.unlink(path)

    def _close_pipe(self) -> None:
        os.close(self._stopped)
        os.close(self._stop)


def _remove_stale(address: Address, path: str) -> None:
    """Remove the socket that a killed node left behind."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise NodeError(f"{path} is there and is no socket; choose another address")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(1)
            sock.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    except OSError as error:
        raise NodeError(f"cannot listen at {address} ({error})") from error
    raise NodeError(f"another node listens at {address}; stop it, or choose another address")


def _listen_tcp(address: Address, credentials: Credentials | None) -> socket.socket:
    resolved = address.resolve()[0]
    check_credentials(address, resolved, credentials)
    sock = socket.socket(resolved.family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(resolved.address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise NodeError(f"cannot listen at {address} ({error})") from error
    return sock
