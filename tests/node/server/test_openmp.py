"""Threads of attention on a node, in processes without torch, as nodes are."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

CODE = """
import sys
from vllm_ssdkv import _kernels
from vllm_ssdkv.node.server import openmp
openmp._LIBRARY = sys.argv[1]
print(openmp.team_threads(int(sys.argv[2])), openmp.team_threads(int(sys.argv[2])))
print("torch" in sys.modules)
"""


def threads(library: str, asked: int) -> tuple[str, str]:
    """Text of a process on both of its streams. vLLM has its children load a runtime."""
    command = [sys.executable, "-P", "-c", CODE, library, str(asked)]
    environment = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}
    found = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    return found.stdout, found.stderr


def test_a_node_has_a_team_without_torch() -> None:
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        pytest.skip("this machine has no libgomp.so.1")
    assert threads("libgomp.so.1", 3) == ("3 3\nFalse\n", "")


def test_without_a_runtime_it_is_one_thread_and_said_once() -> None:
    said, warned = threads("libnowhere.so.1", 3)
    assert said == "1 1\nFalse\n"
    assert warned.count("one thread of 3; install libgomp1: libnowhere.so.1") == 1
    assert threads("libnowhere.so.1", 1) == ("1 1\nFalse\n", "")
