"""The generated page about models, from the rows that ``make models`` has written."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from vllm_ssdkv.cli.docs.doc_pages import NOTICE, table
from vllm_ssdkv.profiling.models.rows import MODES, NOT_RUN, Row

_INTRO: Final = """\
# Models

`make models` starts vLLM's CPU build with a tiny random model of each architecture, then the same
model with this package. Each model is the default configuration of transformers with small sizes.
Prompts have 129, 700 and 2,500 tokens, and are asked twice. In page mode the KV cache holds less
than a third of the longest one.

- *served*: both answers have the tokens of stock vLLM, and so many tokens of the prompts were found
  the second time.
- *refused*: the start ended with this sentence.
- *failed*: the start or an answer failed in another way. It is a defect of this package.
- *not started*: stock vLLM does not start this tiny model on this CPU. Other tests may serve its
  kind of model ([not-there.md](not-there.md)).

The tier ([tier.md](tier.md)) was run with none of them, because vLLM's CPU build offloads nothing.
Architectures that transformers lacks, and models with images or sound, are not listed.
"""


def models_page(rows: Sequence[Row]) -> str:
    """Text of ``docs/models.md``."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in sorted(rows):
        found = ": ".join(filter(None, (row.result, row.detail)))
        line = cells.setdefault((row.family, row.architecture), {})
        line[row.mode] = found
        if row.result != NOT_RUN:
            line["run"] = f"vLLM {row.vllm}, {row.date}"
    head = ("Family", "Architecture", *(f"Mode `{mode}`" for mode in MODES), "Run")
    lines = [
        (family, name, *(line.get(mode, NOT_RUN) for mode in MODES), line["run"])
        for (family, name), line in cells.items()
        if "run" in line
    ]
    others = ", ".join(name for (_, name), line in cells.items() if "run" not in line)
    rest = textwrap.fill(f"`make models` has not reached these yet: {others}.", 100) + "\n"
    return f"{NOTICE}\n\n{_INTRO}\n{table(head, lines)}\n" + (f"\n{rest}" if others else "")
