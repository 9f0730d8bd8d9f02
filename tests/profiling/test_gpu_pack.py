"""The GPU pack's run: stages that end, fail, hang or are killed, and its rehearsal on the CPU."""

from __future__ import annotations

import filecmp
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.kit.waiting import until
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.decode_harness.cells import Scale, groups
from vllm_ssdkv.profiling.gpu_pack import __main__ as command
from vllm_ssdkv.profiling.gpu_pack import store
from vllm_ssdkv.profiling.gpu_pack.orchestrate import LOG_BYTES, Orchestrator, Plan, Stage
from vllm_ssdkv.profiling.gpu_pack.results import (
    NO_TIME,
    RESULTS,
    STAGE,
    Figure,
    ResultLog,
    Row,
    latest,
    read_rows,
)
from vllm_ssdkv.profiling.gpu_pack.stage import StageRun
from vllm_ssdkv.profiling.gpu_pack.vllm_cells import CELLS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STAGES = Path(__file__).parent / "gpu_stages"
PACKED = ROOT / "build" / "gpu_pack" / "site"
PATIENCE_S = 60.0

DRIVER = """
import sys
from pathlib import Path
from vllm_ssdkv.profiling.gpu_pack import __main__ as command
from vllm_ssdkv.profiling.gpu_pack.orchestrate import Stage
command.STAGES = tuple(Stage(name, f"{name}_stage", 60, 60) for name in sys.argv[2:])
command.main(["--rehearse", "--out", sys.argv[1]])
"""
"""The command with other stages."""


def plan(*stages: tuple[str, float], seconds: float = 100.0) -> Plan:
    environment = {**os.environ, "PYTHONPATH": str(STAGES)}
    made = [Stage(name, f"{name}_stage", limit, limit) for name, limit in stages]
    return Plan(made, seconds, True, environment)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def by_case(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row.stage, row.case): row for row in rows}


class TestResults:
    """The file that must outlive everything."""

    def test_rows_come_back(self, tmp_path: Path) -> None:
        log = ResultLog(tmp_path)
        row = Row(
            "a", "b", False, 1.5, [Figure("rate", 3.0, "GB/s"), Figure("name", "x")], "why\nso"
        )
        log.append(row)
        assert log.rows() == [row]
        assert "FAILED a: b" in (tmp_path / "report.txt").read_text()

    def test_a_line_that_was_cut_off_is_left_out(self, tmp_path: Path) -> None:
        log = ResultLog(tmp_path)
        log.append(Row("a", "b"))
        path = tmp_path / RESULTS
        whole = path.read_text()
        path.write_text(whole + whole[:20])
        assert log.rows() == [Row("a", "b")]
        path.write_text(whole[:20] + "\n" + whole)
        with pytest.raises(BenchError, match="not a result"):
            log.rows()


