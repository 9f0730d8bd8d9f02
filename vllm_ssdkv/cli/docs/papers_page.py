"""The generated page about results of papers."""

from __future__ import annotations

import textwrap
from typing import Final

from vllm_ssdkv.cli.docs.doc_pages import NOTICE
from vllm_ssdkv.profiling.simulation.papers.reproduce import summary, tables

_INTRO: Final = """\
# Results of papers

`ssdkv lab reproduce` compares published results of InstInfer, Swarm, HILOS, DockerSSD and FlexGen
with ours, and prints this page. A simulator runs a step of each system as discrete events. Drives,
links and accelerators are descriptions in `profiling/simulation/data`, each number with its source.
The command also prints the constants that each row rests on. Each row is of one kind:

- **arithmetic**: a closed form of printed numbers.
- **calibrated**: one of its constants is the published result, a share of the same step, or was
  fitted to it. Such a row is no evidence for the model.
- **predicted**: a simulated step is in it, and no such constant.
- **measured**: measured on traces of a model that the named command recorded here.

A value passes within its tolerance, and a band within itself. A ratio passes if its effect,
(ours - 1) / (published - 1), is from 0.8 to 1.25. The note of a miss has its cause, or the facts
that the paper leaves out. Of a **report** nothing is demanded. We claim nothing about absolute
tokens/s, power and energy.
"""


def papers_page() -> str:
    """Text of ``docs/papers.md``."""
    parts = [NOTICE, _INTRO, textwrap.fill(summary(), 100)]
    for table in tables()[:-1]:
        note, table.note = table.note, ""
        text = table.markdown().replace("### ", "## ", 1).rstrip()
        parts.append(f"{text}\n\n{textwrap.fill(note, 100)}".rstrip())
    return "\n\n".join(part.strip() for part in parts) + "\n"
