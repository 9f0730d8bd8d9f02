"""Floors of the house: a package imports only what stands below it, and few import vLLM.

What stands low must be testable, and runnable on a GPU machine, without vLLM. Imports inside
functions and for type checkers count, too.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vllm_ssdkv"

FLOORS = (
    "base",
    "clustering",
    "config",
    "fpga_offload",
    "store/format store/memory/arena.py store/memory/device_memory.py",
    "store/integrity store/memory store/io/engines/protocol.py",
    "store/io/testing",
    "store/io/engines",
    "store/devices store/index",
    "store/placement",
    "store/io",
    "store/cache",
    "store/write",
    "store/read",
    "store/location.py",
    "store/maintenance",
    "store",
    "node/protocol",
    "node/server node/client",
    "node",
    "kernels/operands",
    "triton_kernels",
    "sparse",
    "kernels",
    "offload/protocol.py",
    "attention",
    "offload",
    "connector/names.py connector/messages.py connector/obstacle.py connector/kv_layout.py",
    "connector/kv_cache_spec.py connector/metadata.py",
    "connector/identity connector/metrics",
    "connector/worker connector/scheduler",
    "connector",
    "secondary_tier batch plugin.py",
    "profiling grafana",
    "cli",
)
"""From the ground up. A module belongs to the longest place that it is in. Places on one floor do
not import each other."""

BASE = frozenset({"vllm_ssdkv", "numpy"})
OTHERS: dict[str, set[str]] = {
    "base": {"msgspec", "numpy", "prometheus_client"},
    "clustering": set(),
    "config": {"annotated_types", "pydantic", "pydantic_core", "msgspec", "yaml"},
    # aiofiles and kvikio are optional; the engines that stand on them import them when opened.
    "store": {"msgspec", "pydantic", "aiofiles", "kvikio"},
    # cryptography is optional; what makes keys imports it when it is asked to.
    "node": {"msgspec", "pydantic", "prometheus_client", "cryptography"},
    "kernels": {"torch"},
    "triton_kernels": {"torch", "triton"},
    "sparse": {"torch"},
    "attention": {"torch"},
    "offload": {"torch"},
}
"""Packages of others that a package may import beside :data:`BASE`. The rest is free."""

WITH_VLLM = ("connector", "secondary_tier", "batch", "plugin.py", "cli")
MEASURE_VLLM = (
    "accuracy",
    "forced_decode.py",
    "bench_io/vllm_fs.py",
    "bench_ssds/vllm_requests.py",
    "models/random_weights.py",
    "models/tiny_config.py",
    "models/trial.py",
    "gpu_pack/vllm_case.py",
    "gpu_pack/vllm_engine.py",
    "gpu_pack/vllm_ops.py",
    "clusters/record.py",
    "rig/engine.py",
)
"""Of ``profiling/``."""

TOP = ("triton_kernels", "profiling", "grafana", "fpga_offload")
"""Folders of the repository that are installed into the package."""


def modules() -> dict[str, Path]:
    """Python files by their path in the installed package."""
    found = {
        str(path.relative_to(PACKAGE)): path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in TOP
    }
    for folder in TOP:
        found |= {str(path.relative_to(ROOT)): path for path in (ROOT / folder).rglob("*.py")}
    return found


def imported(source: str) -> Iterator[str]:
    """Full names of what ``source`` imports, of names that it takes from modules, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                yield "vllm_ssdkv.relative"
            else:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(name: str, known: dict[str, Path]) -> str | None:
    """File of the module that a full name is, or is in."""
    parts = name.split(".")[1:]
    while parts:
        for file in (f"{'/'.join(parts)}.py", f"{'/'.join(parts)}/__init__.py"):
            if file in known:
                return file
        parts.pop()
    return None


def place_of(file: str) -> str | None:
    """Longest place that holds a file; None for the package's own ``__init__``."""
    places = [place for floor in FLOORS for place in floor.split()]
    fitting = [place for place in places if file == place or file.startswith(f"{place}/")]
    return max(fitting, key=len, default=None)


def floor_of(place: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if place in floor.split())


