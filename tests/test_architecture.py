"""ARCHITECTURE.md against the tree: folders, files, contract tests, and the selector it shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.test_dense import assert_near
from tests.sparse.contexts import Contexts, Row
from tests.sparse.test_laws import dense, output, select
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.sparse.protocol import Budget, Selector, page_budget

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGE = ROOT / "vllm_ssdkv"
TOP = ("triton_kernels", "profiling", "grafana", "fpga_offload")
"""Folders of the repository that are links in a package that is installed in place."""


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def listed_folders() -> list[str]:
    return re.findall(r"^([a-z_/]+)  +\S", section("The tree"), re.MULTILINE)


def test_the_tree_lists_every_folder_that_has_a_purpose_of_its_own() -> None:
    """Families of commands, and folders of profiling and tests, are named by their parents."""
    packages = {
        str(path.parent.relative_to(ROOT))
        for path in PACKAGE.rglob("__init__.py")
        if path.parent != PACKAGE and path.relative_to(PACKAGE).parts[0] not in TOP
    }
    packages = {name for name in packages if not name.startswith("vllm_ssdkv/cli/")}
    others = {*TOP, "deploy", "examples", "packaging", "tests", "vllm_ssdkv/csrc"}
    assert sorted(listed_folders()) == sorted(packages | others)


@pytest.mark.parametrize("folder", listed_folders())
def test_every_folder_says_what_it_holds(folder: str) -> None:
    init = ROOT / folder / "__init__.py"
    if init.exists():
        assert ast.get_docstring(ast.parse(init.read_text()))
    else:
        assert any((ROOT / folder).iterdir())


def test_every_file_that_the_page_names_exists() -> None:
    names = {
        name
        for name in re.findall(r"`([\w./]+)`", TEXT)
        if name.endswith((".py", "/")) or re.fullmatch(r"[a-z_]+/[a-z_/]+", name)
    }
    assert len(names) > 30
    missing = {
        name
        for name in names
        if not (ROOT / name).exists()
        and not (ROOT / "tests" / "contract" / name).exists()
        and not any(ROOT.glob(f"vllm_ssdkv/**/{name}"))
    }
    assert missing == set()


def test_every_contract_test_that_the_page_names_exists() -> None:
    found = {
        node.name
        for path in (ROOT / "tests" / "contract").glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    named = set(re.findall(r"`(test_\w+)`", section("vLLM's hooks")))
    assert len(named) > 8
    assert named <= found


def test_every_metric_of_the_limits_exists() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = [line for line in section("Limits and back-pressure").splitlines() if "| " in line]
    named = {name for row in rows[2:] for name in re.findall(r"`(\w+)`", row.rsplit("|", 2)[1])}
    assert len(named) > 5
    assert {name for name in named if f"`vllm:ssdkv_{name}" not in page} == set()


def shown_selector(budget: Budget) -> Selector:
    code = re.search(r"```python\n(.*?)```", section("Sparse decode"), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code.group(1), names)
    made: Selector = names["EvenlySpacedSelector"](budget)
    return made


@pytest.fixture(scope="module")
def problem() -> Contexts:
    """Two rows, the second without a context."""
    layout = BlockLayout.unpadded(32, 16, 2, 16, torch.float32)
    return Contexts(layout, 2, [Row(5, 20), Row(0, 7)], seed=3)


def test_the_selector_that_the_page_shows_keeps_its_budget(problem: Contexts) -> None:
    budget = Budget(tokens=64)
    selector = shown_selector(budget)
    selection = select(selector, problem)
    most = page_budget(budget, problem.summaries)
    counts = np.diff(selection.begin).reshape(-1, 2)
    assert (counts == most[:, None]).all()
    assert 0 < most[0] < problem.summaries.pages[0]
    first = selection.pages[selection.begin[0] : selection.begin[1]]
    assert (np.diff(first) > 0).all(), "ascending, none twice"
    assert np.isnan(selection.mass[0]).all()


def test_the_selector_that_the_page_shows_is_exact_with_the_whole_budget(
    problem: Contexts,
) -> None:
    selector = shown_selector(Budget(share=1.0))
    assert (select(selector, problem).mass == 1).all()
    assert_near(output(selector, problem), dense(problem), 1e-5)
