"""The I/O bench: its arithmetic, what it refuses, what it checks, and that it leaves nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.child import Child
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import KIB, MIB
from vllm_ssdkv.profiling.bench_io import fio, pools
from vllm_ssdkv.profiling.bench_io.case import MEMORY_BYTES, Case, Sample, device_counts, plan
from vllm_ssdkv.profiling.bench_io.engines import EngineContender, engine_kinds
from vllm_ssdkv.profiling.bench_io.files import FOLDER, BenchFile, bench_files, read_stamps
from vllm_ssdkv.profiling.bench_io.model import GEN4
from vllm_ssdkv.profiling.bench_io.rivals import contender_names, gather
from vllm_ssdkv.profiling.bench_io.run import Result, ratio, run_case
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

REGION = 4 * MIB


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena(8 * MIB)
    yield arena
    arena.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[BenchFile]]:
    with bench_files([tmp_path], 2, REGION) as files:
        yield files


# --- arithmetic


@given(st.integers(1, 64))
def test_device_counts_double_and_end_with_all(devices: int) -> None:
    counts = device_counts(devices)
    assert counts[-1] == devices
    assert counts[:-1] == [2**n for n in range(len(counts) - 1)]
    assert counts == sorted(set(counts))


@given(
    st.builds(
        Case,
        st.sampled_from(Op),
        st.integers(1, 1024).map(lambda pages: pages * 4096),
        st.integers(1, 1024),
        st.integers(1, 64),
    )
)
def test_a_batch_keeps_every_queue_full(case: Case) -> None:
    assert case.batch_requests >= case.in_flight
    assert case.batch_requests % case.devices == 0
    assert case.batch_requests * case.nbytes <= max(64 * MIB, case.memory_bytes)


def test_a_plan_leaves_out_what_needs_too_much_memory() -> None:
    cases, left_out = plan([Op.READ, Op.WRITE], [4 * KIB, 4 * MIB], [64, 1], 4)
    assert len(cases) + len(left_out) == 2 * 3 * 2 * 2
    assert {(case.nbytes, case.depth, case.devices) for case in left_out} == {
        (4 * MIB, 64, 2),
        (4 * MIB, 64, 4),
    }
    assert all(case.memory_bytes <= MEMORY_BYTES for case in cases)


def test_figures_of_a_sample() -> None:
    sample = Sample(seconds=2.0, requests=1000, nbytes=4_096_000, cpu_s=0.5)
    assert sample.bytes_per_s == 2_048_000
    assert sample.iops == 500
    assert sample.cpu_us_per_io == pytest.approx(500)
    assert sample.cpu_s_per_gb == pytest.approx(0.5 / 4.096e-3)


def test_the_model_knows_what_limits_it() -> None:
    assert GEN4.bytes_per_s(MIB) == pytest.approx(7e9 / 47)
    assert GEN4.bytes_per_s(4096) / 4096 == pytest.approx(1e6 / 47)  # bound by IOPS
    # With one request in flight the latency counts: 7.5 of each 87.5 us are transfer.
    assert GEN4.bytes_per_s(52_500, 1) == pytest.approx(52_500 / 87.5e-6 / 47)
    assert GEN4.bytes_per_s(MIB, 64) == GEN4.bytes_per_s(MIB)
    assert GEN4.slower(5).bytes_per_s(MIB) == pytest.approx(GEN4.bytes_per_s(MIB) / 5)


def result(rates: list[float], error: str | None = None) -> Result:
    case = Case(Op.READ, 4096, 1, 1)
    samples = [Sample(1.0, 1, int(rate), 0.1) for rate in rates]
    return Result(case, "x", samples, error=error)


def test_a_ratio_is_of_medians_and_of_nothing_else() -> None:
    assert ratio(result([30, 10, 20]), result([40, 1000, 1])) == 0.5
    assert ratio(result([1]), None) is None
    assert ratio(result([1]), result([])) is None
    assert ratio(result([1], error="EIO"), result([1])) is None


# --- files


def test_every_page_says_where_it_belongs(files: list[BenchFile]) -> None:
    for file in files:
        assert os.fstat(file.fd).st_size == 2 * REGION
        whole = np.fromfile(file.path, np.uint8)
        assert (read_stamps(whole) == file.stamps(0, 2 * REGION)).all()
    assert not np.intersect1d(files[0].stamps(0, REGION), files[1].stamps(0, REGION)).size


def test_nothing_is_left_and_two_benches_exclude_each_other(tmp_path: Path) -> None:
    with bench_files([tmp_path], 1, REGION):
        with (
            pytest.raises(BenchError, match="another bench is running"),
            bench_files([tmp_path], 1, REGION),
        ):
            pass
        assert (tmp_path / FOLDER / "0.data").exists()
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError, match=r"too full|make room|allows"),
        bench_files([tmp_path], 1, 1 << 50),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
from pathlib import Path
from vllm_ssdkv.profiling.bench_io.files import bench_files
with bench_files([Path(sys.argv[1])], 1, 4 << 20) as files:
    (files[0].folder / "blocks").mkdir()
    (files[0].folder / "blocks" / "0.bin").write_bytes(b"x")
    print("up", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_bench_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with Child.python("-P", "-c", KILLED, tmp_path) as child:
        assert child.hear() == "up"
    assert (tmp_path / FOLDER / "blocks" / "0.bin").exists()
    deadline = time.monotonic() + 10  # the kernel closes the lock a moment after the end
    while True:
        try:
            with bench_files([tmp_path], 1, REGION):
                assert sorted(p.name for p in (tmp_path / FOLDER).iterdir()) == ["0.data"]
            break
        except BenchError:
            assert time.monotonic() < deadline
    assert list(tmp_path.iterdir()) == []


# --- contenders


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("name", contender_names())
def test_contenders_move_the_right_bytes(
    files: list[BenchFile], arena: Arena, name: str, op: Op
) -> None:
    field = gather(files, arena, [name])
    if name in field.absent:
        pytest.skip(f"{name}: {field.absent[name]}")
    (contender,) = field.contenders
    assert contender.name == name
    # LMCache takes one directory.
    case = Case(op, 16 * KIB, 3, 1 if name == "lmcache" else 2)
    assert contender.refuses(case) is None
    contender.check(case)
    sample = contender.run(case, 0.02)
    assert sample.requests >= case.in_flight
    assert sample.nbytes == sample.requests * case.nbytes
    assert sample.cpu_s >= 0
    # Reads left the file alone, and writes the region for reads.
    for file in files:
        before = np.fromfile(file.path, np.uint8, REGION)
        assert (read_stamps(before) == file.stamps(0, REGION)).all()


def test_wrong_bytes_are_no_result(files: list[BenchFile], arena: Arena) -> None:
    contenders = (EngineContender("threads", files, arena), pools.ThreadContender(files, arena))
    with open(files[0].path, "r+b") as file:
        file.write(bytes(REGION))
    for contender in contenders:
        (found,) = run_case(Case(Op.READ, 64 * KIB, 8, 1), [contender], 1, 0.01)
        assert found.error is not None
        assert "hold something else" in found.error
        assert found.samples == []
    assert "hold something else" in gather(files, arena, ["ssdkv threads"]).absent["ssdkv threads"]


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Fake:
        detail = ""

        def __init__(self, name: str, refuse: str | None = None) -> None:
            self.name, self._refuse = name, refuse

        def refuses(self, case: Case) -> str | None:
            return self._refuse

        def check(self, case: Case) -> None:
            ran.append(f"check {self.name}")

        def run(self, case: Case, seconds: float) -> Sample:
            ran.append(self.name)
            if self.name == "c" and ran.count("c") == 2:
                raise BenchError("EIO")
            return Sample(seconds, 1, 1, 0.0)

    fakes = [Fake("a"), Fake("b", "too deep"), Fake("c")]
    a, b, c = run_case(Case(Op.READ, 4096, 1, 1), fakes, 3, 0.1)
    assert ran == ["check a", "check c", "a", "c", "c", "a", "a"]
    assert (len(a.samples), a.measured) == (3, True)
    assert (b.refused, b.samples) == ("too deep", [])
    assert (c.error, c.measured) == ("EIO", False)


def test_all_our_engines_take_part() -> None:
    assert "threads" in engine_kinds()
    assert not {"auto", "noop"} & set(engine_kinds())
    assert {f"ssdkv {kind}" for kind in engine_kinds()} <= set(contender_names())


# --- fio


def job(nbytes: int, ios: int, error: int = 0) -> dict[str, object]:
    moved = {"io_bytes": nbytes, "total_ios": ios, "runtime": 500}
    nothing = {"io_bytes": 0, "total_ios": 0, "runtime": 0}
    return {
        "jobname": "device0",
        "error": error,
        "usr_cpu": 10.0,
        "sys_cpu": 30.0,
        "job_runtime": 500,
        "read": moved,
        "write": nothing,
    }


def test_fio_s_jobs_are_added_up() -> None:
    text = "fio: a warning\n" + json.dumps({"jobs": [job(4096_000, 1000), job(2048_000, 500)]})
    sample = fio.parse_sample(text, Case(Op.READ, 4096, 4, 2))
    assert sample == Sample(seconds=0.5, requests=1500, nbytes=6144_000, cpu_s=0.4)


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "{}",
        json.dumps({"jobs": [job(4096, 1, error=5)]}),
        json.dumps({"jobs": [job(0, 0)]}),
        json.dumps({"jobs": [job(4096, 1)] * 2}),
    ],
)
def test_what_fio_did_not_measure_is_no_sample(text: str) -> None:
    with pytest.raises(BenchError, match="fio"):
        fio.parse_sample(text, Case(Op.READ, 4096, 1, 1))


def test_fio_uses_reserved_huge_pages_where_they_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(fio, "_MEMINFO", meminfo)
    case = Case(Op.READ, MIB, 8, 2)
    for free, expected in ((14, "malloc on transparent huge pages"), (15, "shmhuge")):
        lines = (f"HugePages_Free:  {free}", "HugePages_Rsvd:  3", "Hugepagesize:  2048 kB")
        meminfo.write_text("\n".join(lines))
        assert fio.memory_options(case)[2] == expected
    meminfo.write_text("MemFree: 1 kB\n")
    assert "glibc.malloc.hugetlb=1" in fio.memory_options(case)[1]["GLIBC_TUNABLES"]


def test_an_absent_fio_is_said(
    files: list[BenchFile], arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio.shutil, "which", lambda _name: None)
    field = gather(files, arena, ["fio", "ssdkv threads"])
    assert "not installed" in field.absent["fio"]
    assert [contender.name for contender in field.contenders] == ["ssdkv threads"]


def test_a_fio_that_fails_is_absent_with_its_words(
    files: list[BenchFile], arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SimpleNamespace(returncode=1, stdout="", stderr="fio: broken pipe dream")
    monkeypatch.setattr(fio, "find_fio", lambda: "fio")
    monkeypatch.setattr(fio.subprocess, "run", lambda *_a, **_k: failed)
    monkeypatch.setattr("vllm_ssdkv.profiling.bench_io.rivals.find_fio", lambda: "fio")
    assert "broken pipe dream" in gather(files, arena, ["fio"]).absent["fio"]
