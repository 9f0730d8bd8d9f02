"""One vLLM engine for a test: started with small limits, stepped, observed and ended properly.

Most engines run inside the test process (``in_process``): the code is the same, they start in a
few seconds because vLLM is imported once, and the test can look at vLLM's scheduler and block pool.
The others are what a user gets: an engine core and one worker process per rank.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from tests.kit.forks import environment, forked_spawns
from vllm_ssdkv.connector.metrics import stats_collector
from vllm_ssdkv.store.devices import throughput

IDLE_DEADLINE_S = 300.0
MAX_TOKENS = 40

Tokens = list[int]


@dataclass(frozen=True)
class Answer:
    """What came out of one request. ``logprobs[i]`` maps tokens to log-probabilities."""

    tokens: tuple[int, ...]
    cached: int
    logprobs: tuple[dict[int, float], ...] = field(default=(), compare=False)


def token_bytes(model: Path, dtype: str) -> int:
    """Bytes of K and V of one token in all layers, without tensor parallelism."""
    config = json.loads((model / "config.json").read_text())
    config = config.get("text_config", config)
    heads = config.get("num_attention_heads") or config["n_head"]  # Bloom's name
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    width = {"float32": 4, "bfloat16": 2, "float16": 2}.get(dtype, 1)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    return int(layers * kv_heads * head_dim * 2 * width)


class Shared:
    """What vLLM does anew for each engine of a process, and need not: most of a start's time.

    It has the garbage collector look at every object of every module several times, and looks for
    kernels to replace in every module, replaced or not.
    """

    def __init__(self) -> None:
        self._freeze = gc.freeze
        self._replace_kernels = current_platform.register_triton_kernel_overrides
        self._modules = 0
        self._starts = 0
        atexit.register(gc.unfreeze)
        replaced = {"register_triton_kernel_overrides": self.replace_kernels}
        for place, changes in (
            (type(current_platform), replaced),
            (gc, dict.fromkeys(("freeze", "unfreeze"), lambda: None)),
        ):
            for name, function in changes.items():
                setattr(place, name, function)

    def start(self) -> None:
        """An engine starts: the first two import modules, which stay."""
        self._starts += 1
        if self._starts <= 2:
            gc.collect()
            self._freeze()

    def replace_kernels(self) -> None:
        """As vLLM does it, but not twice in the same modules."""
        if len(sys.modules) != self._modules:
            self._replace_kernels()
            self._modules = len(sys.modules)


SHARED = Shared()

PRELOADED = (
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.worker.cpu_worker",
    "vllm_ssdkv.connector.connector",
)


def preload() -> None:
    """Import what engines need into a process that forks them: each would take ten seconds for it.

    They begin with all of it, and their garbage collectors leave it alone.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    SHARED.replace_kernels()
    SHARED.start()


