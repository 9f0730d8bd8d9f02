"""Exact decode from contexts on slow drives, with drafts from n-grams and without.

The recall model copies a part of its context, through the real vLLM in page mode with exact
attention, from devices that the throttled twin slows down as ``ssdkv lab bench decode`` does. A
step reads the context once, whatever it drafts. What is copied is drafted rightly nearly always:
this is the best that drafts can bring, and text that is not in the prompt gains nothing.

    python -P -m vllm_ssdkv.profiling.bench_drafts --dir DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB, approximate_size
from vllm_ssdkv.profiling.recall.bench import WINDOW, RecallStores, Row, recall_plan
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.recall.run import Batch
from vllm_ssdkv.profiling.rig.page_engine import STAGING

DEVICES: Final = 4
RULE: Final[dict[str, object]] = {"bandwidth": 16 * MIB, "iops": 2500.0, "latency": 0.0005}
"""Speed of each device, as in ``ssdkv lab bench decode``."""
FRAMES: Final = 8 * MIB
"""Bytes of DRAM for frames, beside a fifth of the contexts' KV."""


def measure(
    directory: Path, contexts: Sequence[int], drafts: Sequence[int], requests: int, console: Console
) -> list[Row]:
    """A row of figures for each number of drafts and each length of context.

    Raises:
        BenchError: an engine failed, or an answer was not what the model copies from its context.
    """
    stores, rows = RecallStores(directory, DEVICES), []
    try:
        batches = [Batch(length, requests, ("copy",), stored=True) for length in contexts]
        held = max(contexts) * requests * bytes_per_token() // 5
        dram = STAGING + FRAMES + held
        places = stores.places("exact")
        plan = recall_plan(places, "exact", batches, dram, {}, [RULE], window=WINDOW)
        for count in drafts:
            found = stores.run(replace(plan, drafts=count), f"{count} drafts", console)
            for batch, figures in zip(batches, found, strict=True):
                if figures["right"] != {"copy": requests}:
                    raise BenchError(f"{count} drafts, {batch.context} tokens: {figures['right']}")
                rows.append(_figures(count, figures))
    finally:
        stores.remove()
    return rows


def _figures(drafts: int, found: Row) -> Row:
    tokens, steps = found["decoded_tokens"], found["decoding_steps"]
    read = found["decoding"].get("bytes_read", 0.0)
    return {
        "context": found["context"],
        "drafts": drafts,
        "tokens_per_s": tokens / found["decoding_s"],
        "tokens_per_step": tokens / steps / found["requests"],
        "read_per_token": read / tokens,
    }


def _table(rows: Sequence[Row]) -> Table:
    table = Table("tokens", "drafts", "tokens/s", "of none", "tokens/step", "read per token")
    base = {row["context"]: row["tokens_per_s"] for row in rows if row["drafts"] == 0}
    for row in sorted(rows, key=lambda row: (row["context"], row["drafts"])):
        none = base.get(row["context"])
        table.add_row(
            f"{row['context']:,}",
            str(row["drafts"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s'] / none:.2f}x" if none else "",
            f"{row['tokens_per_step']:.2f}",
            approximate_size(row["read_per_token"]),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="directory for the stores")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3, 7])
    parser.add_argument("--requests", type=int, default=1, help="number of concurrent requests")
    options = parser.parse_args(arguments)
    rows = measure(
        options.dir, options.contexts, options.drafts, options.requests, Console(stderr=True)
    )
    Console().print(_table(rows))


if __name__ == "__main__":
    main()
