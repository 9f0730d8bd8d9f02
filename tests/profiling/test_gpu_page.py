"""The page about runs on GPUs: what it says is what the files say, and it is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.gpu_pack.page import gpu_page
from vllm_ssdkv.profiling.gpu_pack.results import NO_TIME, TIMED, Figure, ResultLog, Row, read_rows

DOCS = Path(__file__).parents[2] / "docs"


def write(directory: Path, rows: list[Row], device: str = "Some GPU") -> None:
    facts = [
        Row("machine", "machine", figures=[Figure("date", "2030-01-02")]),
        Row("machine", "GPU", figures=[Figure("device", device)]),
    ]
    log = ResultLog(directory)
    for row in facts + rows:
        log.append(row)


def shares(*cells: tuple[str, float]) -> list[Row]:
    return [
        Row(
            "bandwidth",
            case,
            figures=[
                Figure("rate", 100.0, "GB/s"),
                Figure("share of a copy in the device", share),
                Figure("time", 12.0, "us"),
            ],
        )
        for case, share in cells
    ]


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "gpu.md").read_text() == gpu_page(DOCS / "gpu")


def test_every_committed_run_is_on_a_gpu_and_has_a_date() -> None:
    paths = sorted((DOCS / "gpu").glob("*.jsonl"))
    assert paths
    for path in paths:
        figures = {f.name: f.value for row in read_rows(path) for f in row.figures}
        assert figures["device"]
        assert str(figures["date"]) in path.name


def test_without_runs_nothing_is_measured(tmp_path: Path) -> None:
    assert "## Runs\n\nnot measured\n" in gpu_page(tmp_path / "none")


def test_what_was_not_measured_says_so(tmp_path: Path) -> None:
    cells = [
        ("decode, context 1024, batch 1", 0.25),
        ("decode, context 1024, batch 8", 0.5),
        ("cover, context 1024, batch 8", 0.125),
    ]
    write(tmp_path, shares(*cells))
    page = gpu_page(tmp_path)
    assert "| decode | 25.0%, 12 | 50.0%, 12 |" in page
    assert "| cover | not measured | 12.5%, 12 |" in page
    assert "### The store on CUDA\n\nNot measured.\n" in page
    assert "## Some GPU, `results`" in page


def test_a_run_that_timed_calls_says_so(tmp_path: Path) -> None:
    (row,) = shares(("decode, context 1024, batch 1", 0.25))
    write(tmp_path, [row])
    assert "\n\nThis run timed calls." in gpu_page(tmp_path)
    row.figures.append(Figure(TIMED, "CUDA graph"))
    (tmp_path / "results.jsonl").unlink()
    write(tmp_path, [row])
    page = gpu_page(tmp_path)
    assert "| decode | 25.0%, 12 |" in page
    assert "This run timed calls." not in page


def test_a_case_that_was_repeated_counts_once(tmp_path: Path) -> None:
    failed = Row("store", "times of steps", ok=False, error="E: x")
    write(tmp_path, [failed, Row("store", "times of steps")])
    page = gpu_page(tmp_path)
    assert "| times of steps | ok |" in page
    assert "E: x" not in page


def test_decoding_tells_speed_parts_and_what_did_not_fit(tmp_path: Path) -> None:
    measured = [
        Figure("model", "a small Llama"),
        Figure("dtype", "bfloat16"),
        Figure("tokens_per_s", 12.5),
        Figure("step_ms", 80.0),
        Figure("python_share", 0.25),
        Figure("bytes_per_token.dram_token_pages", 2.5e9),
    ]
    equal = [Figure("tokens", 48), Figure("tokens_equal", 48)]
    names = ["DRAM, bounds", "HBM, full", "drive, exact"]
    bounds, full, drive = (f"1024 tokens, batch 1, {name}" for name in names)
    rows = [
        Row("decode", "tokens of llama", figures=equal),
        Row("decode", bounds, figures=measured),
        Row("decode", full, figures=[Figure("not measured", "does not fit HBM: takes 90 GiB")]),
        Row("decode", drive, ok=False, error=NO_TIME),
    ]
    write(tmp_path, rows)
    page = gpu_page(tmp_path)
    assert "| tokens of llama | 48 of 48 equal |" in page
    assert f"| {bounds} | 12.5 | 80 | 25% | dram token pages 2500 |" in page
    assert f"| {full} | not measured: does not fit HBM: takes 90 GiB |  |  |  |" in page
    assert f"\n\nNot measured: {drive}.\n" in page


def test_only_the_newest_run_of_a_gpu_is_shown(tmp_path: Path) -> None:
    runs = [
        ("a", "2030-01-02", "GPU A"),
        ("b", "2030-01-01", "GPU A"),
        ("c", "2030-01-01", "GPU B"),
    ]
    for name, date, device in runs:
        figures = [[Figure("date", date)], [Figure("device", device)]]
        log = ResultLog(tmp_path)
        for case, figure in zip(("machine", "GPU"), figures, strict=True):
            log.append(Row("machine", case, figures=figure))
        (tmp_path / "results.jsonl").rename(tmp_path / f"{name}.jsonl")
    page = gpu_page(tmp_path)
    assert [f"## {device}, `{name}`" in page for name, _, device in runs] == [True, False, True]
    assert "[b](gpu/b.jsonl)" in page


def test_what_failed_says_why(tmp_path: Path) -> None:
    kernel = "bfloat16, 8 KV heads, group 4, head size 128, block 64: sparse decode"
    late = "float32, 8 KV heads, group 4, head size 128, block 64: sparse decode"
    rows = [
        Row("kernels", kernel, ok=False, error="Traceback\nCheckError: differs by 3"),
        Row("kernels", late, ok=False, error=NO_TIME),
        Row("store", "reads", ok=False, error="x\nStoreError: no io_uring"),
        Row("store", "writes", figures=[Figure("rate", 2.5, "GB/s")]),
    ]
    write(tmp_path, rows)
    page = gpu_page(tmp_path)
    assert "| sparse decode | 0 of 1 | not measured |" in page
    assert f"| {kernel} | **failed**: CheckError: differs by 3 |" in page
    assert "| reads | **failed**: StoreError: no io_uring |" in page
    assert "| writes | rate 2.5 GB/s |" in page


def test_a_rehearsal_is_no_run(tmp_path: Path) -> None:
    write(tmp_path, [], "none: a rehearsal on the CPU")
    with pytest.raises(BenchError, match="is not a run on a GPU"):
        gpu_page(tmp_path)
