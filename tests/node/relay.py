"""A stretch of network between engines and a node, on which bytes are late, stand still, or end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Final

_CHUNK: Final = 1 << 18
_LOOK_S: Final = 0.02


class Relay:
    """Passes connections on from a port of this host to another one. Any thread may call.

    Attributes:
        address: That engines are given.
        delay_s: Time by which each stretch of bytes is late, in seconds.
        hung: Set: nothing is passed on, and nobody is told.

    Example:
        >>> with Relay(7070) as relay:
        ...     relay.address.startswith("tcp://127.0.0.1:")
        True
    """

    def __init__(self, port: int):
        """``port``: of a node on this host; it need not listen yet."""
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay_s = 0.0
        self.hung = threading.Event()
        self._refuses = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections, and every new one, until :meth:`mend`."""
        self._refuses.set()
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Pass on everything at once."""
        self.delay_s = 0.0
        self.hung.clear()
        self._refuses.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._port), 5.0)
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self._open |= {near, far}
                if self._refuses.is_set():
                    self.cut()
                far.settimeout(None)
                for source, target in ((near, far), (far, near)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass_on, args=(source, target)).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                time.sleep(self.delay_s)
                while self.hung.is_set() and not self._closed:
                    time.sleep(_LOOK_S)
                target.sendall(data)
        # The other direction ends with this one; whoever is second closes both.
        with self._lock:
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.discard(source)
            if target not in self._open:
                source.close()
                target.close()
