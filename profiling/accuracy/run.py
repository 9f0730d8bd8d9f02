"""One engine that decodes what suites force on it, in a process of its own, and how it did.

Its events: ``pass`` after all requests of a suite at a budget, ``result`` at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_ssdkv.profiling.accuracy.suites import Request, SuiteName, requests, right
from vllm_ssdkv.profiling.rig import engine as rig
from vllm_ssdkv.profiling.rig.child_process import Tell, serve
from vllm_ssdkv.profiling.rig.engine import ONE_PROCESS, Engine, worker_metrics
from vllm_ssdkv.profiling.rig.page_engine import PageEngine

if TYPE_CHECKING:
    import torch

SEATS: Final = 4
"""Requests at a time."""


@dataclass(frozen=True, slots=True)
class AccuracyRun:
    """One engine's life.

    Attributes:
        model: Directory of the checkpoint.
        stores, capacity, dram_bytes, window, selector, sparse, block_tokens: As of
            :class:`PageEngine`.
        suites: Each with the tokens of its contexts, once after the other.
        questions: About each document, of suites that ask.
        budgets: Shares of a request's tokens; one of them is no matter with ``exact``.
        beside_window: Budgets are shares of what the window does not hold, and come on top of it.
        compare_every: Attention of ``text`` is compared with exact attention in every so manieth
            step; 0: never.
        dense: Directory of the log-probabilities of dense attention; ``exact`` writes them.
    """

    model: str
    stores: tuple[str, ...]
    capacity: int
    dram_bytes: int
    window: int
    selector: str
    suites: tuple[tuple[SuiteName, int], ...]
    questions: int
    budgets: tuple[float, ...]
    dense: str
    sparse: dict[str, object] = field(default_factory=dict)
    block_tokens: int = 16
    beside_window: bool = False
    compare_every: int = 0

    @classmethod
    def from_json(cls, text: str) -> AccuracyRun:
        """The run that :meth:`to_json` wrote."""
        fields = json.loads(text)
        suites = tuple((name, tokens) for name, tokens in fields["suites"])
        lists = {name: tuple(fields[name]) for name in ("stores", "budgets")}
        return cls(**{**fields, **lists, "suites": suites})

    def to_json(self) -> str:
        """As text, for the command line."""
        return json.dumps(asdict(self))

    def engine(self) -> PageEngine:
        """The engine without its limits."""
        return PageEngine(
            Path(self.model),
            self.stores,
            self.capacity,
            self.dram_bytes,
            self.window,
            self.selector,
            self.sparse,
            self.block_tokens,
        )

    def engine_settings(self) -> dict[str, object]:
        """Keyword arguments of ``vllm.LLM``. vLLM computes prompts in chunks as it likes: the
        longest context is a sequence's limit, which may be the model's own."""
        from vllm_ssdkv.profiling.forced_decode import ForcedDecode

        longest = max(tokens for _, tokens in self.suites)
        settings = self.engine().settings(longest, SEATS, "auto")
        return {**settings, "logits_processors": [ForcedDecode]}

    def asked(self, share: float, tokens: int) -> dict[str, object]:
        """Options of a request of so many tokens."""
        if self.selector == "exact":
            return {}
        if not self.beside_window:
            return {"budget": share}
        # The window gives whole blocks to the context: half of one is there beside it on average.
        held = min(tokens, self.window + self.block_tokens // 2)
        return {"budget_tokens": held + round(share * (tokens - held))}


def run(plan: AccuracyRun, tell: Tell) -> None:
    """Start the engine, decode, report, stop the engine."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    # Before the engine starts: a document may be missing.
    suites = [
        (suite, tokens, requests(suite, tokenizer, tokens, plan.questions))
        for suite, tokens in plan.suites
    ]
    engine = Engine(**plan.engine_settings())
    found = []
    for suite, tokens, asked in suites:
        _store_prompts(engine, asked)
        for share in plan.budgets:
            rows = _decode(engine, plan, suite, share, asked)
            found.append({"suite": suite, "context": tokens, "budget": share, **rows})
            tell("pass", suite=suite, budget=share)
    summaries = _summary_bytes(engine) / plan.block_tokens
    engine.close()
    tell("result", passes=[{**row, "summary_bytes": summaries} for row in found])


