"""The first step of a process may compute a single token: all else of the prompt is stored.

On processors with AMX vLLM's attention then uses tiles that nobody has asked Linux for, unless our
worker has: before, the engine ended by a signal (``connector/worker/amx.py``). Elsewhere it is a
step like any other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.models import prompts
from tests.e2e.workload import reuse_mode
from tests.kit.engine import Engine

ROOT = Path(__file__).parents[2]
BLOCK = 32
"""Of which the size of vLLM's blocks is a multiple where it uses AMX; and bfloat16."""
PROMPT = prompts((4 * BLOCK + 1,), seed=24)[0]

RESTARTED = """
import json, sys
from pathlib import Path
root, model, settings, prompt = json.loads(sys.argv[1])
sys.path.append(root)  # behind the package that is installed
from tests.kit.engine import Engine
with Engine(Path(model), **settings) as engine:
    answer = engine.answers([prompt], 8, logprobs=5)[0]
print(json.dumps([answer.cached, answer.tokens, answer.logprobs[0]]))
"""
"""A process that has multiplied nothing yet."""


def test_one_token_after_a_restart(
    models: dict[str, Path], devices: Callable[..., list[dict[str, str]]]
) -> None:
    settings: dict[str, Any] = {
        "ssdkv": reuse_mode(devices(1)),
        "kv_tokens": 2048,
        "max_model_len": 1024,
        "dtype": "bfloat16",
        "block_size": BLOCK,
    }
    with Engine(models["llama"], **settings) as engine:
        before = engine.answers([PROMPT], 8, logprobs=5)[0]
        engine.settle()
    given = [str(ROOT), str(models["llama"]), settings, PROMPT]
    done = subprocess.run(
        [sys.executable, "-P", "-c", RESTARTED, json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cached, tokens, logprobs = json.loads(done.stdout.splitlines()[-1])
    assert (before.cached, cached) == (0, len(PROMPT) - 1)
    assert len(tokens) == 8
    # Of another number of tokens at a time: as near as bfloat16 is.
    best = before.tokens[0]
    assert abs(logprobs[str(best)] - before.logprobs[0][best]) < 0.25
