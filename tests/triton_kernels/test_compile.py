"""Every kernel, with the arguments its wrapper launches it with, compiles to machine code.

No GPU is needed for that: Triton brings its assembler. What the interpreter accepts and the
compiler does not, and tiles that no device has shared memory for, show up here.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.conftest import CACHE
from vllm_ssdkv.kernels.operands.block_layout import (
    FLOAT8,
    PLAIN,
    BlockLayout,
    PartialState,
    Rows,
    Softmax,
)
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.kernels.operands.step_tables import StepTables
from vllm_ssdkv.store.memory.device_memory import DeviceMemory
from vllm_ssdkv.triton_kernels import (
    attend,
    choose,
    codes,
    decode_layer,
    digest,
    finish,
    merge,
    misses,
    order,
    pack,
    resident_pages,
    resolve,
    score,
    step_rows,
    store_kv,
    summarize,
    tokens,
)

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages")
SHARED = {80: 99 * 1024, 90: 227 * 1024}
"""Shared memory of a program, in bytes: 99 KiB is what compute capability 8.6 and 8.9 have."""


@dataclass
class Recorder:
    """Stands for a kernel and keeps what it is launched with."""

    kernel: triton.JITFunction
    launches: list[tuple[tuple[object, ...], dict[str, object]]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(side >= 1 for side in grid)
        return lambda *args, **kwargs: self.launches.append((args, kwargs))

    def compile(self, capability: int) -> triton.compiler.CompiledKernel:
        """The only launch, compiled as Triton specialises it at run time."""
        ((args, kwargs),) = self.launches
        names = list(inspect.signature(self.kernel.fn).parameters)
        options = {name: value for name, value in kwargs.items() if name in OPTIONS}
        constants = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        assert names == [*names[: len(args)], *constants]
        signature = dict.fromkeys(names, "constexpr")
        attributes: dict[tuple[int, ...], list[list[object]]] = {}
        for index, (name, value) in enumerate(zip(names, args, strict=False)):
            aligned = isinstance(value, torch.Tensor)
            if isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value == 1:
                constants[name] = 1
            else:
                assert isinstance(value, int)
                signature[name] = "i32"
                aligned = value % 16 == 0
            if aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(
            self.kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            attributes,
        )
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], Recorder]:
    """Replace a module's kernel by a recorder, and let its wrapper take CPU tensors.

    What Triton has compiled once, of the same source, options and target, it need not compile in
    the next run.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(CACHE / "ssdkv" / "triton"))

    def replace(module: ModuleType, name: str) -> Recorder:
        recorder = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, recorder)
        monkeypatch.setattr(module, "on_device_of", lambda tensor: nullcontext())
        return recorder

    return replace


