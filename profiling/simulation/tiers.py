"""Tiers of memory that KV is placed in: the fastest with room is asked first, then those below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import format_size


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory of some size.

    Attributes:
        name: hbm, dram or drives.
        nbytes: That KV may take of it.
    """

    name: str
    nbytes: float


class Tiers:
    """KV of requests, over some tiers.

    Example:
        tiers = Tiers([Tier("hbm", 10e9), Tier("dram", 64e9), Tier("drives", 4e12)])
        tiers.place("request 1", 20e9)
        tiers.parts()
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """``tiers``: the fastest first. Raises ConfigError: none, or one of no size."""
        if not tiers or any(tier.nbytes < 0 for tier in tiers):
            raise ConfigError(f"tiers: got {list(tiers)}; give at least one, of 0 bytes or more")
        self.tiers = tuple(tiers)
        self._used = [0.0] * len(tiers)
        self._most = [0.0] * len(tiers)
        self._placed: dict[str, list[float]] = {}

    @property
    def nbytes(self) -> float:
        """Bytes of all tiers together."""
        return sum(tier.nbytes for tier in self.tiers)

    @property
    def free_bytes(self) -> float:
        """Bytes that nothing uses."""
        pairs = zip(self.tiers, self._used, strict=True)
        return sum(max(0.0, tier.nbytes - used) for tier, used in pairs)

    def check(self, name: str, nbytes: float) -> None:
        """Check that so much would fit if nothing else were there.

        Raises:
            ConfigError: it never will; the text says by how much it is too large.
        """
        if nbytes > self.nbytes:
            parts = ", ".join(f"{tier.name} {format_size(int(tier.nbytes))}" for tier in self.tiers)
            short = format_size(int(nbytes - self.nbytes))
            raise ConfigError(
                f"{name}: KV of {format_size(int(nbytes))} is {short} more than all tiers hold "
                f"({parts}); add drives, or shorten it"
            )

    def place(self, name: str, nbytes: float) -> bool:
        """Take room for KV, in as many tiers as it needs; False, and nothing is taken: no room.

        Raises:
            ConfigError: it is placed already, or see :meth:`check`.
        """
        if name in self._placed:
            raise ConfigError(f"{name}: placed already")
        self.check(name, nbytes)
        parts, left = [], nbytes
        for tier, used in zip(self.tiers, self._used, strict=True):
            parts.append(min(left, max(0.0, tier.nbytes - used)))
            left -= parts[-1]
        if left > nbytes * 1e-12:
            return False
        self._placed[name] = parts
        for index, part in enumerate(parts):
            self._used[index] += part
            self._most[index] = max(self._most[index], self._used[index])
        return True

    def grow(self, names: Sequence[str], nbytes: float) -> bool:
        """Take so much more for each of these; False, and nothing is taken: no room for all."""
        if nbytes * len(names) > self.free_bytes:
            return False
        for name in names:
            left, parts = nbytes, self._placed[name]
            for index, tier in enumerate(self.tiers):
                part = min(left, max(0.0, tier.nbytes - self._used[index]))
                parts[index] += part
                self._used[index] += part
                self._most[index] = max(self._most[index], self._used[index])
                left -= part
        return True

    def free(self, name: str) -> None:
        """Give back what a request has. Lower tiers keep what they have: nothing moves up."""
        for index, part in enumerate(self._placed.pop(name)):
            self._used[index] -= part

    def parts(self) -> dict[str, float]:
        """Part of all placed KV that lies in each tier."""
        total = sum(self._used)
        return {
            tier.name: used / total if total > 0 else 0.0
            for tier, used in zip(self.tiers, self._used, strict=True)
        }

    def most(self) -> dict[str, float]:
        """Most bytes that were used of each tier."""
        return {tier.name: most for tier, most in zip(self.tiers, self._most, strict=True)}
