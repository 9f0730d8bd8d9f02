"""The start of an engine of mode ``reuse`` with one directory: what it imports, how it walks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.alone import environment_with_tests

MOST_MODULES = 200
"""Modules, packages and native modules included, of both roles in one process."""

MOST_RETURNS = 11
"""Times that the options come back to a file that they had left, in the start of a worker."""

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
from vllm_ssdkv.config.schema import OptionModel
from vllm_ssdkv.connector import startup

ROOT = str(Path(startup.__file__).parents[1].resolve()) + "/"
walk = []  # files of ours whose functions were handed the options, in the order of calls

def has_options(value, depth=2):
    if isinstance(value, OptionModel):
        return True
    if not depth or not type(value).__module__.startswith("vllm_ssdkv."):
        return False
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    held = [getattr(value, name, None) for name in slots]
    held += getattr(value, "__dict__", {}).values()
    return any(has_options(one, depth - 1) for one in held)

def look(frame, event, _):
    code = frame.f_code
    if event != "call" or not str(Path(code.co_filename).resolve()).startswith(ROOT):
        return
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    file = str(Path(code.co_filename).resolve()).removeprefix(ROOT)
    if any(has_options(frame.f_locals.get(name)) for name in names) and walk[-1:] != [file]:
        walk.append(file)

def traced(*given, plain=startup.open_worker):
    sys.setprofile(look)
    try:
        return plain(*given)
    finally:
        sys.setprofile(None)

startup.open_worker = traced
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
    found = {"cached": answer.cached, "modules": ours, "walk": walk}
    print("RESULT", json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A process in which an engine has stored a prompt and found it again."""
    folder: Path = tmp_path_factory.mktemp("start")
    ended = subprocess.run(
        [sys.executable, "-P", "-c", ENGINE, str(folder)],
        env=environment_with_tests(folder),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    assert found["cached"] > 0
    return found


def test_no_room_of_another_mode_or_device_is_imported(start: dict[str, Any]) -> None:
    rooms = tuple(f"vllm_ssdkv.{room}." for room in ELSEWHERE)
    assert [name for name in start["modules"] if f"{name}.".startswith(rooms)] == []


def test_few_modules_are_imported(start: dict[str, Any]) -> None:
    assert len(start["modules"]) <= MOST_MODULES, "\n".join(start["modules"])


def test_the_options_seldom_come_back_to_a_file(start: dict[str, Any]) -> None:
    walk = start["walk"]
    assert "store/open.py" in walk
    assert len(walk) - len(set(walk)) <= MOST_RETURNS, "\n".join(walk)
