"""One phase of ``ssdkv demo`` in a process of its own: an engine, a batch, what came of it.

``python -P -m vllm_ssdkv.cli.demo.phase PLAN PHASE FD`` writes one JSON object per line to the
descriptor FD, each with its ``event``: ``ready`` (the engine is up), ``progress``, ``result``.
Everything else, vLLM's log included, goes to standard output and error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

from vllm_ssdkv.base.metric import PREFIX
from vllm_ssdkv.cli.demo.plan import DemoPlan, Phase

SHUTDOWN_S = 60.0
"""vLLM kills an engine that has not ended by then; ours still writes what it holds in DRAM."""


def run(plan: DemoPlan, phase: Phase, events: TextIO) -> None:
    """Start the engine, serve the plan's requests, report, stop the engine."""
    started = time.monotonic()
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    settings = plan.engine_settings(phase)
    if phase != "stock" and current_platform.is_cuda():
        settings["attention_backend"] = "CUSTOM"
    llm = LLM(**settings)
    engine = llm.llm_engine
    cache = engine.vllm_config.cache_config
    kv_tokens = cache.num_gpu_blocks * cache.block_size
    start_s = time.monotonic() - started
    _tell(events, event="ready", kv_tokens=kv_tokens, start_s=start_s)

    questions = plan.questions()
    started = time.monotonic()
    for number, question in enumerate(questions):
        sampling = SamplingParams(temperature=0, max_tokens=len(question.answer), ignore_eos=True)
        engine.add_request(str(number), {"prompt_token_ids": list(question.prompt)}, sampling)
    ended: dict[int, Any] = {}
    answering: set[str] = set()
    peak = 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            answering.add(output.request_id)
            if output.finished:
                ended[int(output.request_id)] = output
        peak = max(peak, _gauge(llm, "vllm:kv_cache_usage_perc"))
        _tell(events, event="progress", answering=len(answering), ended=len(ended))
    run_s = time.monotonic() - started
    result = {
        "start_s": start_s,
        "run_s": run_s,
        "kv_tokens": kv_tokens,
        # One block of the pool is vLLM's placeholder for blocks that were freed.
        "peak_kv_tokens": round(peak * (kv_tokens - cache.block_size)),
        "in_flight_tokens": engine.vllm_config.max_in_flight_tokens,
        "requests": [_figures(ended[number]) for number in range(len(questions))],
        "metrics": _own_metrics(llm),
    }
    engine.engine_core.shutdown(timeout=SHUTDOWN_S)
    _tell(events, event="result", **result)


def _tell(events: TextIO, **fields: object) -> None:
    events.write(json.dumps(fields) + "\n")
    events.flush()


def _gauge(llm: Any, name: str) -> float:  # noqa: ANN401 - vLLM's LLM, known only where it is
    return max((float(m.value) for m in llm.get_metrics() if m.name == name), default=0.0)


def _figures(output: Any) -> dict[str, object]:  # noqa: ANN401 - vLLM's RequestOutput
    times = output.metrics
    return {
        "tokens": list(output.outputs[0].token_ids),
        "from_store": output.num_cached_tokens,
        "ttft_s": times.first_token_latency,
        "prefill_s": times.first_token_ts - times.scheduled_ts,
        "preemptions": times.num_preemptions,
    }


def _own_metrics(llm: Any) -> list[dict[str, object]]:  # noqa: ANN401 - vLLM's LLM
    found = []
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX) and hasattr(metric, "value"):
            labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
            name = metric.name.removeprefix(PREFIX)
            found.append({"name": name, "labels": labels, "value": metric.value})
    return found


def main() -> None:
    """Entry point of the process."""
    plan, phase, descriptor = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as events:
        match phase:
            case "page" | "restart" | "stock":
                run(DemoPlan.from_json(plan), phase, events)
            case _:
                raise SystemExit(f"no phase {phase!r}")


if __name__ == "__main__":
    main()