class Engine:
    """A running engine. Use it as a context manager, or end it with :meth:`close`."""

    _inside = False
    """Whether one runs in this process: vLLM has room for one."""

    def __init__(
        self,
        model: Path,
        *,
        ssdkv: Mapping[str, object] | None = None,
        kv_tokens: int,
        dtype: str = "float32",
        in_process: bool = True,
        **options: Any,  # noqa: ANN401 - options of vllm.LLM
    ):
        """``kv_tokens`` is the KV capacity given to vLLM; ``ssdkv`` None is stock vLLM."""
        if in_process and Engine._inside:
            raise RuntimeError("another engine runs in this process; end it first")
        Engine._inside |= in_process
        SHARED.start()
        self.in_process = in_process
        self.block = int(options.setdefault("block_size", 32) or 128)
        tp = int(options.get("tensor_parallel_size", 1))
        stored = str(options.get("kv_cache_dtype", dtype)).replace("auto", dtype)
        settings: dict[str, Any] = {
            "max_model_len": 8192,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "disable_log_stats": False,
            # One block is vLLM's null block, which holds no tokens.
            "kv_cache_memory_bytes": (kv_tokens + self.block) * token_bytes(model, stored) // tp,
            **options,
        }
        if ssdkv is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "SSDKVConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": dict(ssdkv),
            }
        if in_process:
            settings["distributed_executor_backend"] = "uni"
        # The CPU worker takes this function away from the whole process.
        self._set_num_threads = torch.set_num_threads
        # Test machines are small and busy: more threads would only spin.
        torch.set_num_threads(1)
        self._windows = throughput.WINDOWS
        if in_process and "throttle" not in dict(ssdkv or {}).get("io", {}):  # type: ignore[operator]  # a table
            # All devices are on one disk: that one is slower than another is noise.
            throughput.WINDOWS = 1 << 62
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        # What was counted is seen after every step, however many steps a machine takes in a second.
        self._tell_interval_s = stats_collector.TELL_INTERVAL_S
        if in_process:
            stats_collector.TELL_INTERVAL_S = 0.0
        try:
            with environment(**variables), forked_spawns():
                self.llm = LLM(str(model), dtype=dtype, **settings)
        except BaseException:
            self._clean()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine; its store can be opened again when this returns. Idempotent."""
        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            self._clean()

    def _clean(self) -> None:
        torch.set_num_threads = self._set_num_threads
        throughput.WINDOWS = self._windows
        stats_collector.TELL_INTERVAL_S = self._tell_interval_s
        if self.in_process:
            Engine._inside = False
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()

    # ---- requests ----

    @staticmethod
    def sampling(
        max_tokens: int = MAX_TOKENS,
        logprobs: int | None = None,
        **others: Any,  # noqa: ANN401 - options of SamplingParams
    ) -> SamplingParams:
        """Greedy, of a fixed length."""
        return SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=logprobs, **others
        )

    def answers(
        self,
        prompts: Sequence[Tokens],
        max_tokens: int = MAX_TOKENS,
        *,
        logprobs: int | None = None,
        salt: str | None = None,
        lora: LoRARequest | None = None,
    ) -> list[Answer]:
        """Greedy answers of one batch, in the order of the prompts."""
        salted = {} if salt is None else {"cache_salt": salt}
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(p), **salted} for p in prompts],
            self.sampling(max_tokens, logprobs),
            use_tqdm=False,
            lora_request=lora,
        )
        return [
            Answer(
                tuple(o.outputs[0].token_ids),
                int(o.num_cached_tokens or 0),
                tuple(
                    {t: p.logprob for t, p in position.items()}
                    for position in o.outputs[0].logprobs or ()
                ),
            )
            for o in outputs
        ]

    def add(
        self,
        name: str,
        prompt: Tokens,
        max_tokens: int = MAX_TOKENS,
        asked: Mapping[str, object] | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request without running it; see :meth:`step`. ``asked``: what it chooses for
        itself of the connector's options; ``priority``: the lower, the sooner."""
        extra = None if asked is None else {"kv_transfer_params": {"ssdkv": dict(asked)}}
        self.llm.llm_engine.add_request(
            name,
            {"prompt_token_ids": list(prompt)},
            self.sampling(max_tokens, extra_args=extra),
            priority=priority,
        )

    def abort(self, *names: str) -> None:
        """End requests early."""
        self.llm.llm_engine.abort_request(list(names))

    def step(self) -> dict[str, tuple[int, ...]]:
        """One step; tokens so far of the requests that got any, by name."""
        outputs = self.llm.llm_engine.step()
        return {o.request_id: tuple(o.outputs[0].token_ids) for o in outputs}

    def run(self, after_step: Callable[[int], None] | None = None) -> dict[str, tuple[int, ...]]:
        """Step until no request is left; the last tokens of each, by name."""
        found: dict[str, tuple[int, ...]] = {}
        number = 0
        while self.llm.llm_engine.has_unfinished_requests():
            found |= self.step()
            number += 1
            if after_step is not None:
                after_step(number)
        return found

    def settle(self) -> None:
        """In process: step until the workers have reported every write."""
        deadline = time.monotonic() + IDLE_DEADLINE_S
        while self.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise TimeoutError("the engine did not become idle")
            self.llm.llm_engine.step()

    # ---- what can be seen ----

    def assert_nothing_held(self) -> None:
        """In process, once idle: nothing is pinned or reserved, no slot and no HBM block is
        missing."""
        index = self.scheduler.connector.scheduler.index
        gauges = index.gauges()
        assert gauges["pinned"] == gauges["reserved"] == gauges["writing"] == 0
        away = gauges["lost"] + gauges["masked"]
        assert gauges["free"] + gauges["ready"] == index.num_slots - away
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    @property
    def scheduler(self) -> Any:  # noqa: ANN401 - vLLM's scheduler, in this process
        """vLLM's scheduler; in process only."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit in the KV cache given to vLLM."""
        blocks = self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        return (int(blocks) - 1) * self.block

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over the samples that have these labels.

        Raises:
            KeyError: there is none.
        """
        values = [
            float(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == name and labels.items() <= metric.labels.items()
        ]
        if not values:
            raise KeyError(f"{name} {labels}")
        return sum(values)

    def ssdkv(self, name: str, **labels: str) -> float:
        """One of our own metrics, by its short name."""
        return self.metric(f"vllm:ssdkv_{name}", **labels)
