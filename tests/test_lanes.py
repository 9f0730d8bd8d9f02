"""Lanes of a run: which begins where, that files stay whole, and that a lane that dies is told."""

import os
import re
import subprocess
import sys
from pathlib import Path

LANES = Path(__file__).with_name("lanes.py")
TEST = """
import os
from pathlib import Path
import pytest
{mark}@pytest.mark.parametrize("number", range(3))
def test_one(number: int) -> None:
    with Path(r"{log}").open("a") as log:
        log.write(os.environ["PYTEST_XDIST_WORKER"] + " {name}\\n")
"""
DIES = """
import os, signal
def test_dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """A run of two lanes over a folder."""
    outer = ("PYTEST_", "COV_")
    environment = {name: v for name, v in os.environ.items() if not name.startswith(outer)}
    options = [
        "-q",
        "-p",
        "xdist.plugin",
        "-p",
        "lanes",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", "2", "--max-worker-restart", "0", "."],
        cwd=folder,
        env={
            **environment,
            "PYTHONPATH": str(LANES.parent),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def folder_of(root: Path, **files: str) -> Path:
    folder = root / "folder"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = engine\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    return folder


def test_files_with_engines_are_at_one_end_of_the_queue(tmp_path: Path) -> None:
    log = tmp_path / "log"
    names = "abcdef"
    texts = {
        name: TEST.format(mark="@pytest.mark.engine\n" * (name in "ce"), log=log, name=name)
        for name in names
    }
    done = run(folder_of(tmp_path, **texts))
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line.split() for line in log.read_text().splitlines()]
    firsts = {worker: next(name for other, name in ran if other == worker) for worker, _ in ran}
    assert firsts == {"gw0": "c", "gw1": "f"}
    assert {name: len({w for w, n in ran if n == name}) for name in names} == dict.fromkeys(
        names, 1
    )
    assert len(ran) == 3 * len(names)


def test_a_lane_that_dies_is_told(tmp_path: Path) -> None:
    harmless = "def test_it() -> None:\n    pass\n"
    done = run(folder_of(tmp_path, a=DIES, b=harmless, c=harmless))
    assert done.returncode == 1
    told = done.stdout
    assert "worker 'gw0' crashed while running 'test_a.py::test_dies'" in told
    assert re.search(r"^1 failed.* in [0-9.]+s", told, re.MULTILINE), told
