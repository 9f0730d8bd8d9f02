"""The RTL's attention, simulated, against fp64: lengths, masks, hostile numbers, stalls, lists."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.fpga_offload.needs import build_shape, needs_rtlsim
from tests.fpga_offload.rtl.contexts import (
    Call,
    Fill,
    Floats,
    distance,
    far_apart,
    make_call,
    merged,
    only_job,
)
from tests.oracles.fpga_backend import NumpyBackend
from vllm_ssdkv.base.checksum import checksum_pages
from vllm_ssdkv.base.errors import (
    FpgaDeadlineError,
    FpgaError,
    FpgaLimitError,
    FpgaListError,
    FpgaMemoryError,
)
from vllm_ssdkv.fpga_offload.csim import CsimBackend
from vllm_ssdkv.fpga_offload.description import GROUPS, HEAD_SIZES, MAX_JOB_ENTRIES, KernelShape
from vllm_ssdkv.fpga_offload.rtlsim import Port, RtlsimBackend

CLOSE = 1e-5
DTYPES: tuple[Literal["float16"], Literal["bfloat16"]] = ("float16", "bfloat16")
SHAPES = [
    pytest.param(KernelShape(d, g, dtype), id=f"d{d}-g{g}-{dtype}", marks=needs_rtlsim(d, g))
    for d, g in ((128, 1), (128, 4), (64, 2))
    for dtype in DTYPES
]
"""One of each size in fp16, and behind it in bf16."""
HALF = KernelShape(128, 1, "float16")
ANY = pytest.param(HALF, id="d128-g1", marks=needs_rtlsim(128, 1))
LENGTHS = (0, 1, 5, 16, 17, 127, 128, 129, 0, 255, 257, 300)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[RtlsimBackend]:
    made = RtlsimBackend(request.param)
    yield made
    made.close(1.0)


over_shapes = pytest.mark.parametrize("backend", SHAPES, indirect=True)
over_sizes = pytest.mark.parametrize("backend", SHAPES[::2], indirect=True)
on_any = pytest.mark.parametrize("backend", [ANY], indirect=True)


@over_shapes
def test_jobs_of_all_lengths(backend: RtlsimBackend) -> None:
    call = make_call(backend.shape, LENGTHS, seed=1)
    assert distance(backend, call) < CLOSE


@over_shapes
def test_masks(backend: RtlsimBackend) -> None:
    call = make_call(backend.shape, (1, 40, 300, 128), seed=2, keep=0.1)
    assert distance(backend, call) < CLOSE


@over_shapes
def test_stalls_on_every_channel(backend: RtlsimBackend) -> None:
    backend.set_memory(seed=3, stalls=0.3, latency=17)
    call = make_call(backend.shape, (130, 0, 300, 1), seed=3, keep=0.7, v_gap=192)
    assert distance(backend, call) < CLOSE


def subnormals(_: np.random.Generator, __: Floats, keys: Floats, values: Floats) -> None:
    keys *= 1e-6
    values *= 1e-6


def equal_scores(_: np.random.Generator, __: Floats, keys: Floats, ___: Floats) -> None:
    keys[:] = keys[0]


def rising_maximum(_: np.random.Generator, queries: Floats, keys: Floats, __: Floats) -> None:
    queries[:] = np.sign(queries)
    keys[:] = np.sign(queries[0, 0]) * (np.arange(len(keys))[:, None] / 40)


def falling_maximum(rng: np.random.Generator, q: Floats, keys: Floats, values: Floats) -> None:
    rising_maximum(rng, q, keys, values)
    keys[:] = keys[::-1].copy()


def zeros(_: np.random.Generator, queries: Floats, keys: Floats, values: Floats) -> None:
    queries[:], keys[:], values[::2] = 0, 0, 0


def far_below_zero(_: np.random.Generator, queries: Floats, keys: Floats, __: Floats) -> None:
    queries[:] = 1
    keys[:] = -12 + np.round(keys)


def one_dominates(_: np.random.Generator, queries: Floats, keys: Floats, __: Floats) -> None:
    queries[:] = 8
    keys[:] = np.where(np.arange(len(keys))[:, None] == 200, 30, -30)


HOSTILE: dict[str, Fill] = {
    one.__name__: one
    for one in (
        subnormals,
        equal_scores,
        rising_maximum,
        falling_maximum,
        zeros,
        far_below_zero,
        one_dominates,
    )
}


@over_shapes
@pytest.mark.parametrize("fill", HOSTILE.values(), ids=HOSTILE)
def test_hostile_numbers(backend: RtlsimBackend, fill: Fill) -> None:
    call = make_call(backend.shape, (300,), seed=4, fill=fill)
    assert distance(backend, call) < CLOSE


@over_shapes
def test_splits_merge_to_the_whole(backend: RtlsimBackend) -> None:
    call = make_call(backend.shape, (333,), seed=5, keep=0.5)
    entries = len(call.work.entries)
    cuts = (0, 3, 3, entries - 1, entries)
    parts = [
        backend.attend(only_job(call, first, end - first).work)
        for first, end in itertools.pairwise(cuts)
    ]
    assert far_apart(merged(parts), backend.attend(call.work)) < CLOSE


def _broken(call: Call, part: str, field: str, value: int, index: int) -> Call:
    array = getattr(call.work, part).copy()
    array[field][index] = value
    changes: dict[str, Any] = {part: array}
    return replace(call, work=replace(call.work, **changes))


@on_any
@pytest.mark.parametrize(
    ("part", "field", "value", "index", "kind", "text"),
    [
        ("entries", "address", 0, 11, FpgaListError, "entry 11 has an address"),
        ("entries", "address", 4096 + 32, 3, FpgaListError, "entry 3 has an address"),
        ("entries", "tokens", 0, 20, FpgaListError, "entry 20 has not 1 to 16 tokens"),
        ("entries", "tokens", 17, 4, FpgaListError, "entry 4 has not 1 to 16 tokens"),
        ("jobs", "first", 1 << 31, 1, FpgaListError, "job 1 has entries beyond"),
        ("jobs", "entries", (1 << 32) - 1, 0, FpgaListError, "job 0 has entries beyond"),
    ],
)
def test_a_broken_list_is_named_and_the_next_call_runs(
    backend: RtlsimBackend,
    part: str,
    field: str,
    value: int,
    index: int,
    kind: type[FpgaError],
    text: str,
) -> None:
    call = make_call(HALF, (260, 100), seed=6)
    with pytest.raises(kind, match=text):
        backend.attend(_broken(call, part, field, value, index).work)
    assert distance(backend, call) < CLOSE


@on_any
def test_a_job_above_the_limit_is_named(backend: RtlsimBackend) -> None:
    call = make_call(HALF, (1, 16), seed=7)
    entries = np.repeat(call.work.entries, MAX_JOB_ENTRIES)
    jobs = call.work.jobs.copy()
    jobs["entries"][1] = MAX_JOB_ENTRIES + 1
    with pytest.raises(FpgaLimitError, match="job 1 is longer"):
        backend.attend(replace(call.work, entries=entries, jobs=jobs))


def summed(call: Call) -> Call:
    return replace(call, work=replace(call.work, checksum=True))


def digests_of(backend: RtlsimBackend | CsimBackend, call: Call) -> list[int]:
    digests = backend.attend(call.work).digests
    assert digests is not None
    return digests.tolist()


@over_shapes
def test_digests_are_the_stores_and_the_other_kernels(backend: RtlsimBackend) -> None:
    """Of pages that are masked out as well, and beside the same partials."""
    backend.set_memory(seed=17, stalls=0.2, latency=30)
    lengths = (130, 0, 300, 1, 17, 700)
    for keep, gap in ((None, 0), (0.05, 0), (0.5, 128)):
        call = summed(make_call(backend.shape, lengths, seed=17, keep=keep, v_gap=gap))
        found = backend.attend(call.work)
        oracle = CsimBackend(backend.shape)
        assert found.digests is not None
        assert found.digests.tolist() == digests_of(oracle, call)
        oracle.close(1.0)
        plain = replace(call.work, checksum=False)
        assert far_apart(found, NumpyBackend(backend.shape).attend(plain)) < CLOSE
        if not gap:
            address = np.ascontiguousarray(call.work.entries["address"])
            wanted = checksum_pages(address, backend.shape.page_bytes)
            np.testing.assert_array_equal(found.digests, wanted)


@over_sizes
def test_one_flipped_bit_in_any_page_is_found(backend: RtlsimBackend) -> None:
    call = summed(make_call(backend.shape, (150, 16, 1), seed=18))
    rng = np.random.default_rng(18)
    wanted = digests_of(backend, call)
    assert len(wanted) == 12
    for entry, address in enumerate(call.work.entries["address"]):
        at = int(address) - call.pages.ctypes.data + rng.integers(backend.shape.page_bytes)
        call.pages[at] ^= 1 << rng.integers(8)
        found = digests_of(backend, call)
        assert [i for i in range(12) if found[i] != wanted[i]] == [entry]
        wanted = found


@over_sizes
def test_checksums_cost_no_line_rate(backend: RtlsimBackend) -> None:
    assert line_rate(backend, summed(make_call(backend.shape, (4096,), seed=19))) >= 0.95


@on_any
def test_a_place_for_digests_is_a_multiple_of_theirs(backend: RtlsimBackend) -> None:
    call = summed(make_call(HALF, (40, 150), seed=20))
    wanted = digests_of(backend, call)
    entries = np.concatenate([call.work.entries[:1], call.work.entries])
    jobs = call.work.jobs.copy()
    jobs["first"] += 1
    shifted = replace(call, work=replace(call.work, entries=entries, jobs=jobs))
    assert digests_of(backend, shifted) == [0, *wanted]


@on_any
@pytest.mark.parametrize(
    ("port", "answers", "argument"),
    [
        ("list", 0, "jobs"),
        ("list", 1, "q"),
        ("list", 5, "entries"),
        ("list", 9, "entries"),
        ("page", 0, "pages"),
        ("page", 300, "pages"),
        ("out", 0, "digests"),
        ("out", 0, "out"),
    ],
)
def test_an_error_of_memory_is_named_and_the_next_call_runs(
    backend: RtlsimBackend, port: Port, answers: int, argument: str
) -> None:
    call = make_call(HALF, (300, 100), seed=21)
    backend.set_fault(port, answers)
    with pytest.raises(FpgaMemoryError, match=rf"^attend: memory .* {argument} \(.* with an error"):
        backend.attend(call.work if argument == "out" else summed(call).work)
    assert distance(backend, call) < CLOSE


@on_any
@pytest.mark.parametrize(
    ("port", "answers"), [("list", 0), ("list", 6), ("page", 3), ("page", 700), ("out", 0)]
)
def test_a_kernel_that_hangs_does_not_answer(
    backend: RtlsimBackend, port: Port, answers: int
) -> None:
    call = make_call(HALF, (300, 100), seed=22)
    backend.set_fault(port, answers, silent=True)
    with pytest.raises(FpgaDeadlineError, match=r"^attend: the kernel does not answer: .* cycles"):
        backend.attend(call.work)
    assert distance(backend, call) < CLOSE


@on_any
def test_what_it_does_not_know_is_refused(backend: RtlsimBackend) -> None:
    call = make_call(HALF, (16,), seed=8)
    with pytest.raises(ValueError, match="stalls"):
        backend.set_memory(stalls=1.0)
    assert backend.close(1.0)
    with pytest.raises(FpgaError, match="rtlsim is closed"):
        backend.set_fault("page", 1)
    with pytest.raises(FpgaError, match="rtlsim is closed"):
        backend.attend(call.work)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDKV_FPGA_BUILD", str(tmp_path))
    with pytest.raises(FpgaError, match=r"rtlsim_d256_g8.so: .*scripts/fpga.sh 256:8 builds them"):
        RtlsimBackend(KernelShape(256, 8, "bfloat16"))


@on_any
def test_beats_are_those_of_the_valid_tokens(backend: RtlsimBackend) -> None:
    found = backend.attend(make_call(HALF, (37, 16), seed=9).work)
    assert found.beats == (37 + 16) * 2 * 4


def line_rate(backend: RtlsimBackend, call: Call) -> float:
    found = backend.attend(call.work)
    return found.beats / found.cycles


@over_sizes
def test_long_contexts_run_at_line_rate(backend: RtlsimBackend) -> None:
    assert line_rate(backend, make_call(backend.shape, (4096,), seed=10)) >= 0.95


@over_sizes
def test_what_the_filter_drops_costs_its_reading(backend: RtlsimBackend) -> None:
    assert line_rate(backend, make_call(backend.shape, (4096,), seed=11, keep=0.1)) >= 0.85


@needs_rtlsim(128, 1)
@needs_rtlsim(128, 4)
def test_query_heads_share_one_stream() -> None:
    cycles = []
    for group in (1, 4):
        backend = RtlsimBackend(KernelShape(128, group, "float16"))
        cycles.append(backend.attend(make_call(backend.shape, (4096,), seed=12).work).cycles)
        backend.close(1.0)
    assert cycles[1] <= 1.1 * cycles[0]


MEMORIES = ((13, 0.0), (14, 0.2), (15, 0.5))
KEEPS = (None, 0.02, 0.5)


@pytest.mark.soak
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_shape(head_size: int, group: int) -> None:
    """Each mask and hostile numbers with each memory; of more than 256 channels with one of them.

    The library is the one that ``test_sparf.py`` asks for, so that it is built once.
    """
    build_shape(f"{head_size}:{group}:sparf")
    all_pairs = head_size * group <= 256
    for dtype in DTYPES:
        backend = RtlsimBackend(KernelShape(head_size, group, dtype))
        for place, (seed, stalls) in enumerate(MEMORIES):
            mine = slice(None) if all_pairs else slice(place, None, len(MEMORIES))
            backend.set_memory(seed=seed, stalls=stalls, latency=5 * seed)
            for keep in KEEPS[mine]:
                call = make_call(backend.shape, LENGTHS, seed=seed, keep=keep, v_gap=64 * seed)
                assert distance(backend, call) < CLOSE
                oracle = CsimBackend(backend.shape)
                assert digests_of(backend, summed(call)) == digests_of(oracle, summed(call))
                oracle.close(1.0)
            for fill in list(HOSTILE.values())[mine]:
                call = make_call(backend.shape, (1, 700), seed=seed, fill=fill)
                assert distance(backend, call) < CLOSE
        backend.set_memory()
        long = make_call(backend.shape, (4096,), seed=16)
        assert line_rate(backend, long) >= 0.95
        assert line_rate(backend, summed(long)) >= 0.94
        backend.close(1.0)
