"""Dependencies point one way: only the layer that vLLM talks to may import vLLM.

What lies below must be testable, and runnable on a GPU machine, without vLLM, so it imports the
standard library, numpy and torch at most. Imports inside functions count too.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vllm_ssdkv"
BASE = frozenset({"vllm_ssdkv", "numpy", "torch"})

# Folders and files of vllm_ssdkv that may import vLLM.
ABOVE = ("connector", "connector/attention_backend.py", "plugin.py", "batch", "cli")
# Folders and files below, with what they may import beside BASE.
BELOW = {
    # aiofiles and kvikio are optional; the engines that stand on them import them when opened.
    "store": {"msgspec", "pydantic", "aiofiles", "kvikio"},
    "selection": set(),
    "clustering": set(),
    "offload": set(),
    "attention/prefill.py": set(),
    "attention/sparse.py": set(),
    "attention/merge.py": set(),
    "attention/reference.py": set(),
}


def imported_modules(source: str) -> Iterator[str]:
    """Full names of the modules that `source` imports, relative imports as ones of this package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                yield "vllm_ssdkv"
            else:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def foreign(source: str, allowed: frozenset[str] | set[str]) -> set[str]:
    """Top-level modules that `source` imports and that are neither standard nor `allowed`."""
    top = {name.partition(".")[0] for name in imported_modules(source)}
    return top - sys.stdlib_module_names - allowed


def upward(source: str) -> set[str]:
    """Modules of the layer above that `source` imports."""
    above = {f"vllm_ssdkv.{path.removesuffix('.py').replace('/', '.')}" for path in ABOVE}
    return {
        name
        for name in imported_modules(source)
        if any(name == layer or name.startswith(f"{layer}.") for layer in above)
    }


def sources(*places: Path) -> list[Path]:
    found: set[Path] = set()
    for place in places:
        found.update(place.rglob("*.py") if place.is_dir() else [place] if place.exists() else [])
    return sorted(found)


def own_sources() -> list[Path]:
    """Python files of the package as it is installed, without links back to the repository."""
    linked = {PACKAGE / name for name in ("triton_kernels", "profiling", "fpga_offload", "grafana")}
    return [path for path in sources(PACKAGE) if linked.isdisjoint(path.parents)]


def test_only_the_top_layer_imports_vllm() -> None:
    exempt = set(sources(*(PACKAGE / path for path in ABOVE)))
    # These measure vLLM itself.
    exempt |= {
        ROOT / "profiling" / p
        for p in (
            "bench_engine.py",
            "bench_metrics.py",
            "bench_ttft.py",
            "bench_io/vllm_fs.py",
            "bench_ssds/vllm_requests.py",
            "bench_verify.py",
        )
    }
    folders = (ROOT / "triton_kernels", ROOT / "profiling", ROOT / "fpga_offload", ROOT / "grafana")
    checked = [path for path in [*own_sources(), *sources(*folders)] if path not in exempt]
    assert checked
    found = {
        str(path.relative_to(ROOT))
        for path in checked
        if "vllm" in {name.partition(".")[0] for name in imported_modules(path.read_text())}
    }
    assert found == set()


@pytest.mark.parametrize("place", BELOW)
def test_lower_layers_import_little(place: str) -> None:
    allowed = BASE | BELOW[place]
    found = {
        str(path.relative_to(ROOT)): names
        for path in sources(PACKAGE / place)
        if (names := foreign(path.read_text(), allowed) | upward(path.read_text()))
    }
    assert found == {}


def test_gpu_kernels_import_triton_at_most() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sources(ROOT / "triton_kernels")
        if (names := foreign(path.read_text(), BASE | {"triton"}) | upward(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import vllm", {"vllm"}),
        ("def f():\n    from vllm.config import VllmConfig", {"vllm"}),
        ("import os, scipy.sparse", {"scipy"}),
        ("import numpy as np\nfrom torch import nn\nfrom . import layout", set()),
    ],
)
def test_foreign_imports_are_seen(source: str, names: set[str]) -> None:
    assert foreign(source, BASE) == names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from vllm_ssdkv import plugin", {"vllm_ssdkv.plugin"}),
        ("from vllm_ssdkv.connector.messages import Plan", {"vllm_ssdkv.connector.messages.Plan"}),
        (
            "import vllm_ssdkv.connector.attention_backend",
            {"vllm_ssdkv.connector.attention_backend"},
        ),
        ("from vllm_ssdkv.attention import merge", set()),
    ],
)
def test_upward_imports_are_seen(source: str, names: set[str]) -> None:
    assert upward(source) == names