def check(recorder: Recorder, capability: int) -> str:
    """PTX of a kernel that fits the device."""
    compiled = recorder.compile(capability)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED[capability]
    return str(compiled.asm["ptx"])


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("dtype", "head_size", "group", "queries", "splits", "absolute"),
    [
        (torch.bfloat16, 128, 4, 1, 8, False),
        (torch.float16, 128, 8, 1, 1, True),
        (torch.bfloat16, 128, 8, 512, 1, False),
        (torch.float16, 256, 2, 512, 1, False),
        (torch.float32, 256, 4, 512, 1, False),
        (torch.bfloat16, 80, 5, 512, 1, False),
        (torch.bfloat16, 512, 2, 512, 1, False),
        (torch.float32, 512, 8, 1, 1, False),
        (torch.float8_e4m3fn, 128, 4, 1, 8, True),
        (torch.float8_e5m2, 128, 8, 512, 1, False),
    ],
)
@pytest.mark.parametrize("sliding_window", [None, 128])
def test_attend(
    record: Callable[[ModuleType, str], Recorder],
    capability: int,
    dtype: torch.dtype,
    head_size: int,
    group: int,
    queries: int,
    splits: int,
    absolute: bool,
    sliding_window: int | None,
) -> None:
    recorder = record(attend, "_attend_kernel")
    merged = record(merge, "_merge_kernel")
    softmax = Softmax(soft_cap=50.0, slopes=torch.ones(4 * group)) if sliding_window else PLAIN
    layout = BlockLayout.unpadded(64, 16, 4, head_size, dtype)
    cache = torch.zeros(1, dtype=dtype)
    blocks = torch.zeros(2, dtype=torch.int64)
    of_query = torch.bfloat16 if dtype in FLOAT8 else dtype
    query = torch.zeros(queries, 4 * group, head_size, dtype=of_query)
    attend.attend(
        query,
        PartialState.empty(*query.shape, CPU, softmax),
        Rows.build([0], [queries], [0], [0], [2]).to(CPU),
        cache=None if absolute else cache,
        block_offset=blocks,
        block_position=blocks,
        layout=layout,
        scale=0.1,
        sliding_window=sliding_window,
        splits=splits,
    )
    ptx = check(recorder, capability)
    assert len(merged.launches) == (splits > 1)
    # Keys and values come in 16-byte accesses: the alignment that the wrapper promises arrived.
    assert "v4" in ptx or "cp.async.cg" in ptx
    if dtype != torch.float32:
        assert "mma" in ptx


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("masked", [False, True])
def test_attend_pages(
    record: Callable[[ModuleType, str], Recorder], capability: int, masked: bool
) -> None:
    recorder = record(attend, "_attend_kernel")
    merged = record(merge, "_merge_kernel")
    query = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    one, two = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    address = torch.zeros(3, dtype=torch.int64)
    mask = torch.zeros(3, 16, dtype=torch.uint8) if masked else None
    attend.attend_pages(
        query,
        PartialState.empty(1, 8, 128, CPU),
        PageList(one, one.long(), two, two, address, address, mask),
        layout=BlockLayout.unpadded(64, 16, 2, 128, torch.bfloat16),
        scale=0.1,
        max_pages=64,
    )
    check(merged, capability)
    ptx = check(recorder, capability)
    assert "mma" in ptx
    assert "v4" in ptx or "cp.async.cg" in ptx


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("dtype", "picked"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)],
)
def test_scores(
    record: Callable[[ModuleType, str], Recorder],
    capability: int,
    dtype: torch.dtype,
    picked: bool,
) -> None:
    pages, channels = record(score, "_pages_kernel"), record(score, "_channels_kernel")
    layout = BlockLayout.unpadded(64, 16, 2, 128, dtype)
    query = torch.zeros(3, 14, 128, dtype=dtype)
    rows, places = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    logits = torch.zeros(3, 14, 100)
    score.page_logits(query, rows, rows, places, logits, layout=layout, scale=0.1, spread=picked)
    chosen, reduced = score.choose_channels(query, layout, 16, 0.1)
    score.channel_logits(
        chosen,
        reduced,
        rows,
        rows,
        places,
        rows,
        rows,
        places,
        layout=layout,
        picked=picked,
        max_tokens=1000,
    )
    ptx = check(pages, capability)
    if dtype == torch.bfloat16:
        assert "mma" in ptx
    check(channels, capability)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("dtype", "bits", "head_size", "page_tokens"),
    [
        (torch.bfloat16, 2, 128, 16),
        (torch.float16, 2, 64, 16),
        (torch.float32, 4, 256, 16),
        (torch.bfloat16, 1, 80, 64),
    ],
)
def test_codes(
    record: Callable[[ModuleType, str], Recorder],
    capability: int,
    dtype: torch.dtype,
    bits: int,
    head_size: int,
    page_tokens: int,
) -> None:
    names = ("_encode_kernel", "_rotate_kernel", "_logits_kernel")
    recorders = [record(codes, name) for name in names]
    layout = BlockLayout.unpadded(128, page_tokens, 2, head_size, dtype)
    places = torch.zeros(2, dtype=torch.int64)
    codes.encode(places, layout, places, bits)
    rows = torch.zeros(3, dtype=torch.int32)
    query = torch.zeros(3, 14, head_size, dtype=dtype)
    table = torch.zeros(3, 14, 100)
    codes.code_logits(query, rows, rows, places, table, layout=layout, scale=0.1, bits=bits)
    for recorder in recorders:
        check(recorder, capability)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_tokens(
    record: Callable[[ModuleType, str], Recorder], capability: int, page_tokens: int
) -> None:
    names = ("_sum_kernel", "_score_kernel", "_cover_kernel")
    recorders = [record(tokens, name) for name in names]
    logits, lse = torch.zeros(3, 14, 4000), torch.zeros(3, 14)
    rows, pages = torch.zeros(3, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    tokens.score_tokens(logits, rows, kv_heads=2, page_tokens=page_tokens, max_columns=200)
    mask = torch.zeros(5, page_tokens, dtype=torch.uint8) if page_tokens > 1 else None
    begin = torch.zeros(7, dtype=torch.int32)
    tokens.cover(logits, lse, rows, rows, pages, begin, mask, page_tokens=page_tokens)
    for recorder in recorders:
        check(recorder, capability)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("dtype", "spreads"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_summarize(
    record: Callable[[ModuleType, str], Recorder],
    capability: int,
    dtype: torch.dtype,
    spreads: bool,
) -> None:
    recorder = record(summarize, "_summarize_kernel")
    layout = BlockLayout.unpadded(64, 16, 8, 128, dtype)
    blocks = torch.zeros(3, dtype=torch.int64)
    bounds = blocks if dtype == torch.bfloat16 else None
    summarize.summarize(
        blocks,
        layout,
        bounds=bounds,
        spread=blocks if spreads else None,
        channels=blocks,
        value_sum=blocks,
    )
    assert "ld.global.v4" in check(recorder, capability)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("dtype", "block_tokens", "width"),
    [(torch.bfloat16, 512, None), (torch.float32, 48, None), (torch.bfloat16, 128, 32)],
)
def test_order(
    record: Callable[[ModuleType, str], Recorder],
    capability: int,
    dtype: torch.dtype,
    block_tokens: int,
    width: int | None,
) -> None:
    orders, gathers = record(order, "_order_kernel"), record(order, "_gather_kernel")
    layout = BlockLayout.unpadded(block_tokens, 16, 8, 128, dtype)
    blocks = torch.zeros(3, dtype=torch.int64)
    place = order.order_blocks(blocks, torch.zeros(3, dtype=torch.int32), layout, width)
    order.reorder(blocks, place, layout)
    check(orders, capability)
    assert "ld.global.v4" in check(gathers, capability)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("width", "p"), [(2048, 1.0), (2**13, 0.5)])
