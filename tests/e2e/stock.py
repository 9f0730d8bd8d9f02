"""Answers of stock vLLM, the measure of every exact run. Computed once per session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.kit.engine import MAX_TOKENS, Answer, Engine, Tokens

KV_TOKENS = 32768


class Stock:
    """Greedy answers of vLLM without this package's connector, kept for the session."""

    def __init__(self, models: dict[str, Path]):
        self._models = models
        self._known: dict[tuple[object, ...], Answer] = {}

    def answers(
        self,
        model: str,
        prompts: Sequence[Tokens],
        max_tokens: int = MAX_TOKENS,
        *,
        dtype: str = "float32",
        logprobs: int | None = None,
        prefix_caching: bool = False,
        kv_dtype: str = "auto",
    ) -> list[Answer]:
        """Answers to the prompts. Starts an engine of its own if any is not known yet, so there
        must be no other one in this process.

        ``prefix_caching``: vLLM's own, which saves time where many prompts begin alike.
        """
        asked = model, dtype, kv_dtype, max_tokens, logprobs
        keys = [(*asked, *prompt) for prompt in prompts]
        missing = {k: p for k, p in zip(keys, prompts, strict=True) if k not in self._known}
        if missing:
            with Engine(
                self._models[model],
                kv_tokens=KV_TOKENS,
                dtype=dtype,
                max_num_batched_tokens=1024,
                enable_prefix_caching=prefix_caching,
                kv_cache_dtype=kv_dtype,
            ) as engine:
                found = engine.answers(list(missing.values()), max_tokens, logprobs=logprobs)
            self._known.update(zip(missing, found, strict=True))
        return [self._known[key] for key in keys]
