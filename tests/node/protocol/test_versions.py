"""Versions of the protocol: another one for each release that changes a message."""

from __future__ import annotations

import hashlib
import json

import msgspec

from vllm_ssdkv.node.protocol.frames import HEADER, VERSIONS
from vllm_ssdkv.node.protocol.messages import KINDS

FINGERPRINTS = {1: "99252ab172255284"}
"""Fingerprint of the messages of each version."""


def bare(schema: object) -> object:
    """A schema without what people read."""
    if isinstance(schema, dict):
        texts = {"description", "title"} if "type" in schema else set()
        return {name: bare(value) for name, value in schema.items() if name not in texts}
    return [bare(one) for one in schema] if isinstance(schema, list) else schema


def fingerprint() -> str:
    """Everything that both sides must have alike: kinds, fields and their bounds."""
    kinds = {str(kind): message.__name__ for kind, message in sorted(KINDS.items())}
    _, schemas = msgspec.json.schema_components(KINDS.values())
    text = json.dumps([HEADER.format, kinds, bare(schemas)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_messages_of_a_version_do_not_change() -> None:
    """Engines and nodes of two releases then refuse each other in words, see ``negotiate``."""
    assert fingerprint() == FINGERPRINTS.get(VERSIONS[-1]), (
        "messages have changed: if a release has the newest version in VERSIONS, add one there; "
        "then note the fingerprint of the newest"
    )
