"""The HLS kernel of exact attention, by its C simulation, against fp64."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fpga_offload.problems import Doubles, Job, Problem, Tokens, finished, merged, normal
from tests.fpga_offload.sparf_problems import Call, problems, same_as_sparq, same_choice, tied
from tests.oracles import sparse_attention as oracle
from tests.sparse.contexts import Contexts, Row
from vllm_ssdkv.base.checksum import checksum_pages
from vllm_ssdkv.base.errors import FpgaError, FpgaLimitError, FpgaListError
from vllm_ssdkv.fpga_offload.csim import CsimBackend, library_path
from vllm_ssdkv.fpga_offload.description import (
    DTYPES,
    GROUPS,
    HEAD_SIZES,
    MAX_JOB_ENTRIES,
    PAGE_TOKENS,
    KernelShape,
)
from vllm_ssdkv.fpga_offload.library import LibraryBackend
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.sparse.protocol import Budget
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector

HLS = Path(__file__).parent.parent.parent / "fpga_offload"
LIMIT = 1e-5
SHAPES = [KernelShape(d, g, t) for d, g, t in product(HEAD_SIZES, GROUPS, DTYPES)]
SMALL = KernelShape(64, 2, "float16")


def name_of(shape: KernelShape) -> str:
    return f"{shape.head_size}-{shape.group}-{shape.dtype}"


@contextmanager
def csim(shape: KernelShape) -> Iterator[CsimBackend]:
    backend = CsimBackend(shape)
    try:
        yield backend
    finally:
        assert backend.close(10)


def solve(problem: Problem) -> None:
    with csim(problem.shape) as backend:
        error, of_lse = problem.errors(backend.attend(problem.work))
    assert error < LIMIT
    assert of_lse < LIMIT


def ragged(draw: np.random.Generator, pages: int) -> list[int]:
    """Valid tokens of pages; half of them are whole."""
    tokens = draw.integers(1, PAGE_TOKENS + 1, pages)
    tokens[draw.random(pages) < 0.5] = PAGE_TOKENS
    return [int(one) for one in tokens]


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_every_shape(shape: KernelShape) -> None:
    """One token, no page, a page, blocks whole and not, masks."""
    draw = np.random.default_rng(shape.head_size + shape.group)
    lists = [[1], [], [16], [16] * 8, [16] * 8 + [3], [7] + [16] * 20, ragged(draw, 37)]
    jobs = [Job(tokens) for tokens in lists]
    solve(Problem(shape, jobs, seed=shape.group))
    masked = [
        Job(tokens, [int(mask) for mask in draw.integers(0, 1 << 16, len(tokens))])
        for tokens in lists
    ]
    masked.append(Job([16] * 9, [0] * 9))
    masked.append(Job([16] * 9, [0] * 8 + [0x8000]))
    solve(Problem(shape, masked, seed=shape.group))


@pytest.mark.parametrize("path", sorted(library_path().parent.glob("libssdkv_csim*.so")))
def test_every_library_that_is_built(path: Path) -> None:
    """Both libraries, also the one for other CPUs than this."""
    if "avx2" in path.name and path != library_path():
        pytest.skip("no AVX2 here")
    problem = Problem(KernelShape(128, 4, "float16"), [Job([16] * 20 + [3]), Job([1])])
    backend = LibraryBackend("csim", path, problem.shape)
    assert max(problem.errors(backend.attend(problem.work))) < LIMIT
    assert backend.close(10)


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("tokens", [4096, 65536])
def test_every_shape_long(shape: KernelShape, tokens: int) -> None:
    solve(Problem(shape, [Job([PAGE_TOKENS] * (tokens // PAGE_TOKENS))], seed=3))


def subnormal(draw: np.random.Generator, tokens: int, size: int) -> Doubles:
    """Mostly subnormal in fp16."""
    return draw.standard_normal((tokens, size)) * 2.0**-16


def tiny(draw: np.random.Generator, tokens: int, size: int) -> Doubles:
    """Mostly subnormal in bf16."""
    return draw.standard_normal((tokens, size)) * 2.0**-127


def equal(draw: np.random.Generator, tokens: int, size: int) -> Doubles:
    return np.broadcast_to(draw.standard_normal(size), (tokens, size)).copy()


def rising(draw: np.random.Generator, tokens: int, size: int) -> Doubles:
    """With a query of ones the maximum rises with every token."""
    step = np.linspace(-2, 2, tokens)[:, None] if tokens else np.zeros((0, 1))
    return step + 0.01 * draw.standard_normal((tokens, size))


def falling(draw: np.random.Generator, tokens: int, size: int) -> Doubles:
    return -rising(draw, tokens, size)


def ones(_draw: np.random.Generator, tokens: int, size: int) -> Doubles:
    return np.ones((tokens, size))


def huge(draw: np.random.Generator, tokens: int, size: int) -> Doubles:
    """Logits above 1e5 that differ by eighths, with :func:`large`. Their sums are exact in fp32."""
    numbers = np.zeros((tokens, size))
    numbers[:, 0] = 2048
    numbers[:, size - 1] = draw.integers(0, 64, tokens)
    return numbers


def large(_draw: np.random.Generator, tokens: int, size: int) -> Doubles:
    numbers = np.zeros((tokens, size))
    numbers[:, 0], numbers[:, size - 1] = 64, 1 / 8
    return numbers


ADVERSARIAL: dict[str, tuple[Tokens, Tokens, Tokens, float]] = {
    "subnormal keys": (normal, subnormal, normal, 2.0**14),
    "subnormal values": (normal, normal, subnormal, 0.0),
    "subnormal queries": (subnormal, normal, normal, 2.0**14),
    "equal scores": (normal, equal, normal, 0.0),
    "rising maximum": (ones, rising, normal, 0.25),
    "falling maximum": (ones, falling, normal, 0.25),
    "huge scores": (large, huge, normal, 1.0),
    "all scores zero": (normal, lambda _draw, n, d: np.zeros((n, d)), normal, 0.0),
}
"""Makers of queries, keys and values, and a scale."""


@pytest.mark.parametrize("case", ADVERSARIAL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adversarial_numbers(case: str, dtype: str) -> None:
    query, key, value, scale = ADVERSARIAL[case]
    if dtype == "bfloat16" and value is subnormal:
        value = tiny
    for head_size, group in ((64, 5), (128, 1)):
        shape = KernelShape(head_size, group, "bfloat16" if dtype == "bfloat16" else "float16")
        jobs = [Job([16] * 24 + [5]), Job([1]), Job([9] * 10)]
        solve(Problem(shape, jobs, 5, scale, key, value, query))


def test_pages_of_more_tokens() -> None:
    """A page of 48 tokens is three entries; V lies behind all of its K."""
    solve(Problem(SMALL, [Job([16, 16, 16, 16, 2]), Job([16] * 30)], page_tokens=48))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=40), st.integers(1, 6), st.integers(0, 99))
def test_splits_merge_to_the_whole(tokens: list[int], parts: int, seed: int) -> None:
    problem = Problem(SMALL, [Job(tokens)], seed)
    (whole,) = problem.work.jobs
    draw = np.random.default_rng(seed)
    cuts = np.sort(draw.integers(0, len(tokens) + 1, parts - 1))
    edges = [0, *cuts.tolist(), len(tokens)]
    jobs = np.repeat(problem.work.jobs, parts)
    jobs["first"] = edges[:-1]
    jobs["entries"] = np.diff(edges)
    jobs["out"] = np.arange(parts)
    with csim(SMALL) as backend:
        once = backend.attend(problem.work)
        split = backend.attend(replace(problem.work, jobs=jobs, partials=parts))
    output, lse = merged(split, range(parts))
    wanted, wanted_lse = finished(once, int(whole["out"]))
    assert np.abs(output - wanted).max() < LIMIT * np.abs(wanted).max()
    assert np.abs(lse - wanted_lse).max() < LIMIT


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(HEAD_SIZES), st.lists(st.integers(1, 16), min_size=1, max_size=20), st.data()
)
def test_a_flipped_bit_in_any_page_is_found(
    head_size: int, tokens: list[int], data: st.DataObject
) -> None:
    """Digests are those of the store; each bit belongs to one page."""
    shape = KernelShape(head_size, 1, "bfloat16")
    problem = Problem(shape, [Job(tokens[:5]), Job(tokens[5:])])
    work = replace(problem.work, checksum=True)
    address = np.ascontiguousarray(work.entries["address"])
    wanted = checksum_pages(address, shape.page_bytes)
    with csim(shape) as backend:
        np.testing.assert_array_equal(backend.attend(work).digests, wanted)
        for page in range(len(tokens)):
            at = int(address[page]) - problem.memory.ctypes.data
            at += data.draw(st.integers(0, shape.page_bytes - 1))
            problem.memory[at] ^= 1 << data.draw(st.integers(0, 7))
            found = backend.attend(work).digests
            assert found is not None
            assert found[page] != wanted[page]
            wanted[page] = found[page]
            np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(checksum_pages(address, shape.page_bytes), wanted)


def test_digests_are_of_no_job_without_the_flag() -> None:
    with csim(SMALL) as backend:
        assert backend.attend(Problem(SMALL, [Job([16])]).work).digests is None


@pytest.mark.parametrize(
    ("field", "value", "error", "text"),
    [
        ("tokens", 0, FpgaListError, "entry 3 has not 1 to 16 tokens"),
        ("tokens", 17, FpgaListError, "entry 3 has not 1 to 16 tokens"),
        ("address", 0, FpgaListError, "entry 3 has an address that is 0"),
        ("address", 32, FpgaListError, "entry 3 has an address"),
    ],
)
def test_a_broken_entry_is_named(field: str, value: int, error: type[FpgaError], text: str) -> None:
    problem = Problem(SMALL, [Job([16] * 6)])
    entries = problem.work.entries.copy()
    if field == "address" and value:
        entries["address"][3] += np.uint64(value)
    else:
        entries[field][3] = value
    with csim(SMALL) as backend, pytest.raises(error, match=text):
        backend.attend(replace(problem.work, entries=entries))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("first", 7, "job 1 has entries beyond"),
        ("entries", 2**32 - 1, "job 1 has entries beyond"),
        ("query", 2, "job 1 has query 2"),
        ("out", 9, "job 1 has out 9"),
    ],
)
def test_a_broken_job_is_named(field: str, value: int, text: str) -> None:
    problem = Problem(SMALL, [Job([16] * 6), Job([16] * 2)])
    jobs = problem.work.jobs.copy()
    jobs[field][1] = value
    with csim(SMALL) as backend, pytest.raises(FpgaListError, match=text):
        backend.attend(replace(problem.work, jobs=jobs))


def test_a_job_above_the_limit_is_named() -> None:
    problem = Problem(SMALL, [Job([16])])
    entries = np.repeat(problem.work.entries, MAX_JOB_ENTRIES + 1)
    jobs = np.repeat(problem.work.jobs, 2)
    jobs["entries"] = 1, MAX_JOB_ENTRIES + 1
    jobs["out"] = 0, 1
    work = replace(problem.work, entries=entries, jobs=jobs, partials=2)
    with csim(SMALL) as backend:
        with pytest.raises(FpgaLimitError, match=f"job 1 is longer .* {MAX_JOB_ENTRIES} entries"):
            backend.attend(work)
        jobs["entries"][1] = MAX_JOB_ENTRIES
        output, _ = finished(backend.attend(work), 1)
    wanted, _ = problem.answer(0)
    assert np.abs(output - wanted).max() < LIMIT * np.abs(wanted).max()


def test_arrays_that_do_not_fit_are_refused() -> None:
    work = Problem(SMALL, [Job([16])]).work
    wrong = [
        replace(work, queries=work.queries[:, :1]),
        replace(work, queries=work.queries.astype(np.float32)),  # type: ignore[arg-type]
        replace(work, v_offset=1024),
        replace(work, v_offset=4096 + 2),
    ]
    with csim(SMALL) as backend:
        for one in wrong:
            with pytest.raises(ValueError, match=r"queries|v_offset"):
                backend.attend(one)


def test_a_library_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "libssdkv_csim.so"
    path.write_bytes(b"no library")
    with pytest.raises(FpgaError, match=str(path)):
        LibraryBackend("csim", path, SMALL)


def test_a_closed_backend_says_so() -> None:
    with csim(SMALL) as backend:
        pass
    with pytest.raises(FpgaError, match="csim is closed"):
        backend.attend(Problem(SMALL, [Job([16])]).work)


@pytest.mark.parametrize("kernel", ["attend", "sparf"])
def test_kernels_are_what_the_vendors_compiler_reads(kernel: str) -> None:
    """C++14, with the shim in place of the vendor's headers."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folders = [f"-I{HLS / name}" for name in ("hls", "hls/shim", "generated")]
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]
    subprocess.run(
        [
            compiler,
            "-std=c++14",
            "-fsyntax-only",
            *warnings,
            "-Wno-unknown-pragmas",
            *folders,
            "-DSSDKV_HEAD_SIZE=128",
            "-DSSDKV_GROUP=5",
            "-DSSDKV_BFLOAT16=1",
            str(HLS / "hls" / f"{kernel}.cpp"),
        ],
        check=True,
        timeout=120,
    )


