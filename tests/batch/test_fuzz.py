"""No request is answered with a fault of the server: fuzzed from the routes' own schema.

Needs the program `schemathesis`, which is not among the locked packages (`pipx install
schemathesis`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.batch.served import DEADLINE_S, KEYS

EXAMPLES = int(os.environ.get("SSDKV_SOAK_ROUNDS", "20")) * 10
PROGRAM = shutil.which("schemathesis")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(PROGRAM is None, reason="schemathesis is not installed"),
]


def test_no_request_is_a_fault_of_the_server(url: str, tmp_path: Path) -> None:
    assert PROGRAM is not None
    ended = subprocess.run(
        [
            PROGRAM,
            "run",
            f"{url}/openapi.json",
            "--checks",
            "not_a_server_error",
            "--header",
            f"Authorization: Bearer {KEYS[0]}",
            "--max-examples",
            str(EXAMPLES),
            "--no-color",
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
    request = urllib.request.Request(
        f"{url}/v1/files?limit=1", headers={"Authorization": f"Bearer {KEYS[0]}"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        assert answer.status == 200, "it still works"
