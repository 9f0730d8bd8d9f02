"""Fixtures that every kind of test may use."""

import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.lanes import pytest_collection_modifyitems, pytest_xdist_make_scheduler
from tests.messages import Undocumented
from tests.time_limit import pytest_runtest_teardown, pytest_timeout_set_timer

# Hooks of every run.
__all__ = [
    "pytest_collection_modifyitems",
    "pytest_runtest_teardown",
    "pytest_timeout_set_timer",
    "pytest_xdist_make_scheduler",
]

# Before anything imports a Hugging Face library, and for every child process: tests make their own
# models and must not depend on a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

# A child that starts in the checkout imports what is installed, not the sources that lie beside it
# (`python -c` looks in its directory first), so that a wheel is tested where a wheel is installed.
os.environ["PYTHONSAFEPATH"] = "1"

# What vLLM finds out about its models' classes, it need not find out again, in a process of ten
# seconds, for each test that has a cache directory of its own.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("VLLM_CACHE_ROOT", str(CACHE / "vllm"))

# Side by side with another lane, threads of OpenMP would spin for a core that they do not get.
# Left alone, vLLM binds a thread of each engine to every core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

SOAK_ROUNDS = os.environ.get("SSDKV_SOAK_ROUNDS")


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what is imported by now: millions of objects, over
    which each collection of a test would take a second."""
    gc.collect()
    gc.freeze()


# How long an example takes says more about the machine than about the code. `make test` draws the
# same examples every time, so that what it says of a commit depends on the commit; `make soak`
# draws new ones, and four times as many where a test does not say how many.
settings.register_profile(
    "ssdkv",
    settings.default,
    deadline=None,
    derandomize=SOAK_ROUNDS is None,
    max_examples=25 if SOAK_ROUNDS is None else 100,
)
settings.load_profile("ssdkv")

MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}


def filesystem_of(path: Path) -> str:
    """Type of the filesystem that holds `path`: that of the longest mount point above it."""
    mount_point, kind = Path(), ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, this_kind, *_ = line.split()
        above = Path(point.replace("\\040", " "))
        if path.resolve().is_relative_to(above) and len(above.parts) >= len(mount_point.parts):
            mount_point, kind = above, this_kind
    return kind


def disk_directory() -> Path:
    """A writable directory on a real filesystem: SSDKV_TEST_DIR, or a usual temporary one."""
    chosen = os.environ.get("SSDKV_TEST_DIR")
    candidates = [Path(chosen)] if chosen else [Path(tempfile.gettempdir()), Path("/var/tmp")]
    for candidate in candidates:
        if os.access(candidate, os.W_OK) and filesystem_of(candidate) not in MEMORY_FILESYSTEMS:
            return candidate
    listed = ", ".join(str(candidate) for candidate in candidates)
    raise RuntimeError(
        f"{listed}: not writable or in memory; set SSDKV_TEST_DIR to a directory on a disk"
    )


@pytest.fixture(autouse=True)
def cures() -> Iterator[None]:
    """Whatever fault a test injects: the catalog has the cure for what is logged then."""
    ours, undocumented = logging.getLogger("vllm_ssdkv"), Undocumented()
    ours.addHandler(undocumented)
    yield
    ours.removeHandler(undocumented)
    assert undocumented.messages == [], "vllm_ssdkv/cli/explain/messages.toml lacks these"


@pytest.fixture
def tmp_devices() -> Iterator[Callable[[int], list[Path]]]:
    """Make n directories that stand for n SSDs, on one real filesystem; gone after the test."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-test-", dir=disk_directory()) as root:

        def make(count: int) -> list[Path]:
            first = len(list(Path(root).iterdir()))
            paths = [Path(root, f"ssd{index}") for index in range(first, first + count)]
            for path in paths:
                path.mkdir(mode=0o700)
            return paths

        yield make


@pytest.fixture
def roomy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems say that they are half empty, however full this machine's are."""
    blocks = 1 << 30

    def half_empty(status: os.statvfs_result) -> os.statvfs_result:
        fields = list(status)
        fields[2:5] = blocks, blocks // 2, blocks // 2  # there are, free, free for users
        return os.statvfs_result(fields)

    for name in ("statvfs", "fstatvfs"):
        ask = getattr(os, name)
        monkeypatch.setattr(os, name, lambda place, ask=ask: half_empty(ask(place)))


@pytest.fixture
def soak_rounds() -> int:
    """Rounds of a test marked `rounds` or `soak`: one, or SSDKV_SOAK_ROUNDS (`make soak`)."""
    return int(SOAK_ROUNDS or "1")


@pytest.fixture
def fuzz_seconds() -> float:
    """How long one fuzzed parser has: less than a second, or SSDKV_SOAK_FUZZ_S (`make soak`)."""
    return float(os.environ.get("SSDKV_SOAK_FUZZ_S", "0.4"))


@pytest.fixture
def memory_seconds() -> float:
    """How long a store works while its memory is watched: SSDKV_SOAK_MEMORY_S (`make soak`)."""
    return float(os.environ.get("SSDKV_SOAK_MEMORY_S", "4"))


@pytest.fixture
def batch_seconds() -> float:
    """Seconds of handing in hostile batches: SSDKV_SOAK_BATCH_S (`make soak`), or a while."""
    return float(os.environ.get("SSDKV_SOAK_BATCH_S", "15"))