# ---- the HLS kernel of SparF, by its C simulation: what is chosen, and what is attended to ----


@settings(deadline=None, max_examples=15)
@given(
    problem=problems(),
    granularity=st.sampled_from(["token", "page"]),
    share=st.floats(0.01, 1),
    channels=st.integers(1, 256),
    sinks=st.integers(0, 40),
    rest=st.booleans(),
)
def test_the_choice_is_the_selectors(
    problem: Contexts,
    granularity: str,
    share: float,
    channels: int,
    sinks: int,
    rest: bool,
) -> None:
    budget = Budget(share=share)
    kernels = CpuScoringKernels(1)
    kind = "page" if granularity == "page" else "token"
    selector = SparfSelector(budget, channels, kind, sinks, kernels, estimate_rest=rest)
    same_choice(problem, selector)


@pytest.mark.parametrize("values", [1, 2, 3])
def test_ties_of_tokens_go_as_the_selectors(values: int) -> None:
    """K has few different numbers, so most scores are equal to many others."""
    problem = tied(np.random.default_rng(values).integers(0, values, 9 * 64))
    for tokens in (10, 33, 100, 200):
        budget = Budget(tokens=tokens)
        same_choice(problem, SparfSelector(budget, 8, "token", 0, CpuScoringKernels(1)))