def test_choose(
    record: Callable[[ModuleType, str], Recorder], capability: int, width: int, p: float
) -> None:
    weighs, chooses = record(choose, "_weigh_kernel"), record(choose, "_choose_kernel")
    rows = torch.zeros(3, dtype=torch.int32)
    weights, window, _ = choose.weigh(torch.zeros(3, 8, width), torch.zeros(3, 8), 2, 16)
    choose.choose(weights, weights, window, rows, rows, rows, max_chosen=256, sinks=2, p=p)
    check(weighs, capability)
    check(chooses, capability)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("blocks", "mass"), [(100, 1.0), (4000, 0.9)])
def test_decode_layer(
    record: Callable[[ModuleType, str], Recorder], capability: int, blocks: int, mass: float
) -> None:
    """Kernels that find a step's rows by tables, choose pages and write the output."""
    matches, changes = record(step_rows, "_match_kernel"), record(step_rows, "_change_kernel")
    resolves, merges = record(resolve, "_resolve_kernel"), record(merge, "_merge_kernel")
    attends, waits = record(attend, "_attend_kernel"), record(misses, "_wait_kernel")
    for module, name in ((store_kv, "_store_kernel"), (score, "_pages_kernel")):
        record(module, name)
    layout = BlockLayout.unpadded(64, 16, 2, 128, torch.bfloat16)
    shape = StepTables(rows=2, blocks=blocks, hbm_blocks=50)
    tables = torch.zeros(shape.size, dtype=torch.int64)
    step_rows.change(tables, torch.zeros((5, 2), dtype=torch.int64))
    layer = decode_layer.DecodeLayer(
        layout,
        layout.with_page_stride(8192),
        shape,
        tables,
        window_blocks=6,
        query_heads=8,
        choosing=decode_layer.Choosing("bounds", sinks=1, mass=mass),
        misses=misses.Misses.empty(32, 100, shape, tables),
    )
    rows = torch.zeros(2, dtype=torch.int64)
    batch = step_rows.Batch(rows, rows.int(), torch.zeros((2, blocks), dtype=torch.int32))
    cache = torch.zeros((50, layout.block_bytes // 2), dtype=torch.bfloat16)
    query, new = (torch.zeros((2, heads, 128), dtype=torch.bfloat16) for heads in (8, 2))
    layer.begin(batch, cache.stride(0))
    layer.store(new, new, cache, batch)
    layer.attend(0, query, cache, torch.empty_like(query), 0.1, (4096, 65536))
    for recorder in (matches, changes, merges):
        check(recorder, capability)
    # In each of two places, one thread asks for all whether the row is lost, before barriers.
    assert check(resolves, capability).count("ld.global.gpu.relaxed.b32") == 2
    mail = check(waits, capability)
    assert all(word in mail for word in ("st.release.sys", "ld.acquire.sys", "%globaltimer"))
    assert len(attends.launches) == 2


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("finished", [False, True])
def test_merge(
    record: Callable[[ModuleType, str], Recorder], capability: int, finished: bool
) -> None:
    recorder = record(merge, "_merge_kernel")
    sums = torch.zeros(40, 2, 4)
    outs = torch.zeros(40, 2, 4, 128, dtype=torch.bfloat16 if finished else torch.float32)
    merge.merge(PartialState.empty(2, 4, 128, CPU), sums, None if finished else sums, outs)
    check(recorder, capability)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_finish(
    record: Callable[[ModuleType, str], Recorder], capability: int, dtype: torch.dtype
) -> None:
    recorder = record(finish, "_finish_kernel")
    out = torch.zeros(2, 4, 128, dtype=dtype)
    lse = torch.zeros(2, 4) if dtype == torch.float32 else None
    finish.finish(PartialState.empty(2, 4, 128, CPU), out, lse)
    check(recorder, capability)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(1, torch.bfloat16), (8, torch.bfloat16), (8, torch.float8_e4m3fn)],
)
def test_store_kv(
    record: Callable[[ModuleType, str], Recorder], capability: int, heads: int, dtype: torch.dtype
) -> None:
    recorder = record(store_kv, "_store_kernel")
    layout = BlockLayout.unpadded(64, 16, heads, 128, dtype)
    new = torch.zeros(3, heads, 128, dtype=torch.bfloat16)
    cache = torch.zeros(2, layout.block_bytes // dtype.itemsize, dtype=dtype)
    store_kv.store_kv(new, new, cache, torch.zeros(3, dtype=torch.int64), layout)
    check(recorder, capability)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("align", [2, 4, 8, 16])
def test_copy_pages(
    record: Callable[[ModuleType, str], Recorder], capability: int, align: int
) -> None:
    recorder = record(pack, "_copy_kernel")
    pack.copy_pages(
        torch.tensor([align, 3 * align]),
        torch.tensor([5 * align, 7 * align]),
        aligned=align,
        pages=4,
        payload_bytes=8192,
        source_stride_bytes=8192,
        target_stride_bytes=12288,
        zero_padding=True,
    )
    ptx = check(recorder, capability)
    # Two 8-byte words in one access, which is all that 16-byte alignment is for.
    assert ("ld.global.v2.b64" in ptx) == (align == 16)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("sets", [1, 6])
def test_resident_pages(
    record: Callable[[ModuleType, str], Recorder], capability: int, sets: int
) -> None:
    recorders = [record(resident_pages, name) for name in ("_find_kernel", "_fill_kernel")]
    waits = record(misses, "_wait_kernel")
    layout = BlockLayout.unpadded(64, 16, 8, 128, torch.bfloat16)
    identity = torch.zeros((4, 32), dtype=torch.int64)
    shape = 2, 8, layout.page_stride_bytes
    memory = DeviceMemory(4096, 16 * sets * resident_pages.WAYS, lambda source, to: None)
    hot = resident_pages.ResidentPages.empty(memory, shape, identity)
    numbers, places = torch.zeros(32, dtype=torch.int32), torch.zeros(32 * 128, dtype=torch.int64)
    none = torch.zeros(0)
    choice = resolve.Choice(numbers, numbers, numbers, numbers, none, none, *[none] * 4)
    listed = resolve.Listed(numbers, numbers, places, places)
    hot.find(1, listed, choice, layout)
    hot.fill(1, listed, choice, layout)
    tables = StepTables(rows=4, blocks=32, hbm_blocks=50)
    asked = misses.Misses.empty(2, 100, tables, torch.zeros(tables.size, dtype=torch.int64))
    misses.wait(asked, places, numbers, layer=1, row_pages=1024, nowhere=4096)
    check(waits, capability)
    _, fill = [check(recorder, capability) for recorder in recorders]
    # One thread reads for all which place is the oldest: other programs take places meanwhile.
    assert "atom.global.gpu.relaxed.add.u32" in fill


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("nbytes", [5, 8, 9, 1 << 20])
def test_digest(
    record: Callable[[ModuleType, str], Recorder], capability: int, nbytes: int
) -> None:
    recorder = record(digest, "_digest_kernel")
    digest.digest([torch.zeros(nbytes, dtype=torch.uint8)])
    check(recorder, capability)


@pytest.mark.parametrize("capability", SHARED)
def test_read_words(record: Callable[[ModuleType, str], Recorder], capability: int) -> None:
    recorder = record(digest, "_read_words_kernel")
    digest.read_words(torch.zeros(300, dtype=torch.int64))
    check(recorder, capability)
