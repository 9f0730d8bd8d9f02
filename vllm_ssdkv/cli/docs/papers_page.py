"""The generated page about results of papers."""

from __future__ import annotations

import textwrap
from typing import Final

from vllm_ssdkv.cli.docs.doc_pages import NOTICE
from vllm_ssdkv.profiling.simulation.papers.reproduce import summary, tables

_INTRO: Final = """\
# Results of papers

`ssdkv lab reproduce` compares the published results of four papers, and of FlexGen, with ours, and
prints this page (`--json`, `--rows P3,P17`; `--figure NAME --plot FILE` draws a figure). Drives,
links, devices and accelerators are descriptions in `profiling/simulation/data`, where each number
has its source, and a step of each system runs as discrete events. Each row is one of:

- **arithmetic**: a closed form of printed figures, however near.
- **calibrated**: a constant of it is the published result itself, a share of the same step, or was
  fitted to it. It says nothing for the model.
- **predicted**: a simulated step is in it, and no such constant.
- **measured**: measured on traces of a model that the named command recorded here.

Verdicts: of a ratio the effect counts, (ours - 1) / (published - 1), which passes from 0.8 to 1.25,
so that a result on the other side of 1 is a miss; of a value its tolerance; of a band the band
itself. The note of a miss says its cause, or the facts that the paper leaves out. **report**:
nothing is demanded. Of absolute tokens/s, power and energy nothing is claimed. A paper's baseline
is one as the paper ran it; the third table has the same work on a good I/O path.

The command also prints each constant with its source and the rows that rest on it.
"""


def papers_page() -> str:
    """Text of ``docs/papers.md``."""
    parts = [NOTICE, _INTRO, textwrap.fill(summary(), 100)]
    for table in tables()[:-1]:
        note, table.note = table.note, ""
        text = table.markdown().replace("### ", "## ", 1).rstrip()
        parts.append(f"{text}\n\n{textwrap.fill(note, 100)}".rstrip())
    return "\n\n".join(part.strip() for part in parts) + "\n"