@pytest.mark.parametrize("values", [1, 2, 3])
def test_ties_of_pages_go_as_the_selectors(values: int) -> None:
    """Pages are copies of few. (Those of equal tokens in another order may differ in rounding.)"""
    draw = np.random.default_rng(values)
    pages = draw.integers(0, 5, (values, PAGE_TOKENS))[draw.integers(0, values, 9 * 4)]
    problem = tied(pages.ravel())
    for tokens in (40, 100, 200):
        budget = Budget(tokens=tokens)
        same_choice(problem, SparfSelector(budget, 8, "page", 0, CpuScoringKernels(1)))


@settings(deadline=None, max_examples=12)
@given(problem=problems(), share=st.floats(0.05, 1), channels=st.floats(0.05, 1))
def test_sparf_is_sparq(problem: Contexts, share: float, channels: float) -> None:
    same_as_sparq(problem, share, channels)


def test_without_a_mean_it_is_attention_to_what_was_chosen() -> None:
    layout = BlockLayout.unpadded(32, 16, 2, 128, torch.bfloat16)
    problem = Contexts(layout, 4, [Row(9, 33), Row(0, 2)], seed=8)
    problem.query = problem.query.to(layout.dtype).float()
    call = Call.of(problem, [70, 5], 16, rest=False)
    for work, window in ((call.work, True), (replace(call.work, window=False), False)):
        result = replace(call, work=work).run()
        assert result.partials is not None
        for job in range(4):
            row, head = divmod(job, 2)
            chosen = torch.from_numpy(call.chosen(result, job))
            if not window:
                chosen[problem.rows[row].blocks * layout.block_tokens :] = False
            both = torch.zeros((2, len(chosen)), dtype=torch.bool)
            both[head] = chosen
            out, lse = oracle.attend_chosen(
                problem.query[row], problem.key[row], problem.value[row], both, problem.scale
            )
            mine = slice(head * 4, head * 4 + 4)
            if not chosen.any():
                assert (result.partials.m[job] == -np.inf).all()
                continue
            found = result.partials.acc[job] / result.partials.l[job][:, None]
            found_lse = result.partials.m[job] + np.log(result.partials.l[job])
            assert np.abs(found - out[mine].numpy()).max() < 1e-5 * float(out.abs().max())
            assert np.abs(found_lse - lse[mine].numpy()).max() < 1e-5


