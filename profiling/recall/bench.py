"""Options, stores and engines of ``ssdkv lab bench accuracy`` and ``ssdkv lab bench decode``.

Both run the demo's recall model through the real vLLM. Engines whose stores hold the same share
them, so that the prompts are computed once for each kind.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.selectors import SELECTORS
from vllm_ssdkv.profiling.console import progress
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.recall.run import BLOCK_TOKENS, Batch, RecallRun
from vllm_ssdkv.profiling.rig.child_process import PhaseError, run_module, tail
from vllm_ssdkv.profiling.rig.page_engine import STAGING

SPARSE: Final = SELECTORS.names()
"""The selectors there are, but ``exact``."""
WINDOW: Final = 64
"""Tokens: so short that short contexts choose, too."""
_TIMEOUT_S: Final = 3600.0
_FRAMES: Final = 2 * MIB
"""DRAM beside that for contexts: the write buffer."""

_LEAST: Final = 2 * MIB
"""DRAM for contexts, however short they are."""

Row = dict[str, Any]


class RecallStores:
    """Directories of an emulated machine with some devices, removed at the end."""

    def __init__(self, directory: Path | None, devices: int):
        self.root = Path(tempfile.mkdtemp(prefix="ssdkv-bench-", dir=directory))
        self._devices = devices

    def places(self, selector: str, sparse: Mapping[str, object] | None = None) -> tuple[str, ...]:
        """Directories of a selector's stores; selectors whose stores are alike share them."""
        config = SSDKVConfig.from_extra_config(
            {"mode": "page", "selector": selector, "sparse": dict(sparse or {})}
        )
        kind = "exact" if selector == "exact" else config.scorer
        paths = [self.root / f"{kind}{i}" for i in range(self._devices)]
        for path in paths:
            path.mkdir(mode=0o700, exist_ok=True)
        return tuple(map(str, paths))

    def run(self, plan: RecallRun, what: str, console: Console) -> list[Row]:
        """Figures of each batch of an engine.

        Raises:
            BenchError: the engine failed.
        """
        found = self.engine("vllm_ssdkv.profiling.recall.run", plan.to_json(), what, console)
        batches: list[Row] = found["batches"]
        return batches

    def engine(self, module: str, plan: str, what: str, console: Console) -> Row:
        """Result of a module that runs an engine by a plan, in a process of its own.

        Raises:
            BenchError: the engine failed.
        """
        log = self.root / "engine.log"
        try:
            with progress(console) as note:
                note(what)
                return run_module(module, [plan], log, _TIMEOUT_S)
        except PhaseError as error:
            raise BenchError(f"{what}: {error}\n{tail(log)}") from error

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)


def require_choices(batches: Sequence[Row], what: str) -> None:
    """All rows chose that should have.

    Raises:
        BenchError: DRAM had no room for what the selector must know, so that some were exact.
    """
    if any(batch["rows_exact"] for batch in batches):
        raise BenchError(f"{what}: DRAM had no room for some rows' summaries")


def recall_plan(
    places: Sequence[str],
    selector: str,
    batches: Sequence[Batch],
    dram_bytes: int,
    sparse: dict[str, object],
    throttle: Sequence[dict[str, object]] = (),
    *,
    window: int,
    content: int | None = None,
) -> RecallRun:
    """The life of an engine on these places.

    ``content``: bytes of KV that the stores must hold; None: those of ``batches``.
    """
    if content is None:
        content = sum(b.context * b.count * len(b.tasks) for b in batches) * bytes_per_token()
    return RecallRun(
        stores=tuple(places),
        selector=selector,
        batches=tuple(batches),
        window=window,
        dram_bytes=dram_bytes,
        # Header, summary page and journal beside the KV, and what a run before left.
        capacity=3 * content // len(places) + 64 * MIB,
        sparse=sparse,
        throttle=tuple(throttle),
    )


def dram_share_plan(
    places: Sequence[str], selector: str, asked: Batch, machine: Row, content: int
) -> RecallRun:
    """An engine whose DRAM is a share of what is asked for, whatever the selector does with it: the
    store divides it as it does without being told. What comes on top are the channels by which
    ``sparf`` scores, half of the KV with what belongs to them, where requests choose.
    """
    longest = max(machine["longest"], asked.context + (asked.tokens or 0))
    context = max(machine["longest"], asked.context)
    held = int(machine["dram"] * context * asked.count * bytes_per_token())
    dram = STAGING + _FRAMES + max(_LEAST, held)
    sparse: dict[str, object] = {
        "budget": machine["budget"],
        "floor": min(machine["budget"], 1 / 32),
        "reuse_steps": machine["reuse_steps"],
        "reuse_similarity": machine["reuse_similarity"],
    }
    if machine["short_exact"]:
        sparse["exact_below"] = None
    throttle = [machine["model"]]
    window = machine["window_tokens"]
    plan = recall_plan(
        places, selector, [asked], dram, sparse, throttle, window=window, content=content
    )
    config = SSDKVConfig.from_extra_config(plan.options())
    if config.scores_channels and longest >= config.exact_below:
        blocks = asked.count * longest // BLOCK_TOKENS + asked.count
        dram += blocks * BLOCK_TOKENS * bytes_per_token() * 9 // 16
    return replace(plan, dram_bytes=dram, longest=machine["longest"])
