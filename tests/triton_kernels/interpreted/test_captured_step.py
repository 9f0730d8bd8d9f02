"""A decoder whose whole step is one graph, which is replayed for the tokens after its capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.triton_kernels.recorded import Recorded
from vllm_ssdkv.config.selectors import SelectorName
from vllm_ssdkv.profiling.decode_harness import decoder, forward
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder, Room
from vllm_ssdkv.profiling.decode_harness.models import make_model, small_config
from vllm_ssdkv.profiling.decode_harness.tokens import config_of

CPU = torch.device("cpu")
ROOM = Room(requests=2, longest=160, chunk=64)
PROMPTS = 95, 40
STEPS = 5


class Passed:
    """An event of a device that has done everything."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def decoded(
    model: Any,  # noqa: ANN401 - transformers' model
    selector: SelectorName,
    store: Path,
    launches: str,
) -> torch.Tensor:
    """Logits of steps behind two prompts, with tokens that do not depend on them."""
    draw = torch.Generator().manual_seed(1)
    found = []
    with PagedDecoder(model, config_of(selector, budget=0.4), ROOM, store, durable=False) as one:
        for name, count in zip("ab", PROMPTS, strict=True):
            one.prefill(name, torch.randint(0, 256, (count,), generator=draw).tolist())
        for _ in range(STEPS):
            ids = torch.randint(0, 256, (2,), generator=draw)
            found.append(one.step(["a", "b"], ids).clone())
            assert one.passes.launches == launches
    return torch.stack(found)


@pytest.mark.parametrize("selector", ["exact", "bounds"])
def test_one_graph_decodes_all_steps(
    selector: SelectorName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks leave HBM between the steps, and rows are in other places of the batch's tables."""
    shape = small_config("llama", layers=2, head_size=16)
    model: Any = make_model(shape, CPU, torch.float32)
    want = decoded(model, selector, tmp_path / "native", "one by one")
    graphs: list[Recorded] = []

    def new() -> Recorded:
        graphs.append(Recorded())
        return graphs[-1]

    monkeypatch.setattr(forward, "graphs_of", lambda _: new)
    monkeypatch.setattr(decoder, "events_of", lambda _: Passed)
    got = decoded(model, selector, tmp_path / "captured", "one CUDA graph a step")
    assert len(graphs) == 1
    layer = ["_store", "_attend", *["_pages"] * (selector == "bounds"), "_resolve", "_attend"]
    names = [f"{name}_kernel" for name in ["_match", *[*layer, "_merge"] * 2]]
    assert graphs[0].launches == names
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
