"""vLLM's own TieringOffloadingManager with our tier, and a GPU that is a dictionary.

The bytes of a chunk depend on its key and on the weights that computed it, so that a chunk of
other tokens or of other weights is seen at once.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.request import Request

from tests.kit.waiting import PATIENCE_S
from vllm_ssdkv.secondary_tier.own_chunks import OwnChunks
from vllm_ssdkv.secondary_tier.tier import SSDKVTier

CHUNK_BYTES = 9 * 4096
BLOCK_TOKENS = 16
STEP_END = ScheduleEndContext((), ())

_engines = itertools.count()


def engine_settings(model: Path) -> VllmConfig:
    """vLLM's configuration of an engine with this model, as far as identity goes."""
    return EngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        skip_tokenizer_init=True,
    ).create_engine_config()


def key_of(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(hashlib.sha256(str(number).encode()).digest(), group)


def content(key: OffloadKey, weights: int = 0) -> NDArray[np.uint8]:
    """KV of a chunk, as these weights compute it."""
    digest = hashlib.blake2b(bytes(key) + bytes([weights]), digest_size=8).digest()
    source = np.random.default_rng(int.from_bytes(digest, "little"))
    return source.integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


def request_of(name: str, lora: LoRARequest | None = None, **more: Any) -> Request:  # noqa: ANN401 - of vLLM's
    return Request(name, [1, 2, 3], SamplingParams(), None, lora_request=lora, **more)


def tier_entry(devices: Sequence[Path], **options: object) -> dict[str, object]:
    """Our entry of ``secondary_tiers``; without devices, for a tier with ``nodes``."""
    own = {
        "devices": [{"path": str(path), "capacity": "16MiB", "weight": 1} for path in devices],
        "dram_gib": "2MiB",
    }
    return {
        "type": "SSDKVTier",
        "module_path": "vllm_ssdkv.secondary_tier",
        **(own if devices else {}),
        **options,
    }


def offloading_config(entry: dict[str, object], chunks: int, **more: Any) -> OffloadingConfig:  # noqa: ANN401 - fields of vLLM's
    fields: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(BLOCK_TOKENS, ("layer.0", "layer.1"), 0),),
        "worker_kv_bytes_per_block": CHUNK_BYTES,
        "enable_kv_cache_events": True,
        "extra_config": {"cpu_bytes_to_use": chunks * CHUNK_BYTES, "secondary_tiers": [entry]},
        "engine_id": f"ssdkv-test-{os.getpid()}-{next(_engines)}",
        "model": OffloadingModelConfig("a model", "float32"),
        "cache": OffloadingCacheConfig(BLOCK_TOKENS, 1),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        "kv_cache_layout": "NHD",
    }
    return OffloadingConfig(**{**fields, **more})


