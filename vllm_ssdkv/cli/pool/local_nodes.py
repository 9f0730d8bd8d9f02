"""Nodes of a pool on this machine: processes that outlive the command that starts them.

A node holds its file of options open on the node's side (``node/shared_files.py``) from before it
starts until its process ends, however that ends. So whether it runs is never a guess by a number in
a file, and its options cannot change under it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import yaml

from vllm_ssdkv.base.errors import NodeError, PoolError, SharedFileError
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.cli.node.status import ask_status
from vllm_ssdkv.cli.pool.node_state import NodeState, State
from vllm_ssdkv.config.pool import LOCAL, PoolConfig, PooledNode
from vllm_ssdkv.node.shared_files import SharedFiles

OWN_PROGRAM: Final = (sys.executable, "-P", "-m", "vllm_ssdkv.cli.main")
OPTIONS_FILE: Final = "node.yaml"
_LOG: Final = "node.log"
_MOST_LOG: Final = 16 * MIB
_TAIL_LINES: Final = 20
_POLL_S: Final = 0.2
_ANSWER_S: Final = 3.0
_KILLED_S: Final = 30.0


class LocalNodes:
    """Some nodes of a pool, all on this machine. One thread.

    Attributes:
        nodes: Those that are meant.

    Example:
        >>> nodes = LocalNodes(pool, pool.nodes)
        >>> nodes.up(patience_s=120)
        [NodeState(name='a', host='local', state='serves', ...)]
    """

    def __init__(
        self,
        pool: PoolConfig,
        nodes: Sequence[PooledNode],
        program: Sequence[str] = OWN_PROGRAM,
    ) -> None:
        self.nodes = nodes
        self._pool = pool
        self._program = program

    def up(self, patience_s: float) -> list[NodeState]:
        """Start those that do not run, and wait until all serve. Blocks for ``patience_s``.

        One that runs with the same options is left as it is, with others it is a problem.
        """
        problems = {node.name: self._start(node) for node in self.nodes}
        deadline = time.monotonic() + patience_s
        return [
            self._state(node, problems[node.name] or self._await_service(node, deadline))
            for node in self.nodes
        ]

    def status(self) -> list[NodeState]:
        """Ask all of them. Blocks for some seconds if one is silent."""
        return [self._state(node) for node in self.nodes]

    def drain(self, patience_s: float) -> list[NodeState]:
        """Send SIGTERM to all, and wait for their ends. Blocks for ``patience_s``."""
        return self._end(patience_s, by_force=False)

    def down(self, patience_s: float) -> list[NodeState]:
        """Drain all, then kill those that have not ended. What is durable stays."""
        return self._end(patience_s, by_force=True)

    def _start(self, node: PooledNode) -> str:
        """Start it where it does not run. Returns what is wrong, or nothing."""
        options = self._pool.options_of(node)
        text = yaml.safe_dump(options, sort_keys=False).encode()
        try:
            for folder in (self._folder(node), self._shared(node).directory):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._runs(node):
                return self._same_options(node, text)
            self._shared(node).write(OPTIONS_FILE, text)
            self._spawn(node)
        except (SharedFileError, PoolError, OSError) as error:
            return str(error)
        return ""

    def _same_options(self, node: PooledNode, text: bytes) -> str:
        if (self._shared(node).directory / OPTIONS_FILE).read_bytes() == text:
            return ""
        return f"it runs with other options: ssdkv pool drain {node.name}, then up"

    def _spawn(self, node: PooledNode) -> None:
        """Start its process in a session of its own, which inherits the lock on its options."""
        log = self._folder(node) / _LOG
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > _MOST_LOG:
                log.rename(log.with_suffix(".log.1"))
        node_side = SharedFiles(self._shared(node).directory, "node")
        options = node_side.directory / OPTIONS_FILE
        command = [*self._program, "node", "run", "--config", str(options)]
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with node_side.open(OPTIONS_FILE) as held:
                os.set_inheritable(held, True)
                actions = [
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, out, 1),
                    (os.POSIX_SPAWN_DUP2, out, 2),
                ]
                program = command[0]
                os.posix_spawnp(program, command, os.environ, file_actions=actions, setsid=True)
        finally:
            os.close(out)

    def _await_service(self, node: PooledNode, deadline: float) -> str:
        """Wait until it answers. Returns what is wrong, or nothing."""
        while self._runs(node):
            if self._condition(node) == "serves":
                return ""
            if time.monotonic() >= deadline:
                return f"it does not answer in time: see {self._folder(node) / _LOG}"
            time.sleep(_POLL_S)
        return f"it ended: {self._last_words(node)}"

    def _end(self, patience_s: float, *, by_force: bool) -> list[NodeState]:
        signals = [signal.SIGTERM, signal.SIGKILL] if by_force else [signal.SIGTERM]
        problems: dict[str, str] = {}
        for number in signals:
            left = [node for node in self.nodes if self._runs(node)]
            problems |= {node.name: self._send(node, number) for node in left}
            limit_s = _KILLED_S if number == signal.SIGKILL else patience_s
            _wait(lambda: not any(map(self._runs, self.nodes)), limit_s)
        found = []
        for node in self.nodes:
            problem = problems.get(node.name, "") if self._runs(node) else ""
            if self._runs(node) and not problem:
                problem = "it has not ended in time: ask again, or ssdkv pool down"
            found.append(self._state(node, problem))
        return found

    def _send(self, node: PooledNode, number: int) -> str:
        pid = self._pid(node)
        if pid is None:
            return "it runs as another user: ask as that one"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return ""

    def _state(self, node: PooledNode, problem: str = "") -> NodeState:
        listen = self._pool.options_of(node)["listen"]
        addresses = tuple(map(str, listen)) if isinstance(listen, list) else ()
        runs = self._runs(node)
        return NodeState(
            name=node.name,
            host=LOCAL,
            state=self._condition(node) if runs else "stopped",
            pid=self._pid(node) if runs else None,
            addresses=addresses,
            problem=problem,
        )

    def _folder(self, node: PooledNode) -> Path:
        return Path(self._pool.directory or "") / node.name

    def _shared(self, node: PooledNode) -> SharedFiles:
        return SharedFiles(self._folder(node) / "shared", "host")

    def _runs(self, node: PooledNode) -> bool:
        return self._shared(node).references(OPTIONS_FILE).node > 0

    def _condition(self, node: PooledNode) -> State:
        """Condition of a node whose process lives, as it tells it."""
        try:
            address = Address.parse(self._pool.control_address(node))
            found = ask_status(address, None, _ANSWER_S)
        except NodeError:
            return "silent"
        return "drains" if found.draining else "serves"

    def _pid(self, node: PooledNode) -> int | None:
        """The process that leads a session and has the options open; None if none is to be seen."""
        try:
            options = os.stat(self._shared(node).directory / OPTIONS_FILE)
        except FileNotFoundError:
            return None
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            with contextlib.suppress(OSError):
                if os.getsid(pid) == pid and _has_open(folder / "fd", options):
                    return pid
        return None

    def _last_words(self, node: PooledNode) -> str:
        log = self._folder(node) / _LOG
        with contextlib.suppress(OSError):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join(["", *lines[-_TAIL_LINES:]])
        return f"{log} cannot be read"


def _has_open(descriptors: Path, file: os.stat_result) -> bool:
    for descriptor in descriptors.iterdir():
        with contextlib.suppress(OSError):
            if os.path.samestat(descriptor.stat(), file):
                return True
    return False


def _wait(is_done: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