def _summary_bytes(engine: Engine) -> int:
    """Bytes of DRAM that a block's summaries take, as the engine plans its memory."""
    from vllm_ssdkv.store.memory.summary_rows import row_bytes

    config, geometry = engine.worker.config, engine.worker.store.files.geometry
    if not geometry.tail_pages:
        return 0
    return row_bytes(geometry, config.page_tokens, channels=config.scores_channels)


def _store_prompts(engine: Engine, asked: Sequence[Request]) -> None:
    """Compute each prompt that is shared once, so that all passes decode from what is stored."""
    first = {request.group: request for request in reversed(asked)}
    named = {f"stored {group}": request.prompt for group, request in first.items()}
    for _ in engine.steps(_greedy(name, prompt, 1) for name, prompt in named.items()):
        pass


def _greedy(
    name: str, prompt: Sequence[int], tokens: int, extra: dict[str, object] | None = None
) -> rig.Request:
    return rig.Request(name, prompt, tokens, extra, detokenize=False)


def _decode(
    engine: Engine,
    plan: AccuracyRun,
    suite: str,
    share: float,
    asked: Sequence[Request],
) -> dict[str, object]:
    """Figures of a pass: those of each request, and what the worker counted meanwhile."""
    from vllm_ssdkv.attention.sparse_deviation import SparseDeviation
    from vllm_ssdkv.profiling.forced_decode import FORCED, FORCINGS, Record

    names = [f"{suite} {share:g} {number}" for number in range(len(asked))]
    records = {n: Record(r.forced) for n, r in zip(names, asked, strict=True)}
    FORCINGS.clear()
    FORCINGS.update(records)
    waiting = []
    for name, request in zip(names, asked, strict=True):
        extra: dict[str, object] = {FORCED: name}
        tokens = len(request.prompt) + len(request.forced)
        if choice := plan.asked(share, tokens):
            extra["kv_transfer_params"] = {"ssdkv": choice}
        waiting.append(_greedy(name, request.prompt, len(request.forced), extra))
    compares = plan.compare_every and suite == "text" and plan.selector != "exact"
    deviation = SparseDeviation(plan.compare_every) if compares else None
    engine.worker.page_mode.deviation = deviation
    before = worker_metrics()
    *_, tokens_of = engine.answers(waiting)
    after = worker_metrics()
    rows = []
    for number, (name, request) in enumerate(zip(names, asked, strict=True)):
        del FORCINGS[name]
        probabilities = records.pop(name).whole(name, tokens_of[name])
        file = Path(plan.dense, f"{suite}.{len(request.prompt)}.{number}.npy")
        rows.append({"name": request.name, **_compared(plan, request, probabilities, file)})
    return {
        "requests": rows,
        "rows_exact": after.get("sparse_rows_exact", 0.0) - before.get("sparse_rows_exact", 0.0),
        "decoding": {name: value - before.get(name, 0) for name, value in after.items()},
        "deviation": []
        if deviation is None
        else [{"layer": layer, **of_layer} for layer, of_layer in deviation.take().items()],
    }


def _compared(
    plan: AccuracyRun, request: Request, found: torch.Tensor, file: Path
) -> dict[str, object]:
    """Figures of a request. Its first token is left out where distributions are compared: it comes
    from the prompt, in which everything is attended to."""
    import numpy as np
    import torch

    from vllm_ssdkv.profiling.accuracy.divergence import divergence

    if plan.selector == "exact":
        np.save(file, found.numpy())
    dense = torch.from_numpy(np.load(file))
    figures = divergence(dense[1:], found[1:], request.forced[1:])
    same = (found.argmax(-1) == torch.tensor(request.forced)).tolist()
    return {
        **asdict(figures),
        "steps": len(found) - 1,
        "parts": len(request.parts),
        "right": right(request.parts, same),
    }


def main(plan: str, tell: Tell) -> None:
    """Run a plan that is JSON."""
    os.environ.update(ONE_PROCESS)  # the processor's records are read here
    run(AccuracyRun.from_json(plan), tell)


if __name__ == "__main__":
    serve(main)
