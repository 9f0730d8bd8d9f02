"""Modules of ours in an engine of mode ``reuse`` with one directory: few, and no other mode's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.alone import environment_with_tests

MOST = 210
"""Modules, packages and native modules included, of both roles in one process."""

ELSEWHERE = (
    *("attention", "batch", "cli", "clustering", "fpga_offload", "node", "offload"),
    *("profiling", "sparse", "store.io.testing", "triton_kernels"),
)
"""Rooms of page mode, nodes, FPGAs, injected faults, benches and commands."""

ENGINE = """
import json, sys
from pathlib import Path
from tests.e2e.models import make_llama
from tests.kit.engine import Engine

folder = Path(sys.argv[1])
(folder / "ssd").mkdir()
device = {"path": str(folder / "ssd"), "capacity": "64MiB"}
model = make_llama(folder / "model", layers=1)
with Engine(
    model, ssdkv={"devices": [device]}, kv_tokens=16384, enable_prefix_caching=False
) as engine:
    prompt = [list(range(3, 300))]
    engine.answers(prompt, 4)
    engine.settle()
    (answer,) = engine.answers(prompt, 4)
    ours = sorted(name for name in sys.modules if name.partition(".")[0] == "vllm_ssdkv")
    print("RESULT", json.dumps([answer.cached, ours]), flush=True)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Modules of a process in which an engine has stored a prompt and found it again."""
    folder: Path = tmp_path_factory.mktemp("imports")
    ended = subprocess.run(
        [sys.executable, "-P", "-c", ENGINE, str(folder)],
        env=environment_with_tests(folder),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    cached, names = json.loads(line.removeprefix("RESULT "))
    assert cached > 0
    return [str(name) for name in names]


def test_no_room_of_another_mode_or_device_is_imported(imported: list[str]) -> None:
    rooms = tuple(f"vllm_ssdkv.{room}." for room in ELSEWHERE)
    assert [name for name in imported if f"{name}.".startswith(rooms)] == []


def test_few_modules_are_imported(imported: list[str]) -> None:
    assert len(imported) <= MOST, "\n".join(imported)