def upward(file: str, source: str, known: dict[str, Path]) -> set[str]:
    """Modules that ``source`` imports and that do not stand on a lower floor."""
    own = place_of(file)
    found = set()
    for name in imported(source):
        other = module_of(name, known) if name.startswith("vllm_ssdkv.") else None
        place = place_of(other) if other is not None else None
        if own is None or place is None or place == own:
            continue
        if floor_of(place) >= floor_of(own):
            found.add(str(other))
    return found


def foreign(source: str, allowed: frozenset[str] | set[str]) -> set[str]:
    """Top-level modules that ``source`` imports and that are neither standard nor allowed."""
    top = {name.partition(".")[0] for name in imported(source)}
    return top - sys.stdlib_module_names - allowed


def test_places_exist_and_hold_every_module() -> None:
    missing = [
        place
        for floor in FLOORS
        for place in floor.split()
        if not (PACKAGE / place).exists() and not (ROOT / place).exists()
    ]
    assert missing == []
    homeless = {file for file in modules() if place_of(file) is None}
    assert homeless == {"__init__.py"}


def test_imports_go_down() -> None:
    known = modules()
    found = {
        file: names
        for file, path in known.items()
        if (names := upward(file, path.read_text(), known))
    }
    assert found == {}


def test_few_import_vllm() -> None:
    exempt = (*WITH_VLLM, *(f"profiling/{name}" for name in MEASURE_VLLM))
    found = {
        file
        for file, path in modules().items()
        if not any(file == place or file.startswith(f"{place}/") for place in exempt)
        and "vllm" in {name.partition(".")[0] for name in imported(path.read_text())}
    }
    assert found == set()


@pytest.mark.parametrize("place", OTHERS)
def test_low_floors_import_little(place: str) -> None:
    found = {
        file: names
        for file, path in modules().items()
        if file.startswith(f"{place}/")
        and (names := foreign(path.read_text(), BASE | OTHERS[place]))
    }
    assert found == {}


PLACES = tuple(
    f"vllm_ssdkv.{place}."
    for place in (
        "store",
        "node",
        "offload",
        "connector.worker.rank_store",
        "connector.worker.node_rank",
    )
)
"""Where the classes are that keep blocks, or attend, in one place or another."""


def asked_for(source: str) -> set[str]:
    """Classes of :data:`PLACES` that ``source`` asks objects for."""
    tree = ast.parse(source)
    full = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    asked = [
        node.args[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
    ]
    asked += [node.cls for node in ast.walk(tree) if isinstance(node, ast.MatchClass)]
    names = {part.id for one in asked for part in ast.walk(one) if isinstance(part, ast.Name)}
    return {name for name in names if full.get(name, "").startswith(PLACES)}


def test_the_connector_does_not_ask_where_blocks_are() -> None:
    """It has the part that only a store in this process has, or none."""
    found = {
        file: names
        for file, path in modules().items()
        if file.startswith("connector/") and (names := asked_for(path.read_text()))
    }
    assert found == {}


def test_a_question_where_blocks_are_is_seen() -> None:
    source = "from vllm_ssdkv.store.tiered_store import TieredStore\n"
    assert asked_for(f"{source}isinstance(store, int | TieredStore)") == {"TieredStore"}
    assert asked_for(f"{source}isinstance(store.size, int)") == set()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import vllm", {"vllm"}),
        ("def f():\n    from vllm.config import VllmConfig", {"vllm"}),
        ("import os, scipy.sparse", {"scipy"}),
        ("import numpy as np\nfrom . import layout", set()),
    ],
)
def test_foreign_imports_are_seen(source: str, names: set[str]) -> None:
    assert foreign(source, BASE) == names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from vllm_ssdkv import plugin", {"plugin.py"}),
        ("from vllm_ssdkv.connector.messages import StepPlan", {"connector/messages.py"}),
        ("def f():\n    import vllm_ssdkv.attention.exact", {"attention/exact.py"}),
        ("from vllm_ssdkv.store.io import slot_io", set()),
        ("from vllm_ssdkv.store import tiered_store", {"store/tiered_store.py"}),
    ],
)
def test_upward_imports_are_seen(source: str, names: set[str]) -> None:
    assert upward("store/read/prefix_loader.py", source, modules()) == names
