"""Engines as vLLM's API server process knows them: their KV, their load, whether they live.

Follows vLLM 0.32; tests/contract pins what is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from prometheus_client import Metric
from vllm.v1.metrics.prometheus import get_prometheus_registry

from vllm_ssdkv.batch.room import KVCache, Load

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient

WAITING: Final = "vllm:num_requests_waiting_by_reason"
RUNNING: Final = "vllm:num_requests_running"
USED: Final = "vllm:kv_cache_usage_perc"
_NAMES: Final = (WAITING, RUNNING, USED)
_FOR_ROOM: Final = "capacity"
"""The reason of requests that wait for a seat or for KV, not for a load of theirs."""


class VllmEngine:
    """A view of the engines behind a client. Any thread may call; :meth:`load` blocks."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._kv = kv_cache(client.vllm_config)

    @property
    def died(self) -> bool:
        """Check whether an engine has ended, and nobody told it to."""
        return bool(self._client.errored) and not is_draining(self._client)

    @property
    def kv(self) -> KVCache | None:
        """The KV of all engines; None: the model has none."""
        return self._kv

    def load(self) -> Load | None:
        """The load by vLLM's own metrics, of all engines; None with ``--disable-log-stats``."""
        return load_of(get_prometheus_registry().restricted_registry(_NAMES).collect())


def is_draining(client: EngineClient) -> bool:
    """Check whether the server was told to end.

    The first thing that ends then are the threads that render prompts; the engine may run on for
    what it has.
    """
    try:
        client.renderer._executor.submit(int)
    except RuntimeError:
        return True
    return False


def load_of(metrics: Iterable[Metric]) -> Load | None:
    """The load that these metrics tell; None: they tell none."""
    found: dict[str, list[float]] = {name: [] for name in _NAMES}
    for metric in metrics:
        for sample in metric.samples if metric.name in found else ():
            if sample.labels.get("reason", _FOR_ROOM) == _FOR_ROOM:
                found[metric.name].append(sample.value)
    if not all(found.values()):
        return None
    used = found[USED]
    return Load(int(sum(found[WAITING])), int(sum(found[RUNNING])), sum(used) / len(used))


def kv_cache(config: VllmConfig) -> KVCache | None:
    """The KV of all engines of a server, in tokens as requests take them.

    ``num_gpu_blocks`` counts blocks that requests share out among groups of layers, and in mode
    ``page`` a request keeps a window of its tokens only. vLLM's ``kv_cache_max_concurrency``, how
    many requests of the longest context fit, takes both into account.
    """
    cache = config.cache_config
    if not cache.num_gpu_blocks or not cache.kv_cache_max_concurrency:
        return None
    longest = config.model_config.max_model_len
    block_tokens = cache.num_gpu_blocks * cache.block_size
    of_a_request = min(longest, block_tokens / cache.kv_cache_max_concurrency)
    engines = config.parallel_config.data_parallel_size
    return KVCache(of_a_request * cache.kv_cache_max_concurrency * engines, of_a_request)
