"""Checks of tokens: paged decoding against transformers' own cache, greedy, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import DynamicCache

from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.selectors import SelectorName
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder, Room
from vllm_ssdkv.profiling.decode_harness.models import make_model, small_config

FAMILIES: Final = ("llama", "qwen3", "gpt_neox")
CHOOSING: Final[tuple[SelectorName, ...]] = (
    "bounds",
    "spread",
    "codes",
    "sparf",
    "adaptive",
    "swarm",
    "window",
)
ON_DRIVE: Final[tuple[SelectorName, ...]] = ("bounds", "adaptive")
"""Selectors that are tried over a drive."""

PROMPTS: Final = (333, 150)
"""Tokens of the prompts, which are decoded together."""

COUNT: Final = 24
"""Tokens that are decoded."""

_WRITE_S: Final = 60.0
"""Seconds that blocks may take until they are on the drive."""

ROOM: Final = Room(requests=len(PROMPTS), longest=512, chunk=64)
WINDOW: Final = 32


def prompts(vocabulary: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of the lengths of :data:`PROMPTS`."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=made).tolist() for n in PROMPTS]


def own_tokens(model: Any, ids: Sequence[int], count: int) -> list[int]:  # noqa: ANN401
    """Decode with transformers' own cache and SDPA."""
    cache, found = DynamicCache(), []
    with torch.inference_mode():
        part = torch.tensor([list(ids)], device=model.device)
        for _ in range(count):
            out = model(part, past_key_values=cache, use_cache=True)
            part = out.logits[:, -1:].argmax(-1)
            found.append(int(part))
    return found


def config_of(selector: SelectorName, *, budget: float = 1 / 8, mass: float = 0.9) -> SSDKVConfig:
    """Options of a small store, in which requests of every length choose."""
    return SSDKVConfig.from_extra_config(
        {
            "mode": "page",
            "selector": selector,
            "hbm_window_tokens": WINDOW,
            "dram_gib": "96MiB",
            "io": {"staging": "4MiB"},
            "sparse": {"budget": budget, "exact_below": 0, "mass": mass},
        }
    )


def paged_logits(
    model: Any,  # noqa: ANN401 - transformers' model
    config: SSDKVConfig,
    asked: Sequence[Sequence[int]],
    directory: Path,
    forced: Sequence[Sequence[int]] | None = None,
    *,
    on_drive: bool = False,
) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of each prompt, decoded together, and logits [steps, requests, vocabulary], on the
    host.

    Args:
        model, config, asked, directory: See above.
        forced: Tokens that are decoded from in place of these.
        on_drive: Whether DRAM lacks the prompts' blocks.

    Raises:
        RuntimeError: they are not on the drive in time.
    """
    with PagedDecoder(model, config, ROOM, directory) as decoder:
        names = [str(i) for i in range(len(asked))]
        logits = torch.stack(
            [decoder.prefill(name, ids) for name, ids in zip(names, asked, strict=True)]
        )
        if on_drive:
            if not decoder.drain(_WRITE_S):
                raise RuntimeError(f"blocks were not written within {_WRITE_S:g} s")
            decoder.leave_frames(names)
        tokens, seen = [], []
        for number in range(COUNT):
            seen.append(logits.float().cpu())
            ids = logits.argmax(-1)
            tokens.append(ids.tolist())
            if forced is not None:
                ids = torch.tensor([row[number] for row in forced], device=ids.device)
            logits = decoder.step(names, ids)
    return [list(row) for row in zip(*tokens, strict=True)], torch.stack(seen)


def check_exact(
    family: str, selector: SelectorName, device: torch.device, directory: Path
) -> dict[str, Any]:
    """Decode with exact paging, or with a selector whose budget is everything, and compare the
    tokens with transformers' own."""
    # Triton's tiles want heads of 64; a CPU is quicker with less.
    model: Any = make_model(small_config(family, head_size=_head(device)), device, torch.float32)
    asked = prompts(model.config.vocab_size)
    want = [own_tokens(model, ids, COUNT) for ids in asked]
    config = config_of(selector, budget=1.0, mass=1.0)
    got, _ = paged_logits(model, config, asked, directory)
    return _compared(want, got)


def check_selector(selector: SelectorName, device: torch.device, directory: Path) -> dict[str, Any]:
    """Decode with a budget of an eighth by the device's kernels and by the CPU's native ones, from
    the same tokens, and compare what comes out."""
    shape = small_config("llama", head_size=_head(device))
    model: Any = make_model(shape, device, torch.float32)
    here: Any = make_model(shape, torch.device("cpu"), torch.float32)
    here.load_state_dict(model.state_dict())
    asked = prompts(model.config.vocab_size)
    config = config_of(selector)
    want, logits = paged_logits(here, config, asked, directory / "cpu")
    got, found = paged_logits(model, config, asked, directory / "device", want)
    largest = float((found - logits).abs().max())
    return {**_compared(want, got), "largest_difference_of_logits": largest}


def check_drive(selector: SelectorName, device: torch.device, directory: Path) -> dict[str, Any]:
    """Decode with a budget of an eighth over prompts in frames, and over prompts on the drive, and
    compare what comes out: it is the same, bit for bit."""
    model: Any = make_model(small_config("llama", head_size=_head(device)), device, torch.float32)
    asked, config = prompts(model.config.vocab_size), config_of(selector)
    want, logits = paged_logits(model, config, asked, directory / "frames")
    got, found = paged_logits(model, config, asked, directory / "drive", want, on_drive=True)
    largest = float((found - logits).abs().max())
    compared = {**_compared(want, got), "largest_difference_of_logits": largest}
    return {**compared, "error": "other logits than expected"} if largest else compared


def _head(device: torch.device) -> int:
    return 64 if device.type == "cuda" else 16


def _compared(want: list[list[int]], got: list[list[int]]) -> dict[str, Any]:
    pairs = [
        (a, b)
        for one, other in zip(want, got, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    same = sum(a == b for a, b in pairs)
    found: dict[str, Any] = {
        "tokens": len(pairs),
        "tokens_equal": same,
        "different_tokens": len({a for a, _ in pairs}),
    }
    return found if same == len(pairs) else {**found, "error": "other tokens than expected"}
