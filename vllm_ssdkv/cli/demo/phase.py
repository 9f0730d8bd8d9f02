"""One phase of ``ssdkv demo`` in a process of its own: an engine, a batch, what came of it.

Its events: ``ready`` (the engine is up), ``progress``, ``result``.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_ssdkv.base.metric import PREFIX
from vllm_ssdkv.cli.demo.plan import DemoPlan, Phase
from vllm_ssdkv.profiling.rig.child_process import Tell, serve
from vllm_ssdkv.profiling.rig.engine import Engine, Request


def run(plan: DemoPlan, phase: Phase, tell: Tell) -> None:
    """Start the engine, serve the plan's requests, report, stop the engine."""
    started = time.monotonic()
    from vllm.platforms import current_platform

    settings = plan.engine_settings(phase)
    if phase != "stock" and current_platform.is_cuda():
        settings["attention_backend"] = "CUSTOM"
    engine = Engine(**settings)
    config = engine.core.vllm_config
    cache = config.cache_config
    kv_tokens = cache.num_gpu_blocks * cache.block_size
    start_s = time.monotonic() - started
    tell("ready", kv_tokens=kv_tokens, start_s=start_s)

    questions = plan.questions()
    started = time.monotonic()
    asked = [Request(str(i), one.prompt, len(one.answer)) for i, one in enumerate(questions)]
    ended: dict[int, Any] = {}
    answering: set[str] = set()
    peak = 0.0
    for outputs in engine.steps(asked):
        for output in outputs:
            answering.add(output.request_id)
            if output.finished:
                ended[int(output.request_id)] = output
        peak = max(peak, _gauge(engine.llm, "vllm:kv_cache_usage_perc"))
        tell("progress", answering=len(answering), ended=len(ended))
    run_s = time.monotonic() - started
    result = {
        "start_s": start_s,
        "run_s": run_s,
        "kv_tokens": kv_tokens,
        # One block of the pool is vLLM's placeholder for blocks that were freed.
        "peak_kv_tokens": round(peak * (kv_tokens - cache.block_size)),
        "in_flight_tokens": config.max_in_flight_tokens,
        "requests": [_figures(ended[number]) for number in range(len(questions))],
        "metrics": _own_metrics(engine.llm),
    }
    engine.close()
    tell("result", **result)


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


def main(plan: str, phase: str, tell: Tell) -> None:
    """Run a phase by name, of a plan that is JSON."""
    match phase:
        case "page" | "restart" | "stock":
            run(DemoPlan.from_json(plan), phase, tell)
        case _:
            raise SystemExit(f"no phase {phase!r}")


if __name__ == "__main__":
    serve(main)