def _small() -> Call:
    layout = BlockLayout.unpadded(32, 16, 1, 64, torch.float16)
    return Call.of(Contexts(layout, 1, [Row(3, 5), Row(2, 20)], seed=1), [16, 16], 8)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("first_entry", 12, "job 1 has entries beyond"),
        ("first_window", 2**31, "job 1 has entries beyond"),
        ("first_channels", 4, "job 1 has entries beyond"),
        ("channel_blocks", 2**32 - 1, "job 1 has entries beyond"),
        ("query", 2, "job 1 has query 2"),
    ],
)
def test_a_broken_job_of_sparf_is_named(field: str, value: int, text: str) -> None:
    call = _small()
    jobs = call.work.jobs.copy()
    jobs[field][1] = value
    with pytest.raises(FpgaListError, match=text):
        replace(call, work=replace(call.work, jobs=jobs)).run()


def test_broken_pages_and_channels_are_named() -> None:
    call = _small()
    channels = call.work.channels.copy()
    channels[4] += np.uint64(2)
    with pytest.raises(FpgaListError, match="channel block 4 has an address"):
        replace(call, work=replace(call.work, channels=channels)).run()
    for entry, tokens in ((2, 15), (6, 17)):
        entries = call.work.entries.copy()
        entries["tokens"][entry] = tokens
        with pytest.raises(FpgaListError, match=f"entry {entry} has not 1 to 16"):
            replace(call, work=replace(call.work, entries=entries)).run()
    entries = call.work.entries.copy()
    entries["address"][7] = 0
    with pytest.raises(FpgaListError, match="entry 7 has an address that is 0"):
        replace(call, work=replace(call.work, entries=entries)).run()


