"""``ssdkv demo``: its checks, its processes, its folders; and once for real."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.kit.waiting import until
from vllm_ssdkv.base.errors import StoreError, StoreLockedError
from vllm_ssdkv.cli.demo import demo, directories
from vllm_ssdkv.cli.demo.plan import PHASES, TIMES_CAPACITY, DemoPlan, Phase
from vllm_ssdkv.cli.demo.report import Report
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.rig import child_process
from vllm_ssdkv.profiling.rig.child_process import Event, PhaseError, run_process

Devices = Callable[[int], list[Path]]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's default folder, away from the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ssdkv-demo"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", *arguments])


# --- options


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--context", "2047"], "--context"),
        (["--context", "40000"], "--context"),
        (["--context", "8192", "--kv-capacity", "2080"], "2048"),
        (["--kv-capacity", "511"], "512"),
        (["--requests", "0"], "--requests"),
        (["--dir", "/no/such/directory"], "/no/such/directory"),
    ],
)
def test_bad_options_start_nothing(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run_phase", lambda *_: pytest.fail("a phase was started"))
    result = run(*arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_a_directory_given_twice_is_refused(tmp_path: Path) -> None:
    result = run("--dir", str(tmp_path), "--dir", f"{tmp_path}/../{tmp_path.name}")
    assert result.exit_code == 2
    assert "once" in result.output


def test_the_plan_survives_the_command_line() -> None:
    plan = DemoPlan(("/a b", "/c"), 8, 8192, 2048, seed=3)
    assert DemoPlan.from_json(plan.to_json()) == plan


def test_phases_differ_in_kv_memory_and_connector_only() -> None:
    plan = DemoPlan(("/a",), 8, 8192, 2048)
    page, restart, stock = (plan.engine_settings(phase) for phase in PHASES)
    assert page == restart
    assert set(page) - set(stock) == {"kv_transfer_config"}
    assert {k for k in stock if stock[k] != page[k]} == {"kv_cache_memory_bytes"}
    assert page["kv_cache_memory_bytes"] == 2048 * bytes_per_token() == 2048 * 1536
    assert stock["kv_cache_memory_bytes"] >= 8 * 8192 * bytes_per_token()


def test_the_user_s_kv_memory_does_not_replace_the_plan_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert not any(
        "VLLM_CPU_KVCACHE_SPACE" in child_process.environment(stock=stock)
        for stock in (True, False)
    )


def test_stock_vllm_runs_without_plugins() -> None:
    assert child_process.environment(stock=True)["VLLM_PLUGINS"] == ""
    assert child_process.environment(stock=False).get("VLLM_PLUGINS") == os.environ.get(
        "VLLM_PLUGINS"
    )


# --- folders


def test_cleaning_removes_the_demo_s_own_files_only(tmp_path: Path) -> None:
    stores = directories.places([tmp_path])
    assert stores == (tmp_path / "ssdkv-demo",)
    neighbour = tmp_path / "rank0.data"
    for path in (neighbour, stores[0] / "rank0.data", stores[0] / "journal"):
        path.write_bytes(b"x")
    directories.remove(stores)
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["rank0.data"]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    stores = directories.places([tmp_path])
    (stores[0] / "journal").touch()
    (stores[0] / "thesis.tex").touch()
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        directories.clean(stores)
    assert (stores[0] / "journal").exists()
    result = run("--dir", str(tmp_path))
    assert result.exit_code == 1
    assert "thesis.tex" in result.output


def test_a_store_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "_LOCK_WAIT_S", 0.0)
    stores = directories.places([tmp_path])
    with (stores[0] / "rank0.data").open("wb") as data:
        fcntl.flock(data, fcntl.LOCK_EX)
        with pytest.raises(StoreLockedError, match="in use"):
            directories.clean(stores)
        assert (stores[0] / "rank0.data").exists()
    directories.clean(stores)
    assert not (stores[0] / "rank0.data").exists()


# --- processes


def script(text: str) -> list[str]:
    """A command whose last argument is the descriptor for events, `events` in its text."""
    head = "import os, sys, time, subprocess\nevents = os.fdopen(int(sys.argv[1]), 'w')\n"
    return [sys.executable, "-c", head + text]


def child(text: str, log: Path, timeout_s: float = 60.0) -> tuple[Event, list[Event]]:
    seen: list[Event] = []
    return run_process(script(text), os.environ, log, timeout_s, seen.append), seen


def test_events_arrive_in_order_and_output_goes_to_the_log(tmp_path: Path) -> None:
    text = """
