"""An adapter that is written anew while a request decodes with it; see ``simulation.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from tests.connector.events import Make, begin, end, hits, prompt
from tests.connector.rank import BLOCK
from tests.connector.symbols import answer


def adapter(path: Path) -> LoRARequest:
    return LoRARequest("helpful", 1, str(path), load_inplace=True)


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_what_it_computes_from_then_on_is_nobody_elses(
    mode: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    make: Make = request.getfixturevalue(mode)
    weights = tmp_path / "adapter_model.bin"
    weights.write_bytes(b"old")
    run = make(slots=60, hbm_blocks=40)
    runs = run.add("a", prompt(100), 60, lora_request=adapter(tmp_path))
    begin(run, "a")
    stored = run.ours.keys_of(runs)
    run.end_io()
    weights.write_bytes(b"other weights")
    end(run, "a")
    assert len(run.index.lookup(stored)) == 100 // BLOCK
    again = prompt(100) + answer(prompt(100), 60)
    for name, wanted in (("other weights", 0), ("old", 100 // BLOCK)):
        weights.write_bytes(name.encode())
        run.add(name, again, 4, lora_request=adapter(tmp_path))
        assert run.scheduler.reset_prefix_cache()
        end(run, name)
        assert sum(hits(run, name)) == wanted
