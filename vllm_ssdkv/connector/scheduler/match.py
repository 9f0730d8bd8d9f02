"""The answer to vLLM's question how much of a request the store holds."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ssdkv.base.wait_reason import WaitReason


@dataclass(frozen=True, slots=True)
class Wait:
    """The request cannot run yet: vLLM asks again."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing is loaded; the request may run."""


@dataclass(frozen=True, slots=True)
class Hit:
    """So many ``tokens``, at least one block, are loaded before the request runs."""

    tokens: int


Match = Wait | Miss | Hit
"""One of the three. ``connector.py`` translates it into vLLM's protocol."""
