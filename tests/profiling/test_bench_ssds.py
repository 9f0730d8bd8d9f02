"""The bench for several SSDs: its arithmetic, what it checks, and a whole run on twins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.bench_io.case import Case, Sample
from vllm_ssdkv.profiling.bench_io.engines import engine_kinds
from vllm_ssdkv.profiling.bench_io.files import BenchFile, bench_files
from vllm_ssdkv.profiling.bench_io.model import GEN4, DeviceModel
from vllm_ssdkv.profiling.bench_ssds import __main__ as command
from vllm_ssdkv.profiling.bench_ssds import scenarios
from vllm_ssdkv.profiling.bench_ssds.scenarios import Effort
from vllm_ssdkv.profiling.bench_ssds.setup import make_setup
from vllm_ssdkv.profiling.bench_ssds.slots import GEOMETRY, SlotRequests
from vllm_ssdkv.profiling.bench_ssds.vllm_requests import VllmRequests
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.placement.lanes import lanes_for
from vllm_ssdkv.store.placement.stripe_map import StripeMap

BLOCKS = 6


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena(8 * MIB)
    yield arena
    arena.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[BenchFile]]:
    with bench_files([tmp_path], 2, command.region_bytes(2, BLOCKS)) as files:
        yield files


@given(st.integers(2, 16), st.integers(1, 300))
def test_every_slot_lies_inside_the_region(devices: int, blocks: int) -> None:
    region = command.region_bytes(devices, blocks)
    for weights in ([1.0] * devices, [*[1.0] * (devices - 1), 1 / scenarios.SLOW_FACTOR]):
        stripes = StripeMap(GEOMETRY, lanes_for(weights), devices)
        extents = stripes.extents(np.arange(blocks), 0, GEOMETRY.slot_bytes)
        assert int((extents.offset + extents.length).max()) <= region
    assert region % (4 * MIB) == 0


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 0.2]])
def test_slots_are_read_and_written_whole(
    files: list[BenchFile], arena: Arena, weights: list[float]
) -> None:
    slots = SlotRequests("threads", files, weights, arena, ())
    slots.check(range(BLOCKS))
    sample = slots.run(Op.WRITE, [[0, 1], [2]])
    assert (sample.requests, sample.nbytes) == (3, 3 * GEOMETRY.slot_bytes)
    sample = slots.run(Op.READ, [range(BLOCKS), range(BLOCKS)])
    assert sample.requests == 2 * BLOCKS
    slots.check(range(BLOCKS))  # writes have a region of their own
    slots.close()


def test_slots_that_hold_something_else_are_noticed(files: list[BenchFile], arena: Arena) -> None:
    slots = SlotRequests("threads", files, [1.0, 1.0], arena, ())
    with files[1].path.open("r+b") as file:
        file.write(bytes(files[1].region_bytes))
    with pytest.raises(BenchError, match="something else"):
        slots.check(range(BLOCKS))
    slots.close()


def test_vllm_loads_and_stores_the_same_blocks(tmp_path: Path, arena: Arena) -> None:
    vllm = VllmRequests(tmp_path / "vllm", BLOCKS, GEOMETRY.slot_bytes, arena)
    vllm.check(range(BLOCKS))
    assert vllm.run(Op.READ, [range(4), range(2, 6)]).nbytes == 8 * GEOMETRY.slot_bytes
    assert vllm.run(Op.WRITE, [range(3)]).requests == 3
    assert len(list((tmp_path / "vllm").iterdir())) == BLOCKS
    (tmp_path / "vllm" / "1.bin").write_bytes(bytes(GEOMETRY.slot_bytes))
    with pytest.raises(BenchError, match="block 1 holds something else"):
        vllm.check(range(BLOCKS))
    (tmp_path / "vllm" / "1.bin").unlink()
    with pytest.raises(BenchError, match="1 of 2 requests failed"):
        vllm.run(Op.READ, [[0], [1]])


def test_a_slow_device_counts_less(tmp_path: Path) -> None:
    with make_setup("twin", 4, GEN4, tmp_path) as setup:
        one = GEN4.bytes_per_s(MIB)
        assert setup.sum_of_devices(MIB) == pytest.approx(4 * one)
        assert setup.sum_of_devices(MIB, 2) == pytest.approx(2 * one)
        assert len(setup.rules) == 1
        with setup.slow(3, 5.0):
            assert setup.sum_of_devices(MIB) == pytest.approx(3.2 * one)
            assert [rule.device for rule in setup.rules] == [3, None]
        assert setup.sum_of_devices(MIB) == pytest.approx(4 * one)


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_devices_that_fio_does_not_see_stop_the_bench(
    files: list[BenchFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    class Fio:
        name, detail = "fio", ""

        def __init__(self, *_arguments: object, registered: bool) -> None:
            pass

        def refuses(self, case: Case) -> str | None:
            return None

        def check(self, case: Case) -> None:
            pass

        def run(self, case: Case, seconds: float) -> Sample:
            rate = setup.sum_of_devices(case.nbytes, case.devices)
            slow = share if case.devices == 2 else 1.0
            return Sample(1.0, 1, int(rate * slow), 0.1)

    monkeypatch.setattr(scenarios, "FioContender", Fio)
    effort = Effort(1, 0.01, BLOCKS, 2)
    with make_setup("twin", 2, GEN4, tmp_path) as setup:
        with pytest.raises(scenarios.UntrustedError, match=rf"read on 2: {share:.2f}"):
            scenarios.emulation(setup, files, "fio", effort)
        share = 1.0
        rows = scenarios.emulation(setup, files, "fio", effort)
    assert [row.devices for row in rows] == [1, 2, 1, 2, 1]
    assert rows[-1].bytes_per_s == pytest.approx(GEN4.bytes_per_s(512 * 1024) / 5, rel=1e-3)


def test_a_whole_run_on_twins(tmp_path: Path) -> None:
    model = DeviceModel(bandwidth=2e9, latency_s=1e-4, iops=1e6, dilation=1.0)
    effort = Effort(repeats=1, seconds=0.02, blocks=BLOCKS, requests=3)
    with make_setup("twin", 2, model, tmp_path) as setup:
        only = command.SCENARIOS - {"slowing"}  # which has tests of its own
        rows, courses = command.measure(setup, effort, Console(quiet=True), only)
    assert courses == []
    assert {row.scenario for row in rows} == {"scaling", "request", "slow", "sparse"}
    names = {f"ssdkv {kind}" for kind in engine_kinds()}
    assert {row.what for row in rows} <= names | {f"{name}, weighted" for name in names}
    assert "ssdkv threads, weighted" in {row.what for row in rows if row.scenario == "slow"}
    assert {(row.op, row.at_once) for row in rows if row.scenario == "request"} == {
        (op, at_once) for op in ("read", "write") for at_once in (1, 3)
    }
    # A model is a limit, and data moves at most as fast as it says.
    assert all(0 < row.of_sum <= 1.01 for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_the_command_refuses_what_it_cannot_make(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    app = typer.Typer()
    app.command()(command.run)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    done = CliRunner().invoke(app, ["--kind", "fuse"])
    assert done.exit_code == 1
    assert "--emulate" in done.output
    console = Console(record=True, quiet=True)
    assert command.possible_kinds(console) == ["twin"]