class TestOrchestrator:
    """Stages one after the other."""

    def test_a_stage_that_hangs_is_ended_with_its_children_and_the_next_one_runs(
        self, tmp_path: Path
    ) -> None:
        begin = time.monotonic()
        stages = plan(("good", 60), ("hanging", 8), ("good", 60))
        assert not Orchestrator(stages, tmp_path).run()
        rows = ResultLog(tmp_path).rows()
        assert [(row.stage, row.case, row.ok) for row in rows] == [
            *[("good", "one", True), ("good", STAGE, True)],
            *[("hanging", "begun", True), ("hanging", STAGE, False)],
            *[("good", "one", True), ("good", STAGE, True)],
        ]
        ended = rows[3]
        assert ended.error == "it did not end in 8 s and was ended by SIGKILL"
        assert 8 <= ended.seconds < 20
        assert time.monotonic() - begin < PATIENCE_S
        for figure in rows[2].figures:
            assert not is_alive(int(figure.value)), figure.name

    def test_what_fails_is_told_and_the_log_is_cut(self, tmp_path: Path) -> None:
        assert not Orchestrator(plan(("bad", 60)), tmp_path).run()
        rows = by_case(ResultLog(tmp_path).rows())
        assert rows["bad", "wrong"].error.endswith("ValueError: not what it should be")
        assert rows["bad", "wrong"].figures == [Figure("half", 0.5)]
        assert rows["bad", "right"].ok
        assert rows["bad", STAGE].error == "its process ended with status 7"
        log = (tmp_path / "log.bad.txt").read_bytes()
        assert LOG_BYTES < len(log) < LOG_BYTES + 100
        assert log.endswith(b"cut here]\n")
        report = (tmp_path / "report.txt").read_text()
        assert "failed: bad: wrong" in report
        assert "NOT all stages ended well" in report

    def test_a_stage_without_a_module_or_a_result_has_failed(self, tmp_path: Path) -> None:
        assert not Orchestrator(plan(("missing", 60)), tmp_path).run()
        (row,) = ResultLog(tmp_path).rows()
        assert (row.case, row.ok) == (STAGE, False)
        assert "missing_stage" in (tmp_path / "log.missing.txt").read_text()

    def test_no_stage_begins_after_the_end(self, tmp_path: Path) -> None:
        assert not Orchestrator(plan(("good", 60), seconds=0.5), tmp_path).run()
        (row,) = ResultLog(tmp_path).rows()
        assert row.error == NO_TIME
        assert not (tmp_path / "log.good.txt").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_run_leaves_the_results_before(tmp_path: Path, number: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(STAGES), "TMPDIR": str(tmp_path)}
    run = subprocess.Popen(
        [sys.executable, "-P", "-c", DRIVER, str(tmp_path), "good", "hanging"], env=environment
    )
    path = tmp_path / RESULTS
    until(lambda: ("hanging", "begun") in by_case(list(read_rows(path))), "the second stage")
    run.send_signal(number)
    assert run.wait(PATIENCE_S) == (-number if number == signal.SIGKILL else 128 + number)
    rows = by_case(list(read_rows(path)))
    assert rows["good", "one"].figures == [Figure("answer", 42, "GB/s")]
    assert rows["good", STAGE].ok
    pids = [int(figure.value) for figure in rows["hanging", "begun"].figures]
    if number == signal.SIGTERM:
        until(lambda: not any(map(is_alive, pids)), "the end of the stage")
    else:
        # A stage is told that its parent is gone; this one is deaf.
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_stages_are_chosen_by_name() -> None:
    assert [stage.name for stage in command.chosen("store,machine")] == ["machine", "store"]
    assert command.chosen(None) == list(command.STAGES)
    for wrong in ("kernel", "", ","):
        with pytest.raises(ValueError, match="the stages are machine, vllm, kernels"):
            command.chosen(wrong)


def test_a_run_that_goes_on_leaves_out_what_is_done(tmp_path: Path) -> None:
    log = ResultLog(tmp_path)
    failed = "digest of the weights"

    def run() -> list[str]:
        before = len(log.rows())
        store.run(StageRun("store", log, rehearsal=True, seconds=60))
        return [row.case for row in log.rows()[before:]]

    assert failed in run()
    assert run() == []
    kept = [row for row in log.rows() if row.case != failed]
    (tmp_path / RESULTS).unlink()
    for row in (*kept, Row("store", failed, ok=False)):
        log.append(row)
    assert run() == [failed]
    assert [row.ok for row in latest(log.rows()) if row.case == failed] == [True]


def test_a_stage_that_lacks_nothing_is_a_good_one(tmp_path: Path) -> None:
    assert Orchestrator(plan(("good", 60)), tmp_path).run()
    assert Orchestrator(plan(("done", 60)), tmp_path).run() is False
    ResultLog(tmp_path).append(Row("done", "one"))
    assert Orchestrator(plan(("done", 60)), tmp_path).run()


def test_results_of_a_gpu_and_of_a_rehearsal_are_kept_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Figure("device", "NVIDIA H200")
    ResultLog(tmp_path).append(Row("machine", "GPU", figures=[device]))
    with pytest.raises(SystemExit):
        command.main(["--rehearse", "--stages", "store", "--out", str(tmp_path)])
    assert "results of a GPU are there" in capsys.readouterr().err
    assert len(ResultLog(tmp_path).rows()) == 1


