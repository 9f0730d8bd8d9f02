"""The generated page about results of papers."""

from __future__ import annotations

import textwrap
from typing import Final

from vllm_ssdkv.cli.docs.doc_pages import NOTICE
from vllm_ssdkv.profiling.simulation.papers.reproduce import summary, tables

_INTRO: Final = """\
# Results of papers

`ssdkv reproduce` simulates what four papers, and FlexGen, published, and prints this page
(`--json`, `--rows P3,P17`; `--figure NAME --plot FILE` draws a figure). Nothing here was measured:
drives, links, devices and accelerators are descriptions in `profiling/simulation/data`, where each
number has its source, and a step of each system runs as discrete events.

- **predicted**: nothing was fitted to this result. **calibrated**: it made a constant (the list is
  at the end) or an assumption (its note names it).
- **miss**: outside of the tolerance. The note names the facts that the paper leaves out.
- **report**: does not follow from the paper's own facts, or does not hold against a good baseline.
- **not measured**: this needs traces of a model; the note names the command.
- Nothing is claimed about absolute tokens/s, power and energy.
- A paper's baseline is a baseline as the paper ran it. The third table has the same work on a good
  I/O path.
"""


def papers_page() -> str:
    """Text of ``docs/papers.md``."""
    parts = [NOTICE, _INTRO, textwrap.fill(summary(), 100)]
    for table in tables():
        note, table.note = table.note, ""
        text = table.markdown().replace("### ", "## ", 1).rstrip()
        parts.append(f"{text}\n\n{textwrap.fill(note, 100)}".rstrip())
    return "\n\n".join(part.strip() for part in parts) + "\n"