class Engine:
    """An engine's scheduler as far as vLLM's offloading goes, without the rest of it."""

    def __init__(
        self,
        settings: VllmConfig,
        devices: Sequence[Path],
        *,
        chunks: int = 64,
        weights: int = 0,
        config: dict[str, Any] | None = None,
        **options: object,
    ):
        """``weights``: number of what the GPU computes with; ``config``: fields of vLLM's;
        ``options``: of our tier."""
        self.weights = weights
        entry = tier_entry(devices, **options)
        self.config = offloading_config(entry, chunks, **(config or {}))
        spec = TieringOffloadingSpec(self.config)
        self.manager: TieringOffloadingManager = self._manager(spec, settings)
        (tier,) = self.manager.secondary_tiers
        assert isinstance(tier, SSDKVTier)
        self.tier = tier
        view = self.manager.primary_tier.get_kv_memoryview()
        self.pool = np.frombuffer(view, dtype=np.uint8).reshape(chunks, -1)
        self.contexts: dict[str, ReqContext] = {}
        self._numbers = itertools.count()

    def _manager(self, spec: TieringOffloadingSpec, vllm_config: VllmConfig) -> Any:  # noqa: ANN401 - of vLLM's
        """As OffloadingConnectorScheduler makes it, which has ``vllm_config``."""
        return spec.get_manager()

    @property
    def own(self) -> OwnChunks:
        """Chunks of the tier, whose store is in this process."""
        assert isinstance(self.tier.chunks, OwnChunks)
        return self.tier.chunks

    def arrive(self, request: Request) -> ReqContext:
        """A request begins, as OffloadingConnectorScheduler has it begin."""
        context = ReqContext(request.request_id)
        self.manager.on_new_request(context)
        return context

    def begin(self, **more: Any) -> ReqContext:  # noqa: ANN401 - of a request
        """An ordinary request."""
        return self.arrive(request_of(f"r{next(self._numbers)}", **more))

    def end(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def step(self) -> None:
        self.manager.on_schedule_end(STEP_END)

    def settle(self) -> None:
        """Step until no job is under way."""
        deadline = time.monotonic() + PATIENCE_S
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, "a job does not end"
            time.sleep(0.0005)
            self.step()

    def store(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """The GPU has computed chunks; those that vLLM took."""
        prepared = self.manager.prepare_store(keys, context)
        if prepared is None:
            return []
        assert isinstance(prepared.store_spec, CPULoadStoreSpec)
        taken = prepared.keys_to_store
        for key, chunk in zip(taken, prepared.store_spec.chunk_ids, strict=True):
            self.pool[int(chunk)] = content(key, self.weights)
        if taken:
            self.manager.complete_store(taken, context)
        return taken

    def looked_up(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Chunks that are found, once what had to be loaded is there; those of them in vLLM's pool
        have been compared."""
        self.known(lambda: [self.manager.lookup(key, context) for key in keys])
        self.settle()
        found = [key for key in keys if self.in_pool(key, context)]
        if found:
            loads = self.manager.prepare_load(found, context)
            for key, chunk in zip(found, loads.chunk_ids, strict=True):
                np.testing.assert_array_equal(self.pool[int(chunk)], content(key, self.weights))
            self.manager.complete_load(found, context)
        return found

    def compute(self, numbers: range) -> None:
        """A request has these chunks computed and stored."""
        self.store([key_of(number) for number in numbers], self.begin())
        self.settle()

    def recovered(self, numbers: Iterable[int]) -> list[int]:
        """Chunks that the tier finds and loads, with the right bytes, for a request of their own;
        as many at a time as vLLM's pool may hold."""
        found, left, context = [], list(numbers), self.begin()
        while left:
            self.empty_pool()
            part, left = left[: len(self.pool)], left[len(self.pool) :]
            there = set(self.looked_up([key_of(number) for number in part], context))
            found += [number for number in part if key_of(number) in there]
        self.end(context)
        return found

    def in_pool(self, key: OffloadKey, context: ReqContext) -> bool:
        return self.manager.primary_tier.lookup(key, context) is LookupResult.HIT

    def stored(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> set[int]:
        """Positions of chunks that the tier would find, loading nothing."""
        context = context or self.begin()
        answers = self.known(lambda: [self.tier.lookup(key, context) for key in keys])
        return {at for at, answer in enumerate(answers) if answer is LookupResult.HIT}

    def known(self, look: Callable[[], list[LookupResult]]) -> list[LookupResult]:
        """Look up, in as many steps as it takes."""
        deadline = time.monotonic() + PATIENCE_S
        while LookupResult.RETRY in (answers := look()):
            assert time.monotonic() < deadline, "a look-up has no answer"
            time.sleep(0.0005)
            self.step()
        return answers

    def empty_pool(self) -> None:
        """Have nothing in vLLM's pool, as after a restart, without telling the tier."""
        self.settle()
        self.manager.primary_tier.reset_cache()

    def reset(self) -> None:
        """As at sleep, resume and weight updates."""
        self.manager.reset_cache()
        # Since 0.33: nothing is loaded until workers have ended what they were at.
        if flushed := getattr(self.manager, "on_reset_flushed", None):
            flushed()

    def events(self) -> list[OffloadingEvent]:
        """Events of the tier."""
        return list(self.tier.take_events())

    def close(self) -> None:
        del self.pool
        self.manager.shutdown()


@contextmanager
def running(*arguments: Any, **options: Any) -> Iterator[Engine]:  # noqa: ANN401 - of Engine
    engine = Engine(*arguments, **options)
    try:
        yield engine
    finally:
        engine.close()


Run = Callable[..., Any]
