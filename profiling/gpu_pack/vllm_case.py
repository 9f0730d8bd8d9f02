"""One engine of the stage ``vllm``, in a process of its own: forked by one that has imported vLLM.

It writes JSON objects, one per line, to a file in its folder: figures as soon as they are known,
answers, and the error that stopped it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.gpu_pack import vllm_ops
from vllm_ssdkv.profiling.gpu_pack.stage import end_with_parent
from vllm_ssdkv.profiling.gpu_pack.vllm_cells import (
    ANSWER,
    BLOCK,
    Cell,
    Scale,
    prompt,
    prompts,
    settings,
)
from vllm_ssdkv.profiling.rig.engine import Engine, Request

RESULT: Final = "result.jsonl"

_TIMED: Final = 4
"""Tokens of an answer whose first token is timed."""
_REST_S: Final = 0.3
"""Pause in which writes reach the drive before the next prompt."""

Tell = Callable[[dict[str, Any]], None]


def import_vllm(device: str) -> dict[str, str]:
    """Import what engines need, with stand-ins where there are no compiled parts; what it was.

    Raises ``BenchError`` if vLLM has chosen another device.
    """
    compiled = vllm_ops.compiled_parts()
    registered = [] if compiled else vllm_ops.stand_in(device)
    if not compiled:
        # V2 maps host memory into the device with a compiled operator.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.platforms import current_platform

    # Known by its name alone, a model is looked at in another process, which imports vLLM anew.
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    worker = "cpu_worker" if device == "cpu" else "gpu_worker"
    for name in (f"vllm.v1.worker.{worker}", "vllm_ssdkv.connector.connector"):
        importlib.import_module(name)
    if current_platform.device_type != device:
        raise BenchError(f"vLLM has chosen the platform {current_platform.device_type!r}")
    return {
        "vllm": metadata.version("vllm"),
        "compiled parts": ", ".join(compiled) or "none",
        "stand-ins": ", ".join(registered) or "none",
        "platform": str(current_platform.device_type),
    }


def run_cell(cell: Cell, device: str, model: Path, folder: Path, result: Path) -> NoReturn:
    """Run an engine and end the process; its status is 1 if something stopped it."""
    end_with_parent()
    faulthandler.register(signal.SIGUSR1)
    status = 0
    with result.open("w", encoding="utf-8") as file:

        def tell(found: dict[str, Any]) -> None:
            file.write(json.dumps(found) + "\n")
            file.flush()

        try:
            if "vllm" not in sys.modules:
                import_vllm(device)
            _answer(cell, device, model, folder, tell)
        except BaseException as error:  # noqa: BLE001 - vLLM may fail in any way, and is told of
            traceback.print_exc()
            tell({"error": f"{type(error).__name__}: {error}"})
            status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of a failed engine would hold the process


def _answer(cell: Cell, device: str, model: Path, folder: Path, tell: Tell) -> None:
    begin = time.perf_counter()
    compiled = bool(vllm_ops.compiled_parts())
    engine = Engine(**settings(cell, device, model, folder, compiled=compiled))
    _figure(tell, "start", time.perf_counter() - begin, "s")
    config = engine.core.vllm_config
    _figure(tell, "model runner", "V2" if config.use_v2_model_runner else "V1")
    asynchronous = config.scheduler_config.async_scheduling
    _figure(tell, "asynchronous scheduling", "yes" if asynchronous else "no")
    mode = config.compilation_config.cudagraph_mode
    _figure(tell, "CUDA graphs", mode.name)
    if cell.graphs and not mode.has_full_cudagraphs():
        raise BenchError(f"vLLM captures no whole steps, but {mode.name}: its log says why")
    (_speed if cell.speed else _tokens)(cell, device, engine, tell)
    engine.close()
    tell({"ended": True})


def _figure(tell: Tell, name: str, value: float | str, unit: str = "") -> None:
    tell({"figure": [name, value, unit]})


def _tokens(cell: Cell, device: str, engine: Engine, tell: Tell) -> None:
    """The same prompts twice."""
    del cell, device
    asker = _Asker(engine)
    for name in ("first", "again"):
        asked = asker.ask(prompts(), ANSWER)
        _figure(tell, f"{name} time", asked.seconds, "s")
        tell({name: asked.tokens, f"{name} cached": asked.cached})


def _speed(cell: Cell, device: str, engine: Engine, tell: Tell) -> None:
    """Time to the first token by length, computed and found, then tokens decoded per second."""
    scale, asker = Scale.of(device), _Asker(engine)
    kinds = ["found"] if cell.finds_prompts else []
    if not cell.stored:
        kinds.insert(0, "computed")
    for _ in kinds:  # kernels are compiled, and what happens once has happened
        asker.ask([prompt(scale.shape, scale.lengths[0], "first of all")], _TIMED)
        engine.forget(_REST_S)
    for length in scale.lengths:
        for kind in kinds:
            asked = asker.ask([prompt(scale.shape, length, "timed")], _TIMED)
            engine.forget(_REST_S)
            name = f"first token, {length} tokens, {kind}"
            _figure(tell, name, asked.first_s * 1e3, "ms")
            tell({name: asked.tokens, f"{name} cached": asked.cached})
            if kind == "found" and asked.cached[0] < length // BLOCK * BLOCK:
                raise BenchError(f"{name}: only {asked.cached[0]} tokens were found")
    for batch in () if cell.stored else scale.batches:
        asked = asker.ask(
            [prompt(scale.shape, scale.decoded, f"decode {i}") for i in range(batch)], scale.answer
        )
        engine.forget(_REST_S)
        _figure(tell, f"decode, batch {batch}, {scale.decoded} tokens", asked.rate, "tokens/s")


@dataclass(frozen=True, slots=True)
class _Asked:
    """Answers to prompts that were asked together.

    Attributes:
        seconds: Until the last token of all.
        first_s: Until each of them had a token.
        rate: Tokens per second from then on.
        tokens, cached: Answers, and tokens of the prompts that were not computed.
    """

    seconds: float
    first_s: float
    rate: float
    tokens: Sequence[Sequence[int]]
    cached: Sequence[int]


class _Asker:
    """Asks an engine in this process, and looks at the clock after each of its steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0

    def ask(self, given: Sequence[Sequence[int]], answer: int) -> _Asked:
        """Ask prompts at once for ``answer`` tokens each."""
        names = [f"request-{self._count + i}" for i in range(len(given))]
        self._count += len(given)
        asked = [
            Request(name, one, answer, detokenize=False)
            for name, one in zip(names, given, strict=True)
        ]
        begin = time.perf_counter()
        found: dict[str, Any] = {}
        first_s, at_first = 0.0, 0
        for outputs in self._engine.steps(asked):
            found |= {output.request_id: output for output in outputs}
            counts = [len(one.outputs[0].token_ids) for one in found.values()]
            if not first_s and len(counts) == len(names) and all(counts):
                first_s, at_first = time.perf_counter() - begin, sum(counts)
        seconds = time.perf_counter() - begin
        if sorted(found) != sorted(names):
            raise BenchError(f"asked {names}, and answered were {sorted(found)}")
        tokens = [list(found[name].outputs[0].token_ids) for name in names]
        return _Asked(
            seconds,
            first_s,
            (sum(map(len, tokens)) - at_first) / max(seconds - first_s, 1e-9),
            tokens,
            [int(found[name].num_cached_tokens or 0) for name in names],
        )
