"""Addresses of nodes: ``unix:///path`` and ``tcp://host:port``."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from vllm_ssdkv.base.errors import ConfigError, NodeGoneError

_LONGEST_PATH = 107
"""Bytes of a Unix socket's path; Linux has 108 with the zero at its end."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a node's socket: a path, or a host and a port.

    Example:
        >>> Address.parse("tcp://[::1]:7070")
        Address(path=None, host='::1', port=7070)

    Attributes:
        path: Absolute path of a Unix socket; None for TCP.
        host: Name or IP address, without brackets; empty for a Unix socket.
        port: 0 lets a listener take any free port.
    """

    path: str | None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address as options have it.

        Raises:
            ConfigError: the text is no address; it says what one looks like.
        """
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _no_address(text, str(error)) from None
        if parts.query or parts.fragment or parts.username is not None:
            raise _no_address(text, "it has more than a host and a port, or a path")
        if parts.scheme == "unix":
            return cls._unix(text, parts.netloc, parts.path)
        if parts.scheme != "tcp":
            raise _no_address(text, f"its scheme is {parts.scheme!r}")
        if not host or port is None or parts.path not in {"", "/"}:
            raise _no_address(text, "it needs a host and a port, and no path")
        return cls(None, host, port)

    @classmethod
    def _unix(cls, text: str, netloc: str, path: str) -> Address:
        if netloc or not path.startswith("/") or path.endswith("/") or "\0" in path:
            raise _no_address(text, "it needs an absolute path of a file")
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise _no_address(text, f"its path is longer than {_LONGEST_PATH} bytes")
        return cls(path)

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    def resolve(self) -> list[SocketAddress]:
        """Socket addresses of a TCP address, in the system's order; may ask a name server.

        Raises:
            NodeGoneError: the host has no address.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise NodeGoneError(f"the host of {self} has no address ({error})") from error
        return [SocketAddress(family, address) for family, _, _, _, address in found]


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """One resolved TCP address: family, and the tuple that sockets take."""

    family: int
    address: tuple[Any, ...]

    @property
    def is_loopback(self) -> bool:
        """True if the address never leaves this machine."""
        text = str(self.address[0]).split("%", 1)[0]
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def _no_address(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is no address of a node ({why}); write unix:///run/ssdkv.sock or tcp://host:port"
    )
