"""Links to several nodes, which are started together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from vllm_ssdkv.base.errors import NodeGoneError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.node_link import START_S, NodeLink
from vllm_ssdkv.node.protocol.messages import Welcome

logger = logging.getLogger(__name__)


class ConnectedShare:
    """Gauge of the nodes that answer, as a share of all. Any thread may tell.

    Example:
        share = ConnectedShare(counters, count=2)
        share.set(0, True)
    """

    def __init__(self, counters: Counters, count: int):
        self._counters, self._connected = counters, [False] * count
        self._lock = threading.Lock()

    def set(self, node: int, connected: bool) -> None:
        """A node answers, or does not any more."""
        with self._lock:
            self._connected[node] = connected
            share = sum(self._connected) / len(self._connected)
            self._counters.set("node_connected", share)


def start_links(links: Sequence[NodeLink], timeout: float = START_S) -> Welcome:
    """Open the first session of each, at the same time; later those that do not answer in time.

    Returns:
        What a node says of its store.

    Raises:
        StoreError: none answers, one refuses, or their frames differ; the text names the way out.
    """
    problems: dict[NodeLink, StoreError] = {}
    welcomes: dict[NodeLink, Welcome] = {}

    def start(link: NodeLink) -> None:
        try:
            welcomes[link] = link.start(timeout).welcome
        except StoreError as error:
            problems[link] = error

    threads = [threading.Thread(target=start, args=(link,), daemon=True) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        for error in problems.values():
            if not welcomes or not isinstance(error.__cause__, NodeGoneError):
                raise error
        _check_alike(welcomes)
    except StoreError:
        for link in welcomes:
            link.close()
        raise
    like = next(iter(welcomes.values()))
    for link, error in problems.items():
        logger.warning("ssdkv: this engine starts without a node of its pool: %s", error)
        link.start_later(like)
    return like


def _check_alike(welcomes: dict[NodeLink, Welcome]) -> None:
    """Check that blocks lie alike on all nodes.

    Raises:
        StoreError: they do not.
    """
    shapes = {link: (w.frame_bytes, w.encrypted) for link, w in welcomes.items()}
    if len(set(shapes.values())) < 2:
        return
    told = ", ".join(
        f"{link.peer.address}: {nbytes} bytes{', encrypted' if encrypted else ''}"
        for link, (nbytes, encrypted) in shapes.items()
    )
    raise StoreError(
        f"nodes: frames differ ({told}): use one release for all nodes, and encryption on all of "
        "them or on none"
    )
