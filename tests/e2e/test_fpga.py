"""An FPGA attends to contexts, and chooses what to attend to, with the real vLLM.

The demo's model answers its questions, as stock vLLM and the same engine without a device do. Its
shape is one of those that `make fpga` builds for the RTL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import kept_log
from tests.e2e.test_sparse import BUDGET, CHUNK, Recall
from tests.e2e.workload import kv_tokens, page_mode
from tests.fpga_offload.needs import needs_rtlsim
from tests.kit.engine import Engine
from vllm_ssdkv.base.errors import FpgaDeadlineError
from vllm_ssdkv.config.offload import OffloadFault
from vllm_ssdkv.connector import active_worker
from vllm_ssdkv.fpga_offload.backend import AttendWork, Partials, SparfResult, SparfWork
from vllm_ssdkv.fpga_offload.csim import CsimBackend
from vllm_ssdkv.fpga_offload.description import KernelShape
from vllm_ssdkv.offload.fpga import FpgaDevice
from vllm_ssdkv.offload.offloader import Offloader
from vllm_ssdkv.offload.testing.faulty import FaultyDevice
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR, Question, ask

SHAPE = KernelShape(64, 2, "bfloat16")
QUESTIONS = [ask(task, tokens, 1) for task in ("single", "copy") for tokens in (1024, 2048)]
EXACT: dict[str, object] = {"selector": "exact"}
LAYERS = 3

Tokens = list[tuple[int, ...]]


@dataclass
class Fpga(Recall):
    """A bench of the demo's model whose contexts an FPGA attends to."""

    backend: str = "csim"
    window: int = 64
    key: Path | None = None
    peer: bool = False

    def start(self) -> None:
        sparse = {"exact_below": 0, "page_cache": "1MiB", **self.options}
        chooses = self.selector != "exact"
        io = {"staging": "4MiB", "fault_file": str(self.control), "deadline": 30.0}
        offload = {"kind": "fpga", "backend": self.backend, "share": 1.0, "peer": self.peer}
        self.engine = Engine(
            MODEL_DIR,
            ssdkv=page_mode(
                self.places,
                window=self.window,
                dram=self.dram,
                selector=self.selector,
                io=io,
                offload=offload,
                **({"sparse": sparse} if chooses else {}),
                **({"encryption": {"key_file": str(self.key)}} if self.key else {}),
            ),
            kv_tokens=8 * kv_tokens(self.window, CHUNK, self.block),
            dtype="bfloat16",
            block_size=self.block,
            max_num_batched_tokens=CHUNK,
            max_model_len=4096,
        )

    def answers(
        self, asked: dict[str, object] | None, questions: Sequence[Question] = QUESTIONS
    ) -> Tokens:
        """Tokens of each answer, all in one batch."""
        self.turn += 1
        for number, question in enumerate(questions):
            name = f"{self.turn}.{number}"
            self.engine.add(name, list(question.prompt), len(question.answer), asked)
        found = self.engine.run()
        self.engine.settle()
        return [found[f"{self.turn}.{number}"] for number in range(len(questions))]

    @property
    def worker(self) -> Any:  # noqa: ANN401 - our worker's half, in this process
        return active_worker.worker()

    @property
    def choice(self) -> Any:  # noqa: ANN401 - who chooses
        return self.worker.page_mode.choices._near.__self__.choice

    @contextmanager
    def device(self, made: Offloader | None, *, chooses: bool = True) -> Iterator[None]:
        """Have another one for a while, or none."""
        own, self.worker.page_mode.offloader = self.worker.page_mode.offloader, made
        self.choice.in_use = chooses
        try:
            yield
        finally:
            self.worker.page_mode.offloader = own
            self.choice.in_use = True
            if made is not None:
                assert made.close(10.0)

    def calls(self, kernel: str) -> float:
        return self.count("offload_kernel_calls", kernel=kernel)


def assert_sound(fpga: Fpga) -> None:
    for name in ("checksum_failures", "load_failures", "slots_dropped", "recomputed_requests"):
        assert fpga.count(name) == 0, name


@pytest.fixture(scope="module")
def stock() -> Tokens:
    """Answers of vLLM alone, which are right."""
    with Engine(
        MODEL_DIR, kv_tokens=16384, dtype="bfloat16", enable_prefix_caching=False
    ) as engine:
        prompts = [list(question.prompt) for question in QUESTIONS]
        longest = max(len(question.answer) for question in QUESTIONS)
        found = engine.answers(prompts, longest)
    pairs = zip(found, QUESTIONS, strict=True)
    answers = [answer.tokens[: len(question.answer)] for answer, question in pairs]
    assert answers == [question.answer for question in QUESTIONS]
    return answers


