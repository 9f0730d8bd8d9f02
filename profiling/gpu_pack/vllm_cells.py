"""Engines of the stage ``vllm``: what each of them is, and what it is asked.

Cells about tokens have a tiny model in float32, whose answers have to be those of stock vLLM. Cells
about speed have Llama 8B's shape with few layers and random weights, of whose answers nothing
follows; a rehearsal takes a tiny shape for these, too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vllm_ssdkv.base.sizes import GIB, MIB
from vllm_ssdkv.connector.names import CONNECTOR
from vllm_ssdkv.profiling.gpu_pack.llama_shapes import LLAMA_8B, TINY, Shape
from vllm_ssdkv.profiling.rig.engine import transfer_config

BLOCK: Final = 32
WINDOW: Final = 64
CHUNK: Final = 128
ANSWER: Final = 16
LENGTHS: Final = (700, 300, 129, 20)
"""Tokens of the prompts about tokens. The longest has many times the KV cache of page mode."""

_EVERYTHING: Final = {"budget": 1.0, "floor": 1.0, "exact_below": 0}


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine.

    Attributes:
        name: Case in the results.
        speed: Whether it measures speed; else tokens.
        connector: ``reuse`` or ``page``, modes of ours; a class of vLLM's; or empty: none.
        options: Options of the connector beside those of every cell.
        stored: Whether the cell before with the same store has stored its prompts.
        graphs: Whether decode steps are CUDA graphs.
        cuda_only: Whether vLLM has it on CUDA only.
    """

    name: str
    speed: bool
    connector: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    stored: bool = False
    graphs: bool = False
    cuda_only: bool = False

    @property
    def store(self) -> str:
        """Folder of its store, which cells of the same connector and options share."""
        selector = self.options.get("selector", "")
        graphs = "-graphs" if self.graphs else ""
        return f"{'speed' if self.speed else 'tokens'}-{self.connector}-{selector}{graphs}"

    @property
    def finds_prompts(self) -> bool:
        """A prompt that is asked again is found in what the connector has stored."""
        return bool(self.connector) and not (self.speed and self.connector == "page")


_SMALL_CACHE: Final = {"page_cache": "1MiB"}
"""Option by which DRAM has frames for all contexts: nothing else is there in a CUDA graph."""

CELLS: Final = (
    Cell("stock vLLM", speed=False),
    Cell("reuse mode", speed=False, connector="reuse"),
    Cell("reuse mode, after a restart", speed=False, connector="reuse", stored=True),
    Cell("page mode, exact", speed=False, connector="page"),
    Cell(
        "page mode, adaptive with a budget of everything",
        speed=False,
        connector="page",
        options={"selector": "adaptive", "sparse": _EVERYTHING},
    ),
    Cell(
        "page mode with CUDA graphs, exact",
        speed=False,
        connector="page",
        options={"dram_gib": "64MiB"},
        graphs=True,
        cuda_only=True,
    ),
    Cell(
        "page mode with CUDA graphs, adaptive with a budget of everything",
        speed=False,
        connector="page",
        options={
            "selector": "adaptive",
            "sparse": _EVERYTHING | _SMALL_CACHE,
            "dram_gib": "64MiB",
        },
        graphs=True,
        cuda_only=True,
    ),
    Cell("speed of stock vLLM", speed=True),
    Cell("speed of reuse mode", speed=True, connector="reuse"),
    Cell("speed of reuse mode, after a restart", speed=True, connector="reuse", stored=True),
    Cell("speed of page mode, exact", speed=True, connector="page"),
    Cell(
        "speed of page mode, adaptive",
        speed=True,
        connector="page",
        options={"selector": "adaptive", "sparse": {"exact_below": 0}},
    ),
    Cell("speed of stock vLLM with CUDA graphs", speed=True, graphs=True, cuda_only=True),
    Cell(
        "speed of page mode with CUDA graphs, exact",
        speed=True,
        connector="page",
        options={"dram_gib": "5GiB"},
        graphs=True,
        cuda_only=True,
    ),
    Cell(
        "speed of page mode with CUDA graphs, adaptive",
        speed=True,
        connector="page",
        options={
            "selector": "adaptive",
            "sparse": {"exact_below": 0, **_SMALL_CACHE},
            "dram_gib": "6GiB",
        },
        graphs=True,
        cuda_only=True,
    ),
    Cell(
        "speed of vLLM's OffloadingConnector, DRAM",
        speed=True,
        connector="OffloadingConnector",
        options={"cpu_bytes_to_use": 4 * GIB},
        cuda_only=True,
    ),
    Cell(
        "speed of vLLM's SimpleCPUOffloadConnector, disk",
        speed=True,
        connector="SimpleCPUOffloadConnector",
        options={"kv_offload_backend": "disk", "disk_capacity_bytes": 8 * GIB},
        cuda_only=True,
    ),
)
"""Cells in order of value."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the cells about speed.

    Attributes:
        shape: The model.
        dtype: Of weights and KV.
        lengths: Tokens of the prompts whose first token is timed.
        decoded: Tokens of each of the prompts that decode together.
        batches: How many of these there are.
        answer: Tokens that each of them decodes.
        window: Tokens of a request in HBM (page mode).
        chunk: Most tokens of a step.
        store: Bytes of the store, and of DRAM for it.
    """

    shape: Shape
    dtype: str
    lengths: Sequence[int]
    decoded: int
    batches: Sequence[int]
    answer: int
    window: int
    chunk: int
    store: int

    @classmethod
    def of(cls, device: str) -> Scale:
        """Sizes on a GPU, or those of a rehearsal."""
        if device == "cpu":
            return cls(TINY, "float32", (64, 256), 256, (1, 4), 8, WINDOW, CHUNK, 128 * MIB)
        lengths = (2048, 4096, 8192, 16384, 32768)
        return cls(LLAMA_8B, "bfloat16", lengths, 8192, (1, 8), 48, 1024, 8192, 4 * GIB)

    @property
    def longest(self) -> int:
        """Most tokens of a request."""
        return max(*self.lengths, self.decoded) + self.answer + BLOCK

    @property
    def cache_tokens(self) -> int:
        """Tokens of KV that fit HBM: all that is asked at a time."""
        together = max(self.batches) * (self.decoded + self.answer + 2 * BLOCK)
        return max(self.longest, together) + self.chunk


