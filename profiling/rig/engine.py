"""A real engine of vLLM in this process: started, asked and looked into.

vLLM is imported when an engine is started. Where a step has to end when ``step()`` returns, or the
worker is looked into, the process has :data:`ONE_PROCESS` in its environment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import vllm_ssdkv
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.metrics import parse_key
from vllm_ssdkv.connector.names import CONNECTOR

MODEL: Final = Path(vllm_ssdkv.__file__).parent / "demo_model"
"""A model that every installation has."""
BLOCK: Final = 32
"""Tokens of a block, if an engine is not told otherwise."""
SHUTDOWN_S: Final = 60.0
"""vLLM kills an engine that has not ended by then; ours still writes what it holds in DRAM."""
IDLE_S: Final = 10.0
"""Within this time an engine has to be done with what it stores."""
ONE_PROCESS: Final[Mapping[str, str]] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine core runs in the process that asks."""
ONE_THREAD: Final[Mapping[str, str]] = {
    **ONE_PROCESS,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""vLLM's threads would spin against ours on a machine with few cores."""


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens of a prompt, and how many to decode, greedily.

    Attributes:
        extra: For processors of logits, and for the connector.
        detokenize: Whether vLLM makes text of the answer.
    """

    name: str
    prompt: Sequence[int]
    tokens: int
    extra: Mapping[str, object] | None = None
    detokenize: bool = True


def transfer_config(
    options: Mapping[str, object], connector: str = CONNECTOR
) -> dict[str, dict[str, object]]:
    """The keyword argument of ``vllm.LLM`` that makes it store KV."""
    return {
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(options),
        }
    }


def random_prompt(length: int, seed: str | int) -> list[int]:
    """So many tokens, the same for a seed."""
    source = random.Random(seed)
    return [source.randrange(32, 800) for _ in range(length)]


class Engine:
    """An engine. One thread calls all methods.

    Example:
        engine = Engine.small(MODEL, {"devices": ["/mnt/nvme0"]}, max_model_len=2048)
        output = engine.ask(random_prompt(1025, "a prompt"))

    Attributes:
        llm: ``vllm.LLM``.
        core: Its ``LLMEngine``.
    """

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - arguments of vllm.LLM
        """Start it."""
        from vllm import LLM

        self.llm: Any = LLM(**settings)
        self.core: Any = self.llm.llm_engine

    @classmethod
    def small(
        cls,
        model: str | Path,
        options: Mapping[str, object] | None,
        **settings: Any,  # noqa: ANN401 - arguments of vllm.LLM
    ) -> Engine:
        """Start one that steps eagerly and counts; ``options``: ours, or None: stock vLLM."""
        ours = {} if options is None else transfer_config(options)
        eager = {"enforce_eager": True, "disable_log_stats": False, "block_size": BLOCK}
        return cls(model=str(model), **{**eager, **ours, **settings})

    def add(self, *requests: Request) -> None:
        """Ask these at the next step."""
        from vllm import SamplingParams

        for one in requests:
            sampling = SamplingParams(
                temperature=0,
                max_tokens=one.tokens,
                ignore_eos=True,
                detokenize=one.detokenize,
                extra_args=None if one.extra is None else dict(one.extra),
            )
            self.core.add_request(one.name, {"prompt_token_ids": list(one.prompt)}, sampling)

    def steps(self, requests: Iterable[Request]) -> Iterator[list[Any]]:
        """Ask all at once; outputs of each step until they are answered."""
        self.add(*requests)
        while self.core.has_unfinished_requests():
            yield self.core.step()

    def answers(self, requests: Iterable[Request]) -> Iterator[dict[str, tuple[int, ...]]]:
        """Ask all at once; after each step, the tokens so far of all, by name."""
        tokens: dict[str, tuple[int, ...]] = {}
        for outputs in self.steps(requests):
            tokens |= {one.request_id: tuple(one.outputs[0].token_ids) for one in outputs}
            yield tokens

    def ask(self, prompt: Sequence[int], tokens: int = 1) -> Any:  # noqa: ANN401 - RequestOutput
        """Ask one prompt, and wait for the answer."""
        return self.ask_all([prompt], tokens)[0]

    def ask_all(self, prompts: Iterable[Sequence[int]], tokens: int) -> list[Any]:
        """Ask some at once, and wait for all answers."""
        from vllm import SamplingParams

        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        outputs: list[Any] = self.llm.generate(given, greedy, use_tqdm=False)
        return outputs

    def forget(self, rest_s: float = 0.0) -> None:
        """Have all that is to be stored stored, and no prefix in HBM; then rest.

        Raises:
            BenchError: the engine was not done in time.
        """
        end = time.monotonic() + IDLE_S
        while self.scheduler.has_requests() or not self.llm.reset_prefix_cache():
            if time.monotonic() > end:
                raise BenchError(f"the engine was not done with a request after {IDLE_S:.0f} s")
            self.core.step()
        time.sleep(rest_s)

    @property
    def scheduler(self) -> Any:  # noqa: ANN401 - vLLM's
        """vLLM's scheduler, in :data:`ONE_PROCESS`."""
        return self.core.engine_core.engine_core.scheduler

    @property
    def worker(self) -> Any:  # noqa: ANN401 - SSDKVWorker
        """Our worker, in :data:`ONE_PROCESS`."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    def close(self) -> None:
        """End it: what is written is journalled."""
        self.core.engine_core.shutdown(timeout=SHUTDOWN_S)


def worker_metrics() -> dict[str, float]:
    """Counters of this process's worker in page mode by name and labels, devices added up, as of
    now. What it tells vLLM, and what the I/O engine tells it, comes now and then only."""
    from vllm_ssdkv.connector import active_worker

    worker = active_worker.worker()
    if worker is None:
        raise RuntimeError("the engine is not in page mode")
    statistics = worker.store.files.engine.statistics()
    requests = sum(n for name, n in statistics.items() if name.startswith("read_requests"))
    found = {"read_requests": float(requests)}
    for key, value in worker.counters.totals().items():
        metric, values = parse_key(key)
        if metric.kind == "counter":
            labels = dict(zip(metric.label_names, values, strict=True))
            label = labels.get("tier") or labels.get("part")
            name = f"{metric.name}.{label}" if label else metric.name
            found[name] = found.get(name, 0.0) + value
    return found
