"""Keys of the table's cases as an engine computes them, without starting engines.

Each start is configured, and its model loaded, by vLLM itself, in this one process. What comes of
it is printed as JSON: [of the first start, of the second] by the name of the case. A process of its
own: the plugin has torch tell which module holds which, before any model is made.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request
from vllm.v1.worker.cpu import shm  # noqa: F401 - lets vLLM load models without a GPU

from tests.e2e.identity_table import CASES, Start, as_in_a_new_process
from vllm_ssdkv.connector.identity.kv_settings import kv_settings
from vllm_ssdkv.connector.identity.loaded_model import LoadedAdapters, LoadedModel
from vllm_ssdkv.connector.identity.weight_files import digest_of_files
from vllm_ssdkv.connector.messages import RankReport
from vllm_ssdkv.connector.scheduler.block_keys import BlockKeys
from vllm_ssdkv.connector.scheduler.identities import RankIdentities
from vllm_ssdkv.plugin import register

_BLOCK = 32
_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "block_size": _BLOCK,
    "enforce_eager": True,
}


class Probe:
    """A model that vLLM has loaded as a worker does."""

    def __init__(self, config: VllmConfig):
        self._config = config
        self._model = get_model(vllm_config=config)
        modules = config.compilation_config.static_forward_context.values()
        layers = [module for module in modules if isinstance(module, AttentionLayerBase)]
        self._loras: LRUCacheWorkerLoRAManager | None = None
        if config.lora_config is not None:
            embeddings = self._model.embedding_modules
            self._loras = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), embeddings)
            self._model = self._loras.create_lora_manager(self._model, config)
        self._loaded = LoadedModel(layers, functools.partial(digest_of_files, config))
        self._weights = self._loaded.digest().digest
        self._adapters = LoadedAdapters(self._loaded.roots)

    def add_adapter(self, adapter: LoRARequest) -> None:
        """Load an adapter unless it is loaded, as a request does too."""
        assert self._loras is not None
        self._loras.add_adapter(adapter)

    def reload(self, weights: Path) -> None:
        """Load other weights."""
        reload_weights(self._config, self._model, None, str(weights), True)

    def keys(self, adapter: LoRARequest | None) -> str:
        """Of a request's blocks, as its scheduler has them, when ranks have told what they hold."""
        if self._loaded.changed():
            self._weights = self._loaded.digest().digest
        ranks = RankIdentities(kv_settings(self._config, "NHD", chooses=False), [self._weights])
        if adapter is not None:
            self.add_adapter(adapter)
            ranks.told([(0, RankReport(adapters=self._adapters.take_changes()))])
        request = Request(
            "a",
            [5] * 3 * _BLOCK,
            SamplingParams(),
            None,
            lora_request=adapter,
            block_hasher=get_request_block_hasher(_BLOCK, sha256),
        )
        keys = BlockKeys(ranks.namespace, adapter=ranks.adapter_digest).of(request)
        return b"".join(keys).hex()


def keys_of(start: Start) -> str:
    """Of the request of a start."""
    config = EngineArgs(model=str(start.model), **{**_OPTIONS, **start.options})
    made = config.create_engine_config()
    with as_in_a_new_process(start), set_current_vllm_config(made):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{start.model.parent}/group", 0, "gloo")
            initialize_model_parallel(1, 1)
        probe = Probe(made)
        start.within(probe)
        return probe.keys(start.adapter)


def main(root: Path) -> None:
    """Walk the table."""
    register()
    init_none_hash(sha256)
    torch.set_num_threads(1)
    found = {}
    for number, case in enumerate(CASES):
        place = root / str(number)
        place.mkdir()
        first = case.start(place)
        before = keys_of(first)
        found[case.name] = [before, keys_of(case.then(first))]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