def test_a_few_stages_have_the_time_of_all() -> None:
    alone = command.stretched(command.chosen("vllm"), 300)
    assert [(stage.seconds, stage.rehearsal_seconds) for stage in alone] == [(300, 300)]
    assert command.stretched(command.STAGES, 300) == list(command.STAGES)
    for wrong in ("511", "0", "nan"):
        with pytest.raises(SystemExit):
            command.main(["--seconds", wrong])


def test_a_run_has_at_most_eight_files_and_nine_minutes() -> None:
    assert len({stage.log for stage in command.STAGES}) + 2 <= 8
    assert command.SECONDS <= 9 * 60


def rehearse(python: str, out: Path, stages: str | None, **environment: str) -> list[Row]:
    """Rows of a rehearsal, with its own exit status checked."""
    given = [] if stages is None else ["--stages", stages]
    ended = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu/run.sh"), "--rehearse", "--out", str(out), *given],
        env={**os.environ, "PYTHON": python, "TMPDIR": str(out), **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    log = ResultLog(out)
    report = out / "report.txt"
    told = report.read_text() if report.exists() else ended.stdout + ended.stderr
    assert ended.returncode == 0, told
    return log.rows()


# ---- what travels is complete ----


def needed(names: list[str]) -> set[str]:
    """Distributions that these need here, themselves included."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return found


def link(names: set[str], target: Path) -> None:
    """Links to what these distributions have installed."""
    for name in names:
        for file in metadata.files(name) or []:
            top = file.parts[0]
            if top in ("..", "bin", "__pycache__") or (target / top).exists():
                continue
            (target / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))


def link_package(target: Path) -> None:
    """Links to this package's files. Its native modules may lie elsewhere than the others."""
    target.mkdir()
    native = importlib.util.find_spec("vllm_ssdkv._io")
    sources = importlib.util.find_spec("vllm_ssdkv")
    for spec in (sources, native):
        assert spec is not None
        assert spec.origin is not None
        for path in Path(spec.origin).parent.iterdir():
            if not (target / path.name).exists():
                (target / path.name).symlink_to(path)


def packed_names() -> list[str]:
    """Packages that travel beside this one."""
    text = (ROOT / "scripts/gpu/pack.sh").read_text()
    found = re.search(r"\$\(pins (msgspec[^)]*)\)", text)
    assert found is not None
    return found[1].replace("\\", " ").split()


def is_current(site: Path) -> bool:
    """Compare a packed site with today's Python files; it needs native modules for this Python."""
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    if not list(site.glob(f"vllm_ssdkv/_io.{tag}*.so")):
        return False
    folders = {"vllm_ssdkv": "vllm_ssdkv", "profiling": "vllm_ssdkv/profiling"}
    folders["triton_kernels"] = "vllm_ssdkv/triton_kernels"
    for source, packed in folders.items():
        for path in (ROOT / source).rglob("*.py"):
            within = path.relative_to(ROOT / source)
            if source == "vllm_ssdkv" and within.parts[0] in ("profiling", "triton_kernels"):
                continue
            there = site / packed / within
            if not there.exists() or not filecmp.cmp(path, there, shallow=False):
                return False
    return True


@pytest.fixture
def empty_python(tmp_path: Path) -> tuple[str, str]:
    """A Python with PyTorch, Triton, Transformers and what these need, and where what travels is:
    the packed folder if it is of today's sources, else the same packages of this environment."""
    place = tmp_path / "empty"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=PATIENCE_S
    )
    (site,) = place.glob("lib/python*/site-packages")
    link(needed(["torch", "triton", "numpy", "transformers"]) - set(packed_names()), site)
    travels = PACKED
    if not is_current(PACKED):
        travels = tmp_path / "travels"
        travels.mkdir()
        link(set(packed_names()), travels)
        link_package(travels / "vllm_ssdkv")
    return str(place / "bin" / "python"), str(travels)