for line in ('{"event": "ready"}', '{"event": "result", "n": 7}'):
    print(line, file=events, flush=True)
print("to the log")
"""
    result, seen = child(text, tmp_path / "log")
    assert result["n"] == 7
    assert [event["event"] for event in seen] == ["ready", "result"]
    assert child_process.tail(tmp_path / "log") == "to the log"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 9)", "signal 9"),
        ("pass", "without a result"),
        ('print(\'{"event": "result"}\', file=events, flush=True)\nsys.exit(1)', "exit code 1"),
    ],
)
def test_a_failed_process_is_told(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PhaseError, match=reason):
        child(text, tmp_path / "log")


@pytest.mark.parametrize("close", ["", "events.close()\n"])
def test_a_hanging_process_is_ended_with_its_children(
    close: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"""
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(inner.pid, os.getpid(), flush=True)
print('{{"event": "ready"}}', file=events, flush=True)
{close}time.sleep(600)
"""
    read, late = child_process._events, 0.0

    def events(fd: int, deadline: float) -> Iterator[Event]:
        """Its time is up when it has said that it is ready, or has closed the pipe."""
        nonlocal late
        for event in read(fd, deadline):
            late = 0.0 if close else 60.0
            yield event
        late = 60.0

    monkeypatch.setattr(child_process, "_events", events)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late)
    monkeypatch.setattr(child_process, "time", clock)
    with pytest.raises(PhaseError, match="did not end within 60 s"):
        child(text, tmp_path / "log")
    pids = [int(pid) for pid in child_process.tail(tmp_path / "log").split()]
    assert len(pids) == 2
    until(lambda: not any(alive(pid) for pid in pids), "a process was left behind")


def test_a_signal_in_the_middle_of_a_start_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401 - handed on
        started.append(popen(*arguments, **options))
        signal.raise_signal(signal.SIGTERM)
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(child_process.subprocess, "Popen", start)
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            child("time.sleep(600)", tmp_path / "log")
    finally:
        signal.signal(signal.SIGTERM, handler)
    left = started[0].poll() is None
    started[0].kill()
    assert not left


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# --- the verdict


def report(**changes: Callable[[dict[Phase, Event]], None]) -> Report:
    """A report of a run in which everything went well, but for ``changes``."""
    plan = DemoPlan(("/a",), 2, 2048, 512)
    questions = plan.questions()
    found = {"page": 0, "restart": 2016, "stock": 0}
    results: dict[Phase, Event] = {
        phase: {
            "kv_tokens": 512,
            "in_flight_tokens": 128,
            "peak_kv_tokens": 300,
            "metrics": [{"name": "bytes_read", "labels": {"device": "/a"}, "value": 8}],
            "requests": [
                {
                    "tokens": list(question.answer),
                    "from_store": found[phase],
                    "ttft_s": 1.0,
                    "prefill_s": 1.0,
                    "preemptions": 0,
                }
                for question in questions
            ],
        }
        for phase in PHASES
    }
    for change in changes.values():
        change(results)
    return Report(plan, questions, results, 4096, {"/a": 4096})


def other_token(phase: Phase) -> Callable[[dict[Phase, Event]], None]:
    def change(results: dict[Phase, Event]) -> None:
        results[phase]["requests"][1]["tokens"][2] += 1

    return change


def test_a_good_run_has_no_problems() -> None:
    good = report()
    assert good.problems() == good.notes() == []
    assert "all tokens identical to stock vLLM" in good.summary()
    assert "2 contexts of 2,048 tokens served from a KV cache of 512 tokens" in good.summary()
    figures = json.loads(json.dumps(good.figures(1.5)))
    assert figures["problems"] == []
    assert figures["bytes_read_after_restart"] == 8
    assert [request["right"] for request in figures["requests"]] == [True, True]


@pytest.mark.parametrize(("phase", "named"), [("page", "first run"), ("restart", "restart")])
def test_a_token_that_differs_from_stock_is_a_problem(phase: Phase, named: str) -> None:
    (problem,) = report(change=other_token(phase)).problems()
    assert "request 1" in problem
    assert "token 2" in problem
    assert named in problem


def test_a_missing_token_is_a_problem() -> None:
    def change(results: dict[Phase, Event]) -> None:
        results["page"]["requests"][0]["tokens"].pop()

    assert len(report(change=change).problems()) == 1


def test_a_mistake_of_the_model_is_a_note() -> None:
    changes = {phase: other_token(phase) for phase in PHASES}
    wrong = report(**changes)
    assert wrong.problems() == []
    assert "wrong in 1 answers" in " ".join(wrong.notes())


def test_a_context_that_is_not_found_again_is_a_problem() -> None:
    def change(results: dict[Phase, Event]) -> None:
        results["restart"]["requests"][0]["from_store"] = 1984

    (problem,) = report(change=change).problems()
    assert "1984 of 2016" in problem


def test_a_kv_cache_that_holds_a_context_is_a_problem() -> None:
    def change(results: dict[Phase, Event]) -> None:
        results["page"]["kv_tokens"] = 544

    (problem,) = report(change=change).problems()
    assert "544" in problem


def test_troubles_on_the_way_are_notes() -> None:
    def change(results: dict[Phase, Event]) -> None:
        labels = {"device": "/a", "kind": "eio"}
        results["page"]["metrics"].append({"name": "io_errors", "labels": labels, "value": 3})
        results["page"]["requests"][0]["from_store"] = 32

    notes = report(change=change).notes()
    assert "io_errors 3" in notes[0]
    assert "--keep" in notes[1]


def test_problems_end_the_demo_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = report(change=other_token("restart"))
    monkeypatch.setattr(demo, "_run", lambda *_: bad)
    result = run("--json")
    assert result.exit_code == 1
    assert "FAILED" in result.stderr
    assert "identical" not in result.output
    assert json.loads(result.stdout)["problems"] == bad.problems()


def test_a_failing_phase_shows_its_log(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    def fail(plan: DemoPlan, phase: Phase, log: Path, *_: object) -> Event:
        log.write_text("first\n" * child_process.TAIL_LINES + "the cause\n")
        raise PhaseError("failed with exit code 9")

    monkeypatch.setattr(demo, "run_phase", fail)
    result = run()
    assert result.exit_code == 1
    assert "the cause" in result.output
    assert "exit code 9" in result.output
    assert str(own_home / "page.log") in result.output.replace("\n", "")
    assert sorted(path.name for path in own_home.iterdir()) == ["page.log"]


def test_the_tables_fit_a_terminal() -> None:
    full = DemoPlan(("/a",), 8, 8192, 2048)
    request = {"from_store": 8160, "ttft_s": 123.45, "preemptions": 0}
    requests = [{**request, "tokens": list(q.answer)} for q in full.questions()]
    result = {"kv_tokens": 2048, "in_flight_tokens": 512, "requests": requests, "metrics": []}
    whole = Report(full, full.questions(), dict.fromkeys(PHASES, result), 53248, {})
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(whole.first_run(), whole.second_run())
    assert "…" not in console.export_text()


# --- for real


@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_the_demo_keeps_its_promise(tmp_devices: Devices, tmp_path: Path) -> None:
    drives = tmp_devices(3)
    command = [sys.executable, "-P", "-c", "from vllm_ssdkv.cli.main import app; app()", "demo"]
    options = ["--requests", "4", "--context", "2048", "--kv-capacity", "512"]
    for directory in drives:
        options += ["--dir", str(directory)]
    ended = subprocess.run(
        [*command, *options, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all tokens identical to stock vLLM" in " ".join(ended.stderr.replace("│", " ").split())
    figures = json.loads(ended.stdout)
    assert figures["problems"] == []
    for phase in ("page", "restart"):
        assert figures["phases"][phase]["kv_tokens"] * TIMES_CAPACITY <= 2048
        assert figures["phases"][phase]["peak_kv_tokens"] <= 512
    assert figures["phases"]["stock"]["kv_tokens"] >= 4 * 2048
    assert len(figures["requests"]) == 4
    for request in figures["requests"]:
        answers = [request[phase]["tokens"] for phase in PHASES]
        assert answers == [request["answer"]] * 3
        assert request["context_tokens"] == 2048
        assert request["answer_distance_tokens"] > figures["hbm_tokens_per_request"]
        assert request["page"]["from_store"] == 0
        assert request["restart"]["from_store"] == 2016
        assert all(request[phase]["ttft_s"] > 0 for phase in PHASES)
    assert figures["bytes_read_after_restart"] >= 4 * 2016 * 1536
    assert [list(directory.iterdir()) for directory in drives] == [[], [], []]
