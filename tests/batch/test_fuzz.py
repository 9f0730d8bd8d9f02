"""No request is answered with a fault of the server: fuzzed from the routes' own schema.

Nor does one hold up the server, or take its memory. With a model, tests/e2e/test_batch_server.py
looks for the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.batch.hostile import memory_of, watched
from tests.batch.served import DEADLINE_S, KEYS
from vllm_ssdkv.base.sizes import MIB

BESIDE = Path(sys.executable).with_name("schemathesis")
PROGRAM = str(BESIDE) if BESIDE.exists() else shutil.which("schemathesis")
ROUNDS = os.environ.get("SSDKV_SOAK_ROUNDS")
SAME_EVERY_TIME = ("--max-examples", "30", "--seed", "1", "--generation-deterministic")


@pytest.mark.slow
@pytest.mark.rounds
@pytest.mark.timeout(7200)
@pytest.mark.skipif(PROGRAM is None, reason="no schemathesis: run scripts/setup.sh")
def test_no_request_is_a_fault_of_the_server(url: str, tmp_path: Path) -> None:
    assert PROGRAM is not None
    examples = SAME_EVERY_TIME if ROUNDS is None else ("--max-examples", f"{10 * int(ROUNDS)}")
    before = memory_of({os.getpid()})
    with watched(url, os.getpid()) as latency:
        ended = subprocess.run(
            [
                PROGRAM,
                "run",
                f"{url}/openapi.json",
                *("--checks", "not_a_server_error"),
                *("--header", f"Authorization: Bearer {KEYS[0]}"),
                "--no-color",
                *examples,
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=7000,
            check=False,
        )
    report = ended.stdout[-6000:] + ended.stderr[-2000:]
    assert ended.returncode == 0, report
    assert "Selected: 9/9" in report, report
    assert max(own for _, own in latency) < 1.0  # whatever else the machine does
    assert memory_of({os.getpid()}) < before + 300 * MIB
    request = urllib.request.Request(
        f"{url}/v1/files?limit=1", headers={"Authorization": f"Bearer {KEYS[0]}"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        assert answer.status == 200, "it still works"
