"""Models, stock answers and directories for tests with the real vLLM."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.conftest import disk_directory
from tests.e2e.bench import PROMPTS, Bench
from tests.e2e.models import MAKERS
from tests.e2e.stock import Stock
from tests.kit.node import NodeProcess
from tests.lanes import ENGINE
from tests.store.unhurried import open_unhurried_engines
from vllm_ssdkv.connector.attention_impl import PagedMetadata, PagedMetadataBuilder
from vllm_ssdkv.connector.scheduler import context_recovery, page_admission
from vllm_ssdkv.connector.worker import layer_copy
from vllm_ssdkv.store import own_store
from vllm_ssdkv.store.devices import health


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is one with an engine."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(ENGINE)


@pytest.fixture(scope="module", autouse=True)
def _impatient() -> Iterator[None]:
    """In engines of this process a fault need not last long to count as one that lasts: in these
    modules alone, for others may follow in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "CONDEMN_S", 0.2)
        patch.setattr(health, "FIRST_RETRY_S", 0.05)
        patch.setattr(health, "LAST_RETRY_S", 0.2)
        patch.setattr(page_admission, "WRITES_DEADLINE_S", 0.5)
        patch.setattr(own_store, "RETURN_S", 0.5)
        patch.setattr(context_recovery, "LOST_S", 1.0)
        yield


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each batch of page mode in engines of this process: whether vLLM's host knew the lengths,
    and by them the place of each row's first token, that the device computes with."""
    found: list[bool] = []
    build = PagedMetadataBuilder.build

    def look(
        self: PagedMetadataBuilder,
        prefix: int,
        common: CommonAttentionMetadata,
        fast: bool = False,
    ) -> PagedMetadata:
        made = build(self, prefix, common, fast)
        begin = common.query_start_loc_cpu[:-1].numpy()
        places = common.slot_mapping.numpy()[begin]
        if (places >= 0).all():  # not a run without requests
            block = self.kv_cache_spec.block_size
            lengths = made.seq_lens.numpy()
            first = lengths - np.diff(common.query_start_loc_cpu.numpy())
            table = made.block_table.numpy()
            mine = table[np.arange(len(first)), first // block] * block + first % block
            same = np.array_equal(lengths, common.seq_lens.numpy())
            found.append(same and np.array_equal(mine, places))
        return made

    monkeypatch.setattr(PagedMetadataBuilder, "build", look)
    return found


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of the tiny models, by family."""
    root = tmp_path_factory.mktemp("models")
    return {name: make(root / name) for name, make in MAKERS.items()}


@pytest.fixture(scope="session")
def stock(models: dict[str, Path]) -> Stock:
    """Answers of stock vLLM."""
    return Stock(models)


@pytest.fixture(scope="module")
def devices() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Make n devices on a real filesystem, as entries of the option ``devices``."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ssdkv-e2e-", dir=disk_directory()) as root:

        def make(count: int = 2, capacity: str = "64MiB") -> list[dict[str, Any]]:
            first = len(list(Path(root).iterdir()))
            paths = [Path(root, f"ssd{index}") for index in range(first, first + count)]
            for path in paths:
                path.mkdir(mode=0o700)
            # All of them are on one disk: what is measured there would be noise.
            return [{"path": str(path), "capacity": capacity, "weight": 1} for path in paths]

        yield make


@pytest.fixture
def by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are copied layer by layer, however small, by engines in this process."""
    monkeypatch.setattr(layer_copy, "LEAST_BYTES", {"cpu": 1})


@contextmanager
def kept_log() -> Iterator[list[str]]:
    """What the package logs from now on. Its log goes vLLM's way, which pytest does not see."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    ours, handler = logging.getLogger("vllm_ssdkv"), Keep(logging.INFO)
    ours.addHandler(handler)
    level = ours.level
    ours.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        ours.setLevel(level)
        ours.removeHandler(handler)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """See :func:`kept_log`."""
    with kept_log() as lines:
        yield lines


@pytest.fixture
def bench(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Bench]]:
    """Start an engine over four devices whose faults can be switched."""
    started: list[Bench] = []

    # Deadlines are short: a machine that stands still must not make healthy devices late.
    open_unhurried_engines(monkeypatch)
    wanted = [answer.tokens for answer in stock.answers("llama", PROMPTS)]

    def start(
        mode: str = "page",
        count: int = 4,
        io: Mapping[str, object] | None = None,
        replicas: int = 1,
        capacity_mib: int = 16,
    ) -> Bench:
        control = tmp_path / f"faults{len(started)}.json"
        places = devices(count, f"{capacity_mib * replicas}MiB")
        started.append(
            Bench(models["llama"], places, control, wanted, mode, io=io or {}, replicas=replicas)
        )
        return started[-1]

    yield start
    for one in started:
        one.faults()
        one.engine.close()
        for path in one.paths:
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """Directory of a node and of the logs of its engines."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-e2e-node-", dir=disk_directory()) as place:
        yield Path(place)


@pytest.fixture(scope="module")
def node(root: Path) -> Iterator[NodeProcess]:
    """A node that runs while a module's tests do.

    It is patient: an engine that the machine leaves without a core for seconds keeps its session.
    """
    with NodeProcess(root, lease=10.0) as node:
        yield node
