"""The installed package must not bring its folders' bare names into the interpreter.

vLLM and others probe for modules called `triton_kernels` and `profiling` and change what they do
when they find one, so ours may be found under `vllm_ssdkv` only.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = ("triton_kernels", "profiling", "fpga_offload", "grafana")
PROBE = """
import importlib, importlib.util, json, sys
bare, nested = json.loads(sys.argv[1])
print(json.dumps({
    "bare": [name for name in bare if importlib.util.find_spec(name)],
    "nested": [importlib.import_module(name).__name__ for name in nested],
    "package": importlib.import_module("vllm_ssdkv").__file__,
}))
"""


def probe(
    cwd: Path, bare: list[str], nested: list[str], interpreter: str = sys.executable
) -> dict[str, list[str] | str]:
    """Findings of a fresh interpreter in `cwd`; no PYTHONPATH, so only what is installed."""
    paths = ("PYTHONPATH", "PYTHONSAFEPATH")
    environment = {key: value for key, value in os.environ.items() if key not in paths}
    ended = subprocess.run(
        [interpreter, "-c", PROBE, json.dumps([bare, nested])],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[str] | str] = json.loads(ended.stdout)
    return found


def test_bare_names_stay_free(tmp_path: Path) -> None:
    nested = [f"vllm_ssdkv.{name}" for name in FOLDERS]
    found = probe(tmp_path, list(FOLDERS), nested)
    assert found["bare"] == []
    assert found["nested"] == nested


@pytest.mark.parametrize("name", FOLDERS)
def test_probe_sees_a_bare_name(tmp_path: Path, name: str) -> None:
    """The probe itself can fail: a module of that name in the start directory is found."""
    (tmp_path / f"{name}.py").touch()
    assert probe(tmp_path, [name], [])["bare"] == [name]