@pytest.mark.parametrize(
    ("name", "value", "argument"),
    [
        ("keep_channels", 0, "keep_channels"),
        ("keep_channels", 65, "keep_channels"),
        ("channel_group", 3, "channel_group"),
        ("block_tokens", 24, "block_tokens"),
    ],
)
def test_a_number_out_of_range_is_named(name: str, value: int, argument: str) -> None:
    call = _small()
    with pytest.raises(FpgaListError, match=f"argument {argument} is out of range"):
        replace(call, work=replace(call.work, **{name: value})).run()  # type: ignore[arg-type]


def test_a_mean_needs_all_that_is_attended_to() -> None:
    call = _small()
    with pytest.raises(ValueError, match="mean_value needs attend and window"):
        replace(call, work=replace(call.work, window=False)).run()


def test_a_context_at_and_above_the_limit() -> None:
    """The same block again and again: 65,536 tokens with the window."""
    layout = BlockLayout.unpadded(64, 16, 1, 64, torch.float16)
    call = Call.of(Contexts(layout, 1, [Row(1, 5)], seed=1), [4000], 8, rest=False)
    blocks = MAX_JOB_ENTRIES // 4 - 1
    entries = np.concatenate([np.tile(call.work.entries[:4], blocks + 1), call.work.entries[4:]])
    jobs = call.work.jobs.copy()
    work = replace(
        call.work, entries=entries, jobs=jobs, channels=np.repeat(call.work.channels, blocks + 1)
    )
    jobs["channel_blocks"], jobs["first_window"] = blocks, 4 * (blocks + 1)
    result = replace(call, work=work).run()
    assert result.tokens[0] == 4000
    jobs["channel_blocks"] = blocks + 1
    with pytest.raises(FpgaLimitError, match=r"job 0 is longer .* 65536 tokens"):
        replace(call, work=work).run()
