"""The page-mode worker of this process, as the attention backend finds it.

vLLM builds attention layers without telling them of connectors; a worker process has one engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ssdkv.connector.worker.page_mode import PageMode
    from vllm_ssdkv.connector.worker.worker import SSDKVWorker

_current: list[SSDKVWorker] = []


def set_worker(worker: SSDKVWorker | None) -> None:
    """Make ``worker`` the one whose steps the attention backend serves."""
    _current.clear()
    if worker is not None:
        _current.append(worker)


def worker() -> SSDKVWorker | None:
    """The current worker, or None outside page mode."""
    return _current[0] if _current else None


def page_mode() -> PageMode | None:
    """Page mode of the current worker; None before it has registered vLLM's caches."""
    return _current[0].paged if _current else None
