"""Rows of cycles.json, measured on the simulated RTL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fpga_offload.needs import needs_rtlsim
from vllm_ssdkv.fpga_offload import measure as module
from vllm_ssdkv.fpga_offload.description import BEAT_BYTES, KernelShape
from vllm_ssdkv.fpga_offload.measure import measured
from vllm_ssdkv.fpga_offload.results import read_cycles

SHAPE = KernelShape(128, 1, "float16")


@needs_rtlsim(128, 1)
def test_both_kernels_are_measured_and_what_has_no_library_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {row.kernel: row for row in measured([SHAPE], (512,))}
    whole, part = rows["attend"], rows["sparf_second"]
    assert whole.nbytes == 512 * 128 * 4
    assert part.nbytes < whole.nbytes
    assert 0.7 < whole.line_rate < 1
    # `make soak` builds this shape with `sparf`, `make fpga` without.
    assert ("sparf of KernelShape(" in capsys.readouterr().err) == ("sparf" not in rows)
    monkeypatch.setenv("SSDKV_FPGA_BUILD", "/nowhere")
    assert list(measured([SHAPE], (512,))) == []
    assert "no library of KernelShape(" in capsys.readouterr().err


@needs_rtlsim(64, 2)
def test_both_steps_of_sparf_are_measured() -> None:
    rows = {row.kernel: row for row in measured([KernelShape(64, 2, "float16")], (512,))}
    assert set(rows) == {"attend", "sparf_second", "sparf_first", "sparf"}
    channels, window = 512 * 8 * 2, 16 * 64 * 2
    assert rows["sparf_first"].nbytes == channels + window
    assert rows["sparf"].nbytes > rows["sparf_first"].nbytes
    assert rows["sparf"].cycles > rows["sparf_first"].cycles > 0


@needs_rtlsim(128, 1)
def test_the_command_writes_what_the_reader_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "cycles.json"
    monkeypatch.setattr(module, "LENGTHS", (128,))
    monkeypatch.setattr("sys.argv", ["measure", "--output", str(target)])
    module.main()
    found = read_cycles(target)
    assert found.command == "python -P -m vllm_ssdkv.fpga_offload.measure"
    assert {(row.head_size, row.group) for row in found.rows} >= {(128, 1)}


def test_recorded_cycles_hold_what_is_promised() -> None:
    rows = read_cycles().rows
    at = {(row.kernel, row.head_size, row.group, row.tokens): row for row in rows}
    shapes = {(row.head_size, row.group) for row in rows}
    assert {(128, 1), (128, 4)} <= shapes
    assert ("sparf", 64, 2, 4096) in at
    for size, group in shapes:
        assert at["attend", size, group, 4096].line_rate >= 0.95
        assert at["sparf_second", size, group, 4096].line_rate >= 0.85
        both, first = (at.get((kind, size, group, 4096)) for kind in ("sparf", "sparf_first"))
        if both is not None and first is not None:
            beats = (both.nbytes - first.nbytes) / BEAT_BYTES
            assert beats >= 0.85 * (both.cycles - first.cycles)
        alone = at.get(("attend", size, 1, 4096))
        if alone is not None:
            assert at["attend", size, group, 4096].cycles <= 1.1 * alone.cycles
