"""The process that others are forked from, by what it imports: ten seconds of a core."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from multiprocessing.context import BaseContext

import setproctitle

from tests.kit.forks import end_with_parent

setproctitle.getproctitle()  # finds the place of the title while the environment is as it began
for name in (
    "tests.kit.engine_process",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
):
    importlib.import_module(name)
importlib.import_module("tests.kit.engine").preload()
os.register_at_fork(after_in_child=end_with_parent)

_get_context = multiprocessing.get_context


def get_context(method: str | None = None) -> BaseContext:
    """Have a process that vLLM wants to spawn forked from the one that wants it."""
    return _get_context("fork" if method == "spawn" else method)


multiprocessing.get_context = get_context  # type: ignore[assignment]
