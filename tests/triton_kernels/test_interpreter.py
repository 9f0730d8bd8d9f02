"""Runs the folder `interpreted` in a process of its own, whose kernels Triton interprets."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "interpreted"
PASSES = "def test_passes():\n    pass\n"


def run_interpreted(
    folder: Path, report: Path, *options: str, seconds: float = 540
) -> tuple[Counter[str], str]:
    """Number of tests by outcome, and the output, of a pytest run over `folder`."""
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            str(folder),
            f"--config-file={ROOT / 'pyproject.toml'}",
            f"--rootdir={ROOT}",
            f"--junitxml={report}",
            *options,
        ],
        cwd=report.parent,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    outcomes: Counter[str] = Counter()
    if report.exists():
        for case in ET.parse(report).iter("testcase"):
            bad = {child.tag for child in case} & {"failure", "error", "skipped"}
            outcomes[min(bad, default="passed")] += 1
    outcomes["exit status"] = ended.returncode
    return outcomes, ended.stdout + ended.stderr


def problem_of(outcomes: Counter[str]) -> str | None:
    """Why a run does not count as a success."""
    if outcomes["passed"] == 0:
        return "no test passed"
    if outcomes["failure"] or outcomes["error"] or outcomes["skipped"]:
        return "a test failed or was left out"
    return "pytest failed" if outcomes["exit status"] else None


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "marked", ["not soak", pytest.param("soak", marks=pytest.mark.soak)], ids=["short", "rest"]
)
def test_kernels_in_the_interpreter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], marked: str
) -> None:
    outcomes, output = run_interpreted(
        FOLDER, tmp_path / "report.xml", "-m", marked, seconds=540 if marked == "not soak" else 3500
    )
    with capsys.disabled():
        names = ("passed", "failure", "error", "skipped")
        counts = ", ".join(f"{outcomes[name]} {name}" for name in names)
        print(f"\nkernels in Triton's interpreter: {counts}")
    assert problem_of(outcomes) is None, output


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (PASSES, None),
        (PASSES + "def test_fails():\n    assert False\n", "a test failed or was left out"),
        (
            PASSES + "import pytest\ndef test_left_out():\n    pytest.skip('so')\n",
            "a test failed or was left out",
        ),
        ("import no_such_module\n", "no test passed"),
        ("", "no test passed"),
    ],
)
def test_a_bad_run_is_seen(tmp_path: Path, source: str, problem: str | None) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "test_inner.py").write_text(source)
    outcomes, output = run_interpreted(inner, tmp_path / "report.xml")
    assert problem_of(outcomes) == problem, output
