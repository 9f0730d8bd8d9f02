"""The host of a card, with the real XRT and its no-op device, which runs all but the arithmetic.

What the kernels would compute comes from the oracle of the contract (``ComputingCard``).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.fpga_offload.needs import XRT_HEADERS, needs_xrt
from tests.fpga_offload.rtl.contexts import far_apart, make_sparf
from tests.fpga_offload.xrt.xclbins import maker
from tests.oracles.fpga_backend import NumpyBackend
from tests.oracles.fpga_card import ComputingCard
from vllm_ssdkv.base.errors import (
    FpgaDeadlineError,
    FpgaError,
    FpgaLimitError,
    FpgaListError,
    FpgaVersionError,
)
from vllm_ssdkv.config.io_engine import EngineOptions
from vllm_ssdkv.fpga_offload.backend import AttendWork
from vllm_ssdkv.fpga_offload.csim import CsimBackend
from vllm_ssdkv.fpga_offload.description import ATTEND, ENTRY, JOB, KernelShape
from vllm_ssdkv.fpga_offload.xrt.backend import XrtBackend, check_xclbin
from vllm_ssdkv.fpga_offload.xrt.runtime import (
    Argument,
    BridgeRuntime,
    inspect,
)
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.memory.arena import BorrowedArena

LIBRARIES = Path("/usr/lib", f"{platform.machine()}-linux-gnu")
SHAPE = KernelShape(64, 4, "float16")

pytestmark = needs_xrt()


@pytest.fixture(scope="module", autouse=True)
def no_op_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """XRT looks for its drivers in a folder of its own, which Debian does not have."""
    root = tmp_path_factory.mktemp("xilinx")
    (root / "lib").symlink_to(LIBRARIES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XILINX_XRT", str(root))
        patch.setenv("XCL_EMULATION_MODE", "noop")
        yield


@pytest.fixture(scope="module")
def xclbin(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return maker(tmp_path_factory.mktemp("xclbins"), XRT_HEADERS)


@pytest.fixture(scope="module")
def path(xclbin: Callable[..., Path]) -> str:
    return str(xclbin("right"))


@pytest.fixture
def card(path: str) -> Iterator[ComputingCard]:
    made = ComputingCard(BridgeRuntime(0, path), SHAPE)
    yield made
    made.close()


def problem(count: int, seed: int = 0) -> tuple[NDArray[np.uint8], AttendWork]:
    """Jobs that share some of ``count`` pages, which are twice as far apart as they are long."""
    rng = np.random.default_rng(seed)
    stride = 2 * SHAPE.page_bytes
    room = np.zeros(count * stride + 64, np.uint8)
    memory = room[-room.ctypes.data % 64 :][: count * stride]
    memory.view(np.float16)[:] = rng.standard_normal(memory.nbytes // 2)
    entries = np.zeros(count, ENTRY.dtype)
    entries["address"] = memory.ctypes.data + rng.permutation(count).astype(np.uint64) * stride
    entries["tokens"] = rng.integers(1, 17, count)
    entries["mask"] = rng.integers(1, 1 << 16, count)
    jobs = np.zeros(3, JOB.dtype)
    jobs["first"], jobs["entries"] = [0, count // 2, 2], [count, count - count // 2, 0]
    jobs["query"], jobs["out"] = [2, 0, 1], [1, 2, 0]
    queries = rng.standard_normal((3, SHAPE.group, SHAPE.head_size)).astype(np.float16)
    v_offset = SHAPE.page_bytes // 2 + 64
    work = AttendWork(queries.view(np.uint16), entries, jobs, 0.125, 3, v_offset, mask=True)
    return memory, work


def assert_same(backend: XrtBackend, work: AttendWork) -> None:
    found, wanted = backend.attend(work), NumpyBackend(SHAPE).attend(work)
    seen = wanted.l > 0
    assert np.array_equal(found.l > 0, seen)
    assert np.isneginf(found.m[~seen]).all()
    for one, other in (
        (found.m[seen] + np.log(found.l[seen]), wanted.m[seen] + np.log(wanted.l[seen])),
        (found.acc[seen] / found.l[seen][:, None], wanted.acc[seen] / wanted.l[seen][:, None]),
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_no_op_device_runs_to_the_end(path: str) -> None:
    """Open, load, buffers, copies, run, wait; then it says that nothing was computed."""
    check_xclbin(inspect(path), path)
    runtime = BridgeRuntime(0, path)
    assert runtime.name()
    backend = XrtBackend(runtime, SHAPE, 5.0)
    memory, work = problem(5)
    with pytest.raises(FpgaError, match="the card computes nothing, as with XCL_EMULATION_MODE"):
        backend.attend(work)
    assert memory.any()
    assert backend.close(1.0)
    with pytest.raises(FpgaError, match="xrt is closed"):
        backend.attend(work)


def test_a_card_that_computes_nothing_is_refused_at_start(path: str) -> None:
    with pytest.raises(FpgaError, match="the card computes nothing"):
        XrtBackend.open(path, 0, SHAPE, 5.0)


@pytest.mark.parametrize("page_tokens", [0, 16])
def test_sparf_runs_to_the_end(path: str, card: ComputingCard, page_tokens: int) -> None:
    """On the no-op device, which computes nothing, and with the HLS kernels' arithmetic: pages and
    channels of the host go to the card, and what it says comes back."""
    call = make_sparf(
        SHAPE, ((3, 5, 4), (0, 17, 0), (2, 33, 20)), 32, 8, page_tokens=page_tokens, mean=True
    )
    nothing = XrtBackend(BridgeRuntime(0, path), SHAPE, 5.0)
    with pytest.raises(FpgaError, match="sparf has written no status: the card computes nothing"):
        nothing.sparf(call.work)
    assert nothing.close(1.0)
    found = XrtBackend(card, SHAPE, 5.0).sparf(call.work)
    kernels = CsimBackend(SHAPE)
    wanted = kernels.sparf(call.work)
    assert kernels.close(10)
    for field in ("masks", "alpha", "lse", "window_mass", "tokens", "pages"):
        np.testing.assert_array_equal(getattr(found, field), getattr(wanted, field))
    assert found.partials is not None
    assert wanted.partials is not None
    assert far_apart(found.partials, wanted.partials) < 1e-6


@pytest.mark.parametrize("pool_pages", [1000, 9])
def test_pages_of_the_host(card: ComputingCard, pool_pages: int) -> None:
    """Partials of all jobs in one run, or in several where they do not fit."""
    memory, work = problem(8 if pool_pages > 8 else 12)
    backend = XrtBackend(card, SHAPE, 5.0, pool_bytes=pool_pages * SHAPE.page_bytes)
    assert_same(backend.tried("this"), work)
    assert card.runs == 2
    more, longer = problem(14, seed=1)
    if pool_pages == 1000:
        assert_same(backend, longer)
    else:
        jobs = longer.jobs.copy()
        jobs["first"], jobs["entries"] = [0, 5, 2], [7, 9, 0]
        cut = AttendWork(longer.queries, longer.entries, jobs, 0.125, 3, longer.v_offset)
        assert_same(backend, cut)
        assert card.runs == 4
        with pytest.raises(FpgaLimitError, match=r"a call of attend needs .* of the card's memory"):
            backend.attend(longer)
    assert memory.any()
    assert more.any()


def test_pages_in_the_cards_memory_stay_where_they_are(card: ComputingCard) -> None:
    backend = XrtBackend(card, SHAPE, 5.0)
    memory = backend.peer_memory(16 * SHAPE.page_bytes)
    rng = np.random.default_rng(3)
    memory.view(np.float16)[:] = rng.standard_normal(memory.nbytes // 2)
    entries = np.zeros(6, ENTRY.dtype)
    entries["address"] = memory.ctypes.data + np.arange(6, dtype=np.uint64) * SHAPE.page_bytes
    entries["tokens"] = 16
    _, work = problem(6)
    peer = AttendWork(work.queries, entries, work.jobs, 0.125, 3, checksum=True)
    digests = backend.attend(peer).digests
    assert digests is not None
    assert np.array_equal(digests, NumpyBackend(SHAPE).digests(peer))
    mixed = entries.copy()
    mixed["address"][2] = work.entries["address"][0]
    with pytest.raises(ValueError, match="some pages of a call are in the card's memory"):
        backend.attend(AttendWork(work.queries, mixed, work.jobs, 0.125, 3))


def test_kernels_of_another_shape_are_found_out(path: str) -> None:
    card = ComputingCard(BridgeRuntime(0, path), KernelShape(64, 8, "float16"))
    with pytest.raises(FpgaError, match="do not attend as kernels of KernelShape"):
        XrtBackend(card, SHAPE, 5.0).tried("this")


def test_another_version_is_refused(path: str, xclbin: Callable[..., Path]) -> None:
    for name, options, problem_ in (
        ("moved", {"shift": 8}, "attend is of another version than 1: .* q is not 8 bytes at 0x10"),
        ("short", {"kernels": [ATTEND]}, "has no kernel sparf, only attend"),
    ):
        other = str(xclbin(name, **options))
        with pytest.raises(FpgaError, match=problem_) as raised:
            XrtBackend.open(other, 0, SHAPE, 5.0)
        assert isinstance(raised.value, FpgaVersionError) == (name == "moved")
    backend = XrtBackend(ComputingCard(BridgeRuntime(0, path), SHAPE, version=7), SHAPE, 5.0)
    with pytest.raises(FpgaVersionError, match="of version 7, and version 1 is needed"):
        backend.tried("this")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FpgaError, match="cannot be read"):
        XrtBackend.open(str(tmp_path / "missing.xclbin"), 0, SHAPE, 5.0)
    wrong = tmp_path / "wrong.xclbin"
    wrong.write_bytes(b"not one" * 100)
    with pytest.raises(FpgaError, match=r"XRT: .*wrong\.xclbin"):
        XrtBackend.open(str(wrong), 0, SHAPE, 5.0)


@pytest.mark.parametrize(
    ("column", "value", "problem_"),
    [
        ("address", 0, "entry 3 has an address"),
        ("address", 72, "entry 3 has an address"),
    ],
)
def test_broken_lists_name_the_entry(
    card: ComputingCard, column: str, value: int, problem_: str
) -> None:
    memory, work = problem(6)
    assert memory.any()
    work.entries[column][3] = value
    with pytest.raises(FpgaListError, match=problem_):
        XrtBackend(card, SHAPE, 5.0).attend(work)


class Stuck(ComputingCard):
    """A card whose runs end in another state, or not."""

    state = 3

    def run(self, kernel: str, arguments: Sequence[Argument], timeout_s: float) -> int:
        super().run(kernel, arguments, timeout_s)
        return self.state


@pytest.mark.parametrize(("state", "name"), [(3, "3"), (8, "timeout"), (9, "no response")])
def test_a_card_that_stops_answering(path: str, state: int, name: str) -> None:
    card = Stuck(BridgeRuntime(0, path), SHAPE)
    card.state = state
    backend = XrtBackend(card, SHAPE, 0.25)
    memory, work = problem(4)
    assert memory.any()
    text = rf"does not answer: it has not ended in 0\.25 s \(offload.*, its state is {name};"
    with pytest.raises(FpgaDeadlineError, match=text):
        backend.attend(work)
    runs = card.runs
    with pytest.raises(FpgaError, match="reset the card"):
        backend.attend(work)
    assert card.runs == runs
    assert not backend.close(1.0)  # its memory stays
    card.close()


def test_a_run_that_fails(path: str) -> None:
    card = Stuck(BridgeRuntime(0, path), SHAPE)
    card.state = 5
    backend = XrtBackend(card, SHAPE, 0.25)
    memory, work = problem(4)
    with pytest.raises(FpgaError, match="a run of attend ended with the state error"):
        backend.attend(work)
    assert memory.any()
    assert backend.close(1.0)


def test_buffers_grow(card: ComputingCard) -> None:
    backend = XrtBackend(card, SHAPE, 5.0)
    for count in (3, 300, 5):
        memory, work = problem(count, seed=count)
        assert_same(backend, work)
        assert memory.any()  # entries are addresses in it


def test_without_the_bridge_the_start_says_how_to_build_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSDKV_FPGA_BUILD", str(tmp_path))
    with pytest.raises(FpgaError, match=r"bridge .*libssdkv_xrt\.so cannot be loaded: .*make fpga"):
        XrtBackend.open(path, 0, SHAPE, 5.0)


def test_memory_that_drives_cannot_write_to(card: ComputingCard, tmp_path: Path) -> None:
    """Memory of the no-op device is not aligned: no I/O engine takes it, and pages come through the
    host's memory."""
    memory = BorrowedArena(XrtBackend(card, SHAPE, 5.0).peer_memory(1 << 20))
    assert memory.address % 4096
    (tmp_path / "data").write_bytes(bytes(8192))
    with (
        (tmp_path / "data").open("rb") as file,
        pytest.raises(ValueError, match="multiple of 4096"),
    ):
        open_engine(EngineOptions(engine="threads"), [file.fileno()], [file.name], memory)
