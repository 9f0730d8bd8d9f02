"""``docs/fpga-tables.md``: made from results, and no line of prose too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_documents import too_long
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.cli.docs.fpga_page import fpga_page
from vllm_ssdkv.fpga_offload.results import (
    CYCLES,
    SYNTHESIS,
    Cells,
    Cycles,
    Results,
    write_results,
)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    runs = [
        Cycles("attend", 128, 4, "float16", tokens, tokens * 512, tokens * 9 + 50)
        for tokens in (128, 4242)
    ]
    write_results(Results("simulate them", {"a tool": "1.2"}, runs), tmp_path / CYCLES)
    cells = [Cells("core", "xcup", 128, 4, 54321, 30_000, 73)]
    write_results(Results("count them", {}, cells), tmp_path / SYNTHESIS)
    return tmp_path


def test_tables_come_from_the_results(results: Path) -> None:
    page = fpga_page(results)
    for text in (
        "By `simulate them`, with a tool 1.2:",
        "By `count them`:",
        "| 4242 tokens |",
        "54321",
    ):
        assert text in page
    assert "| smartssd | 1 | 262144 | 1 |" in page
    assert "- `q` (0x010, address): queries, 16 bits, [n, G, d]\n" in page
    assert "LUT of a query head more" in page
    assert too_long(page) == []


def test_without_results_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cycles\.json"):
        fpga_page(tmp_path)
