"""Two hosts in one machine: network namespaces with an Ethernet between them.

They need root and the programs ``ip`` and ``tc``; :data:`NO_NAMESPACES` and :data:`NO_NETEM` say
why a test is skipped elsewhere. A socket stays in the namespace of the thread that made it, so both
hosts are threads of one process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

WAIT_S: Final = 30.0
_CLONE_NEWNET = 0x40000000

Result = TypeVar("Result")


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    if ended.returncode:
        raise OSError(f"{' '.join(command)}: {ended.stderr.strip()}")


def enter(namespace: str) -> None:
    """Move this thread to the host with this network namespace."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    failed = ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET)
    os.close(descriptor)
    if failed:
        raise OSError(ctypes.get_errno(), "setns")


@dataclass(frozen=True)
class Host:
    """One network namespace.

    Attributes:
        address: IP address on the Ethernet.
        device: Name of its end of it.
    """

    namespace: str
    address: str
    device: str

    def run(self, work: Callable[[], Result]) -> Result:
        """Do the work in a thread on this host; returns or raises what it does."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def inside() -> None:
            try:
                enter(self.namespace)
                results.append(work())
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join(WAIT_S)
        if errors:
            raise errors[0]
        return results[0]

    def command(self, *command: str) -> None:
        """Run a program on this host."""
        _run("ip", "netns", "exec", self.namespace, *command)

    def set_link(self, state: str) -> None:
        """Plug the cable in (``up``) or out (``down``)."""
        _run("ip", "-n", self.namespace, "link", "set", self.device, state)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with addresses of their own, and a cable."""
    name = f"ssdkv-{os.getpid()}"
    hosts = tuple(
        Host(f"{name}-{letter}", f"10.77.0.{number}", f"ssdkv{letter}")
        for number, letter in enumerate("ab", start=1)
    )
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        a, b = hosts
        end = ("peer", "name", b.device, "netns", b.namespace)
        _run("ip", "link", "add", a.device, "netns", a.namespace, "type", "veth", *end)
        for host in hosts:
            network = ("addr", "add", f"{host.address}/24", "dev", host.device)
            _run("ip", "-n", host.namespace, *network)
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            host.set_link("up")
        yield a, b
    finally:
        for host in hosts:
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", host.namespace)


def _why_no_namespaces() -> str:
    if os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "the programs ip and tc are missing (iproute2)"
    try:
        with two_hosts():
            return ""
    except OSError as error:
        return f"no network namespaces here: {error}"


def _why_no_netem() -> str:
    if NO_NAMESPACES:
        return NO_NAMESPACES
    try:
        with two_hosts() as (a, _):
            a.command("tc", "qdisc", "add", "dev", a.device, "root", "netem", "delay", "1ms")
    except OSError as error:
        return f"this kernel has no netem: {error}"
    return ""


NO_NAMESPACES: Final = _why_no_namespaces()
NO_NETEM: Final = _why_no_netem()
