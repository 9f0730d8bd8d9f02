"""State of a node of a pool, as its machine sees it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

State: TypeAlias = Literal["serves", "drains", "silent", "stopped", "unknown"]


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node.

    Attributes:
        state: ``serves`` if it answers; ``drains`` if it is about to end; ``silent`` if its process
            lives and does not answer, as at its start; ``unknown`` if its machine cannot be asked.
        pid: Process on its machine; None if there is none, or another user's.
        addresses: Where engines find it.
        problem: What the command could not do with it, and the way out; empty if all went well.

    Example:
        >>> NodeState("a", "local", "stopped").line()
        'a  local  stopped'
    """

    name: str
    host: str
    state: State
    pid: int | None = None
    addresses: tuple[str, ...] = ()
    problem: str = ""

    def line(self) -> str:
        """Text of it for people, without its problem."""
        parts = [self.name, self.host, self.state, *self.addresses]
        return "  ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Values of it for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any], host: str) -> NodeState:
        """The state that ``ssdkv pool`` on another machine printed.

        Raises:
            TypeError, KeyError: it is none.
        """
        values = {**found, "host": host, "addresses": tuple(found["addresses"])}
        return cls(**values)