def test_a_rehearsal_needs_no_more_than_pytorch_and_what_travels(
    empty_python: tuple[str, str], tmp_path: Path
) -> None:
    python, travels = empty_python
    out = tmp_path / "out"
    out.mkdir()
    stages = [stage.name for stage in command.STAGES if stage.name != "vllm"]
    given = rehearse(python, out, ",".join(stages), PYTHONPATH=travels)
    rows = by_case(given)
    assert [row.stage for row in given if row.case == STAGE] == stages
    assert all(row.ok for row in given)
    assert rows["store", "reads of the disk, uring"].figures[0] == Figure("O_DIRECT", "yes") or (
        rows["store", "reads of the disk, threads"].figures[0] == Figure("O_DIRECT", "no")
    )
    software = {figure.name: figure.value for figure in rows["machine", "software"].figures}
    assert software["vllm"] == "missing"
    names = {path.name for path in out.iterdir() if path.is_file()}
    assert names == {RESULTS, "report.txt", *(s.log for s in command.STAGES if s.name in stages)}
    check_decoding({row.case: row for row in given if row.stage == "decode"})


def check_decoding(rows: dict[str, Row]) -> None:
    """Every case was measured, and reads what it says."""
    found = {case: {f.name: f.value for f in row.figures} for case, row in rows.items()}
    measured = {case: row for case, row in found.items() if "tokens_per_s" in row}
    assert len(measured) == sum(len(group.cases) for group in groups(Scale.rehearsal()))
    for row in measured.values():
        assert float(row["tokens_per_s"]) > 0
        assert float(row["layer_ms.model"]) > 0
    exact, some = (measured[f"2048 tokens, batch 1, DRAM, {name}"] for name in ("exact", "bounds"))
    whole = float(exact["bytes_per_token.dram_whole_context"])
    assert float(some["bytes_per_token.dram_token_pages"]) < whole / 7
    drive = measured["8192 tokens, batch 1, drive, exact"]
    assert float(drive["bytes_per_token.drive_read"]) > 0


def test_an_environment_without_vllm_says_so(empty_python: tuple[str, str], tmp_path: Path) -> None:
    python, travels = empty_python
    alone = tmp_path / "alone" / "site"
    alone.mkdir(parents=True)
    for package in Path(travels).iterdir():
        # Copied, since the packed vLLM is looked for beside what a link points to.
        if package.name == "vllm_ssdkv":
            shutil.copytree(package, alone / package.name, symlinks=False)
        else:
            (alone / package.name).symlink_to(package)
    out = tmp_path / "out"
    out.mkdir()
    begin = time.monotonic()
    subprocess.run(
        [
            *(python, "-P", "-m", "vllm_ssdkv.profiling.gpu_pack", "--rehearse"),
            *("--stages", "vllm", "--out", str(out)),
        ],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(alone), "TMPDIR": str(tmp_path)},
        timeout=PATIENCE_S,
        check=False,
    )
    assert time.monotonic() - begin < PATIENCE_S / 2
    first, stage = ResultLog(out).rows()
    assert (first.case, first.ok, stage.ok) == ("import of vLLM", False, False)
    assert first.error.startswith("BenchError: vLLM is not installed here, and ")
    assert first.error.endswith("vllm.tar.xz is not there")


@pytest.mark.soak
def test_engines_of_vllm_give_the_tokens_of_stock(tmp_path: Path) -> None:
    rows = rehearse(sys.executable, tmp_path, "vllm")
    cases = ["import of vLLM", *(cell.name for cell in CELLS), STAGE]
    assert [(row.case, row.ok) for row in rows] == [(case, True) for case in cases]
    figures = {row.case: {f.name: f.value for f in row.figures} for row in rows}
    assert figures["import of vLLM"]["engines"] == "forked"
    for cell in CELLS:
        found = figures[cell.name]
        if cell.cuda_only:
            assert list(found) == ["not measured"]
        elif cell.speed:
            kind = "found" if cell.stored else "computed"
            assert float(found[f"first token, 64 tokens, {kind}"]) > 0
        else:
            assert found["cached tokens"] == (1088 if cell.connector else 0)
