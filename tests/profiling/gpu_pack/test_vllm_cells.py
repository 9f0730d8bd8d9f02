"""Cells of the stage ``vllm``: what engines are made of, and how their answers are judged."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.gpu_pack import llama_shapes, vllm_forks
from vllm_ssdkv.profiling.gpu_pack.cuda_library import LIBRARY
from vllm_ssdkv.profiling.gpu_pack.results import Figure, ResultLog, Row
from vllm_ssdkv.profiling.gpu_pack.stage import Case, StageRun
from vllm_ssdkv.profiling.gpu_pack.vllm_cells import CELLS, Cell, Scale, full_hits, settings
from vllm_ssdkv.profiling.gpu_pack.vllm_engine import settle_operators
from vllm_ssdkv.profiling.gpu_pack.vllm_ops import FLASH_ATTENTION, OPERATORS, missing_symbols

PLACE = Path("/somewhere")
NAMED = {cell.name: cell for cell in CELLS}
STOCK, REUSE, PAGE = (NAMED[name] for name in ("stock vLLM", "reuse mode", "page mode, exact"))
RESTARTED = NAMED["reuse mode, after a restart"]


def stage_run(folder: Path, *done: str, rehearsal: bool = True) -> StageRun:
    log = ResultLog(folder)
    for case in done:
        log.append(Row("vllm", case))
    return StageRun("vllm", log, rehearsal=rehearsal, seconds=60)


class TestSettings:
    """Arguments of engines."""

    def test_all_attend_alike_on_a_gpu_but_page_mode(self) -> None:
        for cell in CELLS:
            made = settings(cell, "cuda", PLACE, PLACE, compiled=True)
            wanted = "CUSTOM" if cell.connector == "page" else "TRITON_ATTN"
            assert made["attention_backend"] == wanted
            assert "kernel_config" not in made
            assert made["enforce_eager"] != cell.graphs

    def test_without_operators_all_is_native(self) -> None:
        made = settings(STOCK, "cuda", PLACE, PLACE, compiled=False)
        assert made["compilation_config"] == {"custom_ops": ["none"]}
        assert made["kernel_config"]["ir_op_priority"]["rms_norm"] == ["native"]

    def test_a_context_of_page_mode_does_not_fit_hbm(self) -> None:
        page, stock = (settings(c, "cuda", PLACE, PLACE, compiled=True) for c in (PAGE, STOCK))
        longest = 700 * llama_shapes.TINY.token_bytes(4)
        assert page["kv_cache_memory_bytes"] < longest < stock["kv_cache_memory_bytes"]

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_what_is_asked_fits(self, device: str) -> None:
        scale = Scale.of(device)
        width = 2 if device == "cuda" else 4
        made = settings(NAMED["speed of reuse mode"], device, PLACE, PLACE, compiled=True)
        assert made["max_model_len"] >= max(scale.lengths) + 1 + scale.answer
        together = max(scale.batches) * (scale.decoded + 1 + scale.answer)
        asked = sum(scale.lengths) + together
        token_bytes = scale.shape.token_bytes(width)
        assert made["kv_cache_memory_bytes"] >= together * token_bytes
        assert scale.store >= asked * token_bytes

    def test_a_restart_opens_the_store_of_the_cell_before(self) -> None:
        for before, cell in itertools.pairwise(CELLS):
            if cell.stored:
                assert (before.store, before.speed) == (cell.store, cell.speed)
        assert len({cell.store for cell in CELLS if cell.connector}) == 12
        assert len(NAMED) == len(CELLS)


def told(tokens: list[list[int]], first: list[int], again: list[int]) -> dict[str, Any]:
    return {
        **{"first": tokens, "again": tokens, "first cached": first, "again cached": again},
        "ended": True,
    }


NOTHING, EVERYTHING = [0, 0, 0, 0], full_hits()
TOKENS = [[1, 2], [3], [4], [5]]
OTHERS = [[1, 2], [3], [4], [6]]


class TestJudge:
    """Answers against those of stock vLLM."""

    @pytest.mark.parametrize(
        ("cell", "first", "again"),
        [
            (STOCK, NOTHING, NOTHING),
            (REUSE, NOTHING, EVERYTHING),
            (RESTARTED, EVERYTHING, EVERYTHING),
            (PAGE, NOTHING, EVERYTHING),
        ],
    )
    def test_good_answers_pass(self, cell: Cell, first: list[int], again: list[int]) -> None:
        case = Case()
        vllm_forks._judge(case, cell, told(TOKENS, first, again), "", {"first": TOKENS})
        assert Figure("answers as stock, again", "4 of 4") in case.figures

    @pytest.mark.parametrize(
        ("cell", "found", "error", "message"),
        [
            (REUSE, told(OTHERS, NOTHING, EVERYTHING), "", "other tokens"),
            (REUSE, told(TOKENS, NOTHING, NOTHING), "", "again: .* were stored"),
            (RESTARTED, told(TOKENS, NOTHING, EVERYTHING), "", "first: .* were stored"),
            (REUSE, {}, "", "ended without answers"),
            (REUSE, {"error": "KeyError: x"}, "its process ended with status 1", "KeyError: x"),
            (REUSE, told(TOKENS, NOTHING, EVERYTHING), "status 1", "status 1"),
        ],
    )
    def test_others_do_not(
        self, cell: Cell, found: dict[str, Any], error: str, message: str
    ) -> None:
        with pytest.raises(BenchError, match=message):
            vllm_forks._judge(Case(), cell, found, error, {"first": TOKENS})

    def test_without_stock_there_is_nothing_to_compare(self) -> None:
        with pytest.raises(BenchError, match="nothing to compare"):
            vllm_forks._judge(Case(), REUSE, told(TOKENS, NOTHING, EVERYTHING), "", {})

    def test_answers_of_the_large_shape_are_counted(self) -> None:
        computed, found = "first token, 64 tokens, computed", "first token, 64 tokens, found"
        stock = {computed: [[1, 2]], f"{computed} cached": [0], "ended": True}
        case = Case()
        mine = {computed: [[1, 2]], found: [[1, 3]], "ended": True}
        vllm_forks._judge(case, NAMED["speed of reuse mode"], mine, "", stock)
        assert case.figures == [Figure("answers as stock", "1 of 2")]

    def test_figures_before_an_error_are_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "result.jsonl"
        lines = [{"figure": ["start", 1.5, "s"]}, {"first": TOKENS}, {"error": "E: x"}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        figures, found = vllm_forks._read(path)
        assert figures == [Figure("start", 1.5, "s")]
        assert found == {"first": TOKENS, "error": "E: x"}
        assert vllm_forks._read(tmp_path / "none") == ([], {})


class TestMissing:
    """Cells that a continued run takes."""

    def test_only_what_lacks_a_good_result(self, tmp_path: Path) -> None:
        done = [cell.name for cell in CELLS]
        assert vllm_forks.missing(stage_run(tmp_path, *done)) == []

    def test_with_what_it_needs(self, tmp_path: Path) -> None:
        done = [name for name in NAMED if name != RESTARTED.name]
        assert vllm_forks.missing(stage_run(tmp_path, *done)) == [STOCK, REUSE, RESTARTED]

    def test_a_failed_cell_lacks_one(self, tmp_path: Path) -> None:
        ResultLog(tmp_path).append(Row("vllm", PAGE.name, ok=False))
        done = [name for name in NAMED if name != PAGE.name]
        assert vllm_forks.missing(stage_run(tmp_path, *done)) == [STOCK, PAGE]


class TestOperators:
    """A first look at the packed operators."""

    def test_pytorch_for_cpus_lacks_what_is_for_cuda(self) -> None:
        if torch.version.cuda:
            pytest.skip("this PyTorch is for CUDA")
        asked = ["torch_call_dispatcher", "aoti_torch_get_current_cuda_stream", "no_such_name"]
        assert missing_symbols(asked) == asked[1:]

    @pytest.mark.slow
    def test_stand_ins_take_the_place_of_those_that_do_not_load(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        source = tmp_path / "source"
        (source / FLASH_ATTENTION).parent.mkdir(parents=True)
        library = source / "vllm" / LIBRARY
        library.write_bytes(b"not loaded before PyTorch was looked at")
        run = stage_run(tmp_path, rehearsal=False)
        settle_operators(run, "cuda", source)
        (row,) = run.log.rows()
        assert (row.ok, row.case) == (False, "vLLM's operators as packed")
        assert row.error.endswith("stand-ins take their place, and the log says why")
        assert "aoti_torch_get_current_cuda_stream" in capfd.readouterr().err
        assert not library.exists()
        assert (source / OPERATORS).read_bytes() == b""

    def test_a_rehearsal_has_stand_ins(self, tmp_path: Path) -> None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / LIBRARY).touch()
        run = stage_run(tmp_path)
        settle_operators(run, "cpu", tmp_path)
        assert run.log.rows() == []
        assert {path.name for path in (tmp_path / "vllm").iterdir()} == {Path(OPERATORS).name}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_process_that_hangs_is_ended(
    way: vllm_forks.Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_forks, "run_cell", print_forever)
    # A process that starts anew finds this file's module, behind the package that is installed.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[3])])
    error = vllm_forks._start(way, STOCK, "cpu", PLACE, tmp_path, tmp_path / "result.jsonl", 3)
    assert error == "it did not end in 3 s; the log tells where its threads were"


def print_forever(*_: object) -> None:
    os.read(os.pipe()[0], 1)
    sys.exit("a pipe without an end has ended")
