"""The native tests fit the native code: the compiler reads each of their files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("file", sorted(HERE.glob("*.cpp")), ids=lambda file: file.name)
def test_a_file_of_native_tests_compiles(file: Path) -> None:
    compiler = os.environ.get("CXX", "c++")
    folders = [f"-I{ROOT / 'vllm_ssdkv' / 'csrc'}", f"-I{HERE}"]
    vendored = ["-isystem", str(ROOT / "third_party" / "xxhash")]
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-DSSDKV_URING=0", *folders, *vendored, file],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
