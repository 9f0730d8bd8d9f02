"""Fingerprint of KV: all that must be equal for it to mean the same numbers, but for its tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllm_ssdkv.base.errors import FormatError

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Named facts about the KV in a store. Immutable; safe from any thread.

    Attributes:
        fields: Name to string or integer, e.g. ``{"model": "...", "dtype": "bfloat16",
            "layers": 32, "block_size": 16}``. A read-only copy is kept.

    Raises:
        ValueError: a name or value is of another type (bool and float included: they have more
            than one spelling, and a digest needs one).
    """

    fields: Mapping[str, str | int]

    def __post_init__(self) -> None:
        for name, value in self.fields.items():
            if not isinstance(name, str) or type(value) not in (str, int):
                raise ValueError(f"fingerprint field {name!r} is {value!r}, not text or integer")
        object.__setattr__(self, "fields", MappingProxyType(dict(self.fields)))

    def __reduce__(self) -> tuple[type[Fingerprint], tuple[dict[str, str | int]]]:
        return Fingerprint, (dict(self.fields),)  # a mapping proxy does not pickle

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def canonical(self) -> bytes:
        """Canonical JSON: names sorted, no spaces, ASCII. The digest is taken over this."""
        return json.dumps(
            dict(self.fields), sort_keys=True, separators=(",", ":"), ensure_ascii=True
        ).encode("ascii")

    @property
    def digest(self) -> bytes:
        """blake2b of :attr:`canonical`, 16 bytes."""
        return hashlib.blake2b(self.canonical, digest_size=DIGEST_BYTES).digest()

    @classmethod
    def from_json(cls, data: bytes) -> Fingerprint:
        """Parse JSON as written by :attr:`canonical`.

        Raises:
            FormatError: it is not a JSON object of texts and integers.
        """
        try:
            fields = json.loads(data)
            if not isinstance(fields, dict):
                raise FormatError(f"fingerprint is a JSON {type(fields).__name__}, not an object")
            return cls(fields)
        except (ValueError, RecursionError) as exc:
            raise FormatError(f"fingerprint is not readable: {exc}") from exc

    def differences(self, other: Fingerprint) -> list[str]:
        """One line per field that differs, sorted: ``name: mine != theirs``; empty when equal."""
        absent = "(absent)"
        return [
            f"{name}: {self.fields.get(name, absent)!r} != {other.fields.get(name, absent)!r}"
            for name in sorted({*self.fields, *other.fields})
            if self.fields.get(name) != other.fields.get(name)
        ]
