"""Recording of the documents that a directory lacks, by an engine in a process of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import format_size
from vllm_ssdkv.profiling.clusters.plan import Document, ModelShape, RecordPlan
from vllm_ssdkv.profiling.clusters.trace import PAGE, WINDOW, Manifest, part_problem
from vllm_ssdkv.profiling.recall import recall
from vllm_ssdkv.profiling.rig.child_process import Event, PhaseError, run_module, tail

_TIMEOUT_S: Final = 3600.0


def missing(plan: RecordPlan) -> tuple[Document, ...]:
    """Documents of the plan that its directory has no whole trace of.

    Raises:
        BenchError: the directory's traces were recorded with other settings, or one is damaged.
    """
    directory = Path(plan.directory)
    manifest = Manifest.read(directory)
    if manifest is None:
        return plan.documents
    for name, value in plan.settings().items():
        before = manifest.settings.get(name)
        if before != value:
            raise BenchError(
                f"{directory} has traces with {name} {_short(before)}, not {_short(value)}: name "
                "another directory, or the same options"
            )
    for part in manifest.parts.values():
        if problem := part_problem(directory, part):
            raise BenchError(f"{problem}: remove the directory's manifest.json to record again")
    return tuple(one for one in plan.documents if one.name not in manifest.parts)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def require_sizes(plan: RecordPlan, shape: ModelShape, most: int) -> None:
    """Check what the plan asks for.

    Raises:
        BenchError: all traces would be larger than ``most`` bytes, or the documents are longer than
            the model allows, or too short.
    """
    if plan.tokens >= shape.positions:
        raise BenchError(
            f"--tokens {plan.tokens}: the model has {shape.positions} positions, and the last step "
            f"needs one more: at most {shape.positions - 1}"
        )
    least = plan.prompt + plan.steps + WINDOW + 2 * PAGE
    if any(document.task for document in plan.documents):
        least = plan.prompt + plan.steps + recall.MIN_CONTEXT
    if plan.tokens < least:
        raise BenchError(
            f"--tokens {plan.tokens}: at least {least} with these --prompt, --steps and documents"
        )
    needed = len(plan.documents) * plan.bytes_per_document(shape)
    if needed > most:
        raise BenchError(
            f"the traces would have {format_size(needed)}, more than --max-size "
            f"{format_size(most)}: record fewer --layers or documents, or raise it"
        )


def record_missing(plan: RecordPlan, tell: Callable[[Event], None]) -> int:
    """Record what is missing; how many documents that was. Blocks.

    Raises:
        BenchError: the engine failed; documents that it had finished are kept.
    """
    documents = missing(plan)
    if not documents:
        return 0
    reasons: list[str] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "refused":
            reasons.append(event["reason"])
        tell(event)

    with tempfile.TemporaryDirectory(prefix=".ssdkv-profile-", dir=plan.directory) as folder:
        store = Path(folder) / "store"
        store.mkdir(mode=0o700)
        mine = replace(plan, documents=documents, store=os.fspath(store))
        log = Path(folder) / "engine.log"
        try:
            run_module(
                "vllm_ssdkv.profiling.clusters.record", [mine.to_json()], log, _TIMEOUT_S, watch
            )
        except PhaseError as error:
            why = reasons[0] if reasons else f"the engine {error}\n{tail(log)}"
            raise BenchError(why) from error
    return len(documents)
