"""Help and wrong arguments come before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "matplotlib", "transformers", "sklearn", "pandas", "fastapi")
SCRIPT = """
import sys
from vllm_ssdkv.cli.main import app
try:
    app(sys.argv[1:], prog_name="ssdkv")
except SystemExit as end:
    code = end.code
print(code, *(name for name in sys.argv[0].split(",") if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["lab", "bench", "decode", "--tokens", "x"], 2),
        (["lab", "bench", "nothing"], 2),
    ],
)
def test_nothing_heavy_is_imported(arguments: list[str], code: int) -> None:
    script = SCRIPT.replace("sys.argv[0]", repr(",".join(HEAVY)))
    words = [sys.executable, "-P", "-c", script, *arguments]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    assert ended.stderr.splitlines()[-1] == str(code)
