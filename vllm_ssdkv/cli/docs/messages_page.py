"""The generated page about messages."""

from __future__ import annotations

from typing import Final

from vllm_ssdkv.cli.docs.doc_pages import NOTICE, table, waits_table
from vllm_ssdkv.cli.explain.catalog import Message, anchors, sections

_INTRO: Final = """\
# Messages

Every error, and every warning in the log, with its cause and cure. `ssdkv explain "MESSAGE"` finds
a message in this list. `…` and words in capitals stand for parts that differ. Each line of the log
begins with time and level; where the engine core is a process of its own, its error is in the log
above vLLM's `root cause above`.

"Computed again" means: the same tokens, later. With `replicas: 2` the other copy is read first, as
long as there is one ([operations.md](operations.md#two-copies)). The metrics are in
[metrics.md](metrics.md).
"""
_WAITS: Final = """\
## Why a request waits

A request may wait for ssdkv before vLLM runs it. `vllm:ssdkv_waits_total` counts by `reason` how
often one began to wait. Requests that wait in vLLM itself, for a running place or KV memory, are in
`vllm:num_requests_waiting`.
"""
_HEADS: Final = {
    "why": "Cause",
    "sees": "Users see",
    "moves": "Metrics",
    "cure": "Cure",
}


def _said(message: Message, anchor: str) -> str:
    texts = ", ".join(f"`{text}`" for text in message.texts)
    note = f" ({message.note})" if texts and message.note else message.note
    return f'<a id="{anchor}"></a>{texts}{note}'


def messages_page() -> str:
    """Text of ``docs/messages.md``."""
    named = iter(anchors())
    parts = [NOTICE, _INTRO]
    for section in sections():
        names = [name for name in _HEADS if any(getattr(m, name) for m in section.messages)]
        rows = []
        for message in section.messages:
            _, anchor = next(named)
            rows.append((_said(message, anchor), *(getattr(message, name) for name in names)))
        parts += [f"## {section.title}", section.intro]
        parts.append(table(("Message", *(_HEADS[name] for name in names)), rows))
    parts += [_WAITS, waits_table()]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"
