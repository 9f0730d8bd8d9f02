"""A test that failed has a limit of time for its end, as it had one for its beginning."""

import os
import subprocess
import sys
from pathlib import Path

from tests.test_lanes import folder_of

TEST = """
import signal
from collections.abc import Iterator
import pytest

@pytest.fixture
def left_behind() -> Iterator[None]:
    yield
    signal.pause()

@pytest.mark.timeout({limit})
def test_fails(left_behind: None) -> None:
    assert False, "the test"

def test_after_it() -> None:
    pass
"""


def test_what_a_failed_test_left_is_not_waited_for(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, hangs=TEST.format(limit=0.5))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    options = ["-q", "-p", "pytest_timeout", "-p", "time_limit", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--import-mode=importlib", "."],
        cwd=folder,
        env={
            **environment,
            "PYTHONPATH": str(Path(__file__).parent),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "1 failed, 1 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_hangs.py::test_fails - AssertionError: the test" in done.stdout
    assert "ERROR test_hangs.py::test_fails - Failed: Timeout" in done.stdout