def prompts() -> list[list[int]]:
    """Token ids of the prompts about tokens, the same in every process."""
    draw = random.Random(7)
    return [[draw.randrange(3, TINY.vocabulary) for _ in range(length)] for length in LENGTHS]


def prompt(shape: Shape, length: int, name: str) -> list[int]:
    """Token ids that follow from the name alone; one more than ``length``, so that all full blocks
    of ``length`` tokens can be found."""
    draw = random.Random(f"{name} {length}")
    return [draw.randrange(3, shape.vocabulary) for _ in range(length + 1)]


def full_hits() -> list[int]:
    """Tokens of the prompts about tokens that a store which holds all of them serves."""
    return [(length - 1) // BLOCK * BLOCK for length in LENGTHS]


def settings(
    cell: Cell, device: str, model: Path, folder: Path, *, compiled: bool
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``; without ``compiled`` operators all is in native forms."""
    compilation: dict[str, Any] = {} if compiled else {"custom_ops": ["none"]}
    if cell.graphs:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    chosen: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "enforce_eager": not cell.graphs,
        "disable_log_stats": True,
        "distributed_executor_backend": "uni",
        "enable_prefix_caching": False,
        "compilation_config": compilation,
        **(_speed_sizes(cell, device) if cell.speed else _token_sizes(cell)),
    }
    if cell.connector:
        ours = cell.connector in ("reuse", "page")
        connector = CONNECTOR if ours else cell.connector
        chosen |= transfer_config(_options(cell, device, folder), connector)
    if device == "cuda":
        # FlashAttention has not travelled; the same attention for all, so that they compare.
        chosen["attention_backend"] = "CUSTOM" if cell.connector == "page" else "TRITON_ATTN"
        if not compiled:
            native = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
            chosen["kernel_config"] = {"ir_op_priority": native}
    return chosen


def _token_sizes(cell: Cell) -> dict[str, Any]:
    cache = WINDOW + CHUNK + 3 * BLOCK if cell.connector == "page" else 4096
    return {
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": len(LENGTHS),
        "kv_cache_memory_bytes": cache * TINY.token_bytes(4),
    }


def _speed_sizes(cell: Cell, device: str) -> dict[str, Any]:
    scale = Scale.of(device)
    width = 2 if scale.dtype == "bfloat16" else 4
    return {
        "load_format": "dummy",
        "dtype": scale.dtype,
        "max_model_len": scale.longest,
        "max_num_batched_tokens": scale.chunk,
        "max_num_seqs": max(scale.batches),
        "kv_cache_memory_bytes": scale.cache_tokens * scale.shape.token_bytes(width),
        # vLLM's own connectors stand on it; between two questions it is emptied.
        "enable_prefix_caching": cell.connector not in ("", "page"),
    }


def _options(cell: Cell, device: str, folder: Path) -> dict[str, Any]:
    """Options of the connector of a cell."""
    if cell.connector not in ("reuse", "page"):
        disk = cell.options.get("kv_offload_backend") == "disk"
        return {**cell.options, **({"disk_path": str(folder / "blocks")} if disk else {})}
    scale = Scale.of(device)
    reuse = cell.connector == "reuse"
    chosen: dict[str, Any] = {"mode": cell.connector, "verify_hits": 0, "state_dir": str(folder)}
    if cell.speed:
        window, dram = scale.window, f"{scale.store // MIB}MiB"
        store = f"{2 * scale.store // MIB}MiB"
    else:
        window, store, dram = WINDOW, "64MiB", "64MiB" if reuse else "8MiB"
        chosen["io"] = {"staging": "4MiB"}
    chosen["devices"] = [{"path": str(folder), "capacity": store}]
    chosen["dram_gib"] = dram
    chosen |= {"load": "always"} if reuse else {"hbm_window_tokens": window}
    return chosen | dict(cell.options)