@needs_rtlsim(64, 2)
@pytest.mark.parametrize("selector", ["exact", "sparf"])
def test_the_rtl_answers_too(
    selector: str, stock: Tokens, devices: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """A short question: its kernels are simulated clock by clock."""
    assert stock
    question = ask("single", 1024, 1)
    options = {"budget": BUDGET, "summaries": "8MiB"} if selector == "sparf" else {}
    made = Fpga(
        devices(1), selector, tmp_path / "faults.json", options, dram="20MiB", backend="rtlsim"
    )
    made.block = 16
    made.start()
    try:
        assert made.answers(None, [question]) == [question.answer]
        calls = LAYERS * (len(question.answer) - 1)
        assert made.calls("attend") == calls
        assert made.calls("sparf") == (calls if selector == "sparf" else 0)
        assert made.count("offload_in_use") == 1
    finally:
        made.engine.close()


def test_drives_write_into_its_memory(
    stock: Tokens, devices: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """And what the kernel's checksums say of the pages is compared before they count."""
    made = Fpga(devices(2), "exact", tmp_path / "faults.json", dram="6MiB", block=32, peer=True)
    made.start()
    try:
        assert made.answers(None) == stock
        assert made.answers(None) == stock
        assert made.count("offload_peer_pages", found="right") > 0
        assert made.count("offload_peer_pages", found="wrong") == 0
        assert made.count("offload_in_use") == 1
        assert_sound(made)
    finally:
        made.engine.close()


@pytest.fixture(scope="module", params=["page", "token"])
def fpga(
    request: pytest.FixtureRequest,
    stock: Tokens,
    devices: Callable[..., list[dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fpga]:
    """The store of the one that chooses tokens is encrypted."""
    assert stock  # its engine has ended
    folder = tmp_path_factory.mktemp("fpga")
    options = {"budget": BUDGET, "summaries": "8MiB", "granularity": request.param}
    made = Fpga(devices(2), "sparf", folder / "faults.json", options, dram="20MiB", block=64)
    if request.param == "token":
        made.key = folder / "key"
        made.key.write_text("5e" * 32)
        made.key.chmod(0o600)
    with kept_log() as lines:
        made.start()
    told = any("decrypted in memory of the host before the FPGA gets them" in one for one in lines)
    assert told == (made.key is not None)
    made.answers(EXACT)  # prompts are stored from here on
    yield made
    made.engine.close()


def test_tokens_of_stock_vllm(fpga: Fpga, stock: Tokens) -> None:
    before = fpga.calls("attend")
    assert fpga.answers(EXACT) == stock
    assert fpga.calls("attend") > before
    assert fpga.count("offload_steps", by="device") > 0
    assert fpga.count("offload_in_use") == 1
    assert_sound(fpga)


def test_sparf_chooses_and_attends_as_without_a_device(fpga: Fpga, stock: Tokens) -> None:
    with fpga.device(None, chooses=False):
        before = fpga.calls("attend"), fpga.calls("sparf")
        wanted = fpga.answers(None)
        assert (fpga.calls("attend"), fpga.calls("sparf")) == before
    selections = fpga.count("sparse_selections")
    assert fpga.answers(None) == wanted
    assert wanted == stock  # an eighth is enough
    for kernel, count in zip(("attend", "sparf"), before, strict=True):
        assert fpga.calls(kernel) > count, kernel
    assert fpga.count("sparse_selections") > selections
    assert fpga.choice.in_use
    assert_sound(fpga)


class Broken(CsimBackend):
    """A backend that fails from some call on: by a list that is broken on its way, or a deadline.

    Attributes:
        left: Calls that go well before.
    """

    def __init__(self, left: int = 0):
        super().__init__(SHAPE)
        self.left = left

    def attend(self, work: AttendWork) -> Partials:
        self.left -= 1
        if self.left < 0:
            entries = work.entries.copy()
            entries["tokens"][-1] = 17
            work = replace(work, entries=entries)
        return super().attend(work)

    def sparf(self, work: SparfWork) -> SparfResult:
        raise FpgaDeadlineError(f"{work.partials} jobs stand still")


@pytest.mark.parametrize("left", [0, 2 * LAYERS + 1])
def test_a_broken_list_is_named_and_the_requests_go_on(
    fpga: Fpga, stock: Tokens, log: list[str], left: int
) -> None:
    counters = fpga.worker.counters
    made = Offloader(FpgaDevice(Broken(left), counters), 30.0, counters)
    before = counters.total("offload_failures", cause="error")
    with fpga.device(made):
        assert fpga.answers(EXACT) == stock
        assert not made.in_use
    assert counters.total("offload_failures", cause="error") == before + 1
    assert any("FpgaListError" in line and "has not 1 to 16 tokens" in line for line in log)
    assert_sound(fpga)


def test_who_chooses_stops_answering(fpga: Fpga, stock: Tokens, log: list[str]) -> None:
    own, fpga.choice.backend = fpga.choice.backend, Broken()
    try:
        assert fpga.answers(None) == stock
        assert not fpga.choice.in_use
    finally:
        fpga.choice.backend, fpga.choice.in_use = own, True
    assert any("jobs stand still; the host chooses in its place" in line for line in log)
    assert_sound(fpga)


@pytest.mark.parametrize("kind", ["error", "rows", "stall"])
def test_twins_fail_around_it(fpga: Fpga, stock: Tokens, kind: Any) -> None:  # noqa: ANN401
    counters = fpga.worker.counters
    device = FaultyDevice(
        FpgaDevice(CsimBackend(SHAPE), counters), OffloadFault(kind=kind, after=4)
    )
    made = Offloader(device, 0.2 if kind == "stall" else 30.0, counters)
    with fpga.device(made):
        assert fpga.answers(EXACT) == stock
        assert not made.in_use
    assert_sound(fpga)
