"""Speed of the CPU attention kernels against torch's, in the same run on the same machine.

Decode: one query per row, GB/s of K and V read. Prefill: a chunk over a long context, GFLOP/s of
the two matrix products (what the causal mask hides is not counted). Figures are medians of
``--repeat`` runs, ours and torch's in turns, so that a noisy machine disturbs both alike.

    python -m vllm_ssdkv.profiling.bench_attend --threads 2
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState, Rows
from vllm_ssdkv.profiling.rig.measure import by_turns, timed


@dataclass(frozen=True, slots=True)
class Shape:
    """``rows`` requests with ``queries`` new tokens each, the last of ``context`` tokens."""

    rows: int
    queries: int
    context: int
    q_heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that all rows see."""
        return 2 * self.rows * self.context * self.kv_heads * self.head_size * self.dtype.itemsize

    @property
    def operations(self) -> int:
        """Floating point operations of both products over visible keys."""
        before = self.context - self.queries
        pairs = self.queries * before + self.queries * (self.queries + 1) // 2
        return 4 * self.rows * pairs * self.q_heads * self.head_size


def native_call(shape: Shape, threads: int) -> Callable[[], torch.Tensor]:
    """Attention through the page layout: empty state, every block, output."""
    layout = BlockLayout.unpadded(16, 16, shape.kv_heads, shape.head_size, shape.dtype)
    blocks = -(-shape.context // layout.block_tokens)
    per_block = layout.block_bytes // shape.dtype.itemsize
    memory = torch.randn((shape.rows * blocks, per_block)).to(shape.dtype)
    tokens = shape.rows * shape.queries
    query = torch.randn((tokens, shape.q_heads, shape.head_size)).to(shape.dtype)
    out = torch.empty_like(query)
    heads = shape.q_heads, shape.head_size
    state = PartialState.empty(tokens, *heads, torch.device("cpu"))
    row = np.arange(shape.rows, dtype=np.int32)
    base = np.arange(len(memory), dtype=np.uint64) * np.uint64(layout.block_bytes)
    base += np.uint64(memory.data_ptr())
    position = np.tile(np.arange(blocks, dtype=np.int64) * layout.block_tokens, shape.rows)
    pages = _kernels.Pages(base, position)
    rows = Rows.build(
        row * shape.queries,
        np.full_like(row, shape.queries),
        np.full(shape.rows, shape.context - shape.queries),
        row * blocks,
        (row + 1) * blocks,
    )
    asked = _kernels.vectors("query", query, *heads)
    answer = _kernels.vectors("out", out, *heads)

    def call() -> torch.Tensor:
        state.m.fill_(-torch.inf)
        state.l.fill_(0)
        state.acc.fill_(0)
        _kernels.attend(
            asked,
            shape.head_size**-0.5,
            state.bound,
            rows.bound,
            pages,
            layout.shape,
            threads,
        )
        _kernels.finish(state.bound, answer, None, threads)
        return out

    # The closure keeps only addresses of the blocks: tie their memory to it.
    call.__dict__["memory"] = memory
    return call


def torch_call(shape: Shape, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """``scaled_dot_product_attention`` on dense, contiguous K and V of ``dtype``."""
    heads = (shape.rows, shape.kv_heads, shape.context, shape.head_size)
    key = torch.randn(heads).to(dtype)
    value = torch.randn(heads).to(dtype)
    query = torch.randn((shape.rows, shape.q_heads, shape.queries, shape.head_size)).to(dtype)
    mask = None
    if shape.queries > 1:
        ones = torch.ones((shape.queries, shape.context), dtype=torch.bool)
        mask = ones.tril(shape.context - shape.queries)

    def call() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=shape.q_heads != shape.kv_heads
        )

    return call


def copy_call(nbytes: int) -> Callable[[], torch.Tensor]:
    """Copy ``nbytes`` from memory to memory with torch's threads."""
    source = torch.zeros(nbytes // 8, dtype=torch.float64)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def measure(calls: dict[str, Callable[[], torch.Tensor]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each run of each call; they take turns."""
    return by_turns({name: timed(call) for name, call in calls.items()}, repeat, warm_up=1)


def report(seconds: dict[str, list[float]], amount: float, unit: str) -> None:
    """Print amount per second, in billions: median and best."""
    for name, values in seconds.items():
        median = statistics.median(values)
        rates = f"{amount / median / 1e9:7.1f} {unit} (best {amount / min(values) / 1e9:.1f})"
        print(f"  {name:32} {median * 1e3:8.2f} ms {rates}")


def bench_prefill(repeat: int, threads: int) -> None:
    """512 new tokens over 8 Ki."""
    for head_size in (64, 128):
        shape = Shape(1, 512, 8192, 8, 2, head_size, torch.bfloat16)
        times = measure(
            {
                "ours bf16 KV, fp32 arithmetic": native_call(shape, threads),
                "torch fp32": torch_call(shape, torch.float32),
                "torch bf16 (bf16 products)": torch_call(shape, torch.bfloat16),
            },
            repeat,
        )
        print(f"prefill D={head_size} heads 8/2 chunk 512 over 8192")
        report(times, shape.operations, "GFLOP/s")


def bench_decode(repeat: int, threads: int) -> None:
    """One new token over 32 Ki."""
    for head_size, q_heads, kv_heads in ((64, 8, 2), (128, 8, 2), (128, 8, 8), (128, 16, 2)):
        shape = Shape(1, 1, 32768, q_heads, kv_heads, head_size, torch.bfloat16)
        times = measure(
            {
                "ours bf16 KV, fp32 arithmetic": native_call(shape, threads),
                "torch bf16 (bf16 products)": torch_call(shape, torch.bfloat16),
                "copy (bytes read)": copy_call(shape.kv_bytes),
            },
            repeat,
        )
        print(f"decode D={head_size} heads {q_heads}/{kv_heads} context 32768")
        report(times, shape.kv_bytes, "GB/s")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--isa", choices=_kernels.isas(), default=_kernels.isa())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    _kernels.set_isa(options.isa)
    print(f"{_kernels.isa()}, {options.threads} threads, medians of {options.repeat}")
    bench_prefill(options.repeat, options.threads)
    bench_decode(options.repeat, options.threads)


if __name__ == "__main__":
    main()
