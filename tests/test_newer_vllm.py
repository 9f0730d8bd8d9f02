"""The newer vLLM, in an environment of its own: its hooks, and one engine of each mode.

scripts/newer_vllm.py makes it. The tests run with the locked vLLM, too, where pytest finds them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONNECTOR = "tests/connector"
CHOSEN = (
    "tests/contract",
    # Both orders in which runners give results, and what a model or a setting is refused for.
    *(f"{CONNECTOR}/test_{name}.py" for name in ("connector", "compatibility", "attention_impl")),
    *(f"{CONNECTOR}/test_{name}.py" for name in ("model_layout", "startup", "ways_out", "graphs")),
    f"{CONNECTOR}/metrics",
    f"{CONNECTOR}/identity",
    # In vLLM's own schedulers, the asynchronous one among them.
    *(f"{CONNECTOR}/scheduler/test_{name}.py" for name in ("scheduler", "kv_groups", "sessions")),
    *(f"{CONNECTOR}/scheduler/test_{name}.py" for name in ("speculation", "block_keys")),
    "tests/secondary_tier/test_vllm_scheduler.py",
    "tests/secondary_tier/test_tier.py",
    "tests/secondary_tier/test_random_jobs.py",
    "tests/e2e/test_reuse.py",
    "tests/e2e/test_pipeline.py::test_stages_of_other_kinds_of_layers[groups]",
    "tests/e2e/test_exact.py::test_tokens_are_those_of_stock_vllm[llama-ssd]",
)


@pytest.mark.engine
@pytest.mark.timeout(2800)
def test_what_rests_on_vllm_runs_with_the_newer_one() -> None:
    command = [sys.executable, "-P", str(ROOT / "scripts/newer_vllm.py")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=1300, check=False)
    if made.returncode == os.EX_TEMPFAIL:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    # Cases of the scheduler without scheduling ahead take as long again.
    chosen = ["-p", "no:xdist", "-k", "async or not test_scheduler", *CHOSEN]
    # The variables of a lane are not its own.
    others = {name: text for name, text in os.environ.items() if "PYTEST" not in name}
    ended = subprocess.run(
        [made.stdout.strip(), "-P", "-m", "pytest", *chosen],
        cwd=ROOT,
        env=others,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1400,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-20_000:]
