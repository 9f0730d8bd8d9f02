"""Routes the log of this package in vLLM's processes."""

from __future__ import annotations

import logging


def show_log() -> None:
    """Send this package's log the way of vLLM's own, at its level. Idempotent.

    Most of the package does not know vLLM and logs to ``vllm_ssdkv``, which nobody configures.
    """
    ours, theirs = logging.getLogger("vllm_ssdkv"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
