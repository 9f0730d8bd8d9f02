"""``python -P -m vllm_ssdkv.profiling.models FILE [ARCHITECTURE...]``: start models, write rows.

Models that were not run come first, then those whose rows are oldest, until SSDKV_MODELS_S (3600)
seconds are over.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from vllm_ssdkv.profiling.models.rows import MODES, NOT_RUN, Row, read_rows, write_rows
from vllm_ssdkv.profiling.models.tiny_config import family_of
from vllm_ssdkv.profiling.models.trial import architectures, preload, try_model


def main() -> int:
    """Entry point; the exit status."""
    if len(sys.argv) < 2:
        sys.stderr.write("usage: python -P -m vllm_ssdkv.profiling.models FILE [ARCHITECTURE...]\n")
        return 2
    path, end = (
        Path(sys.argv[1]),
        time.monotonic() + float(os.environ.get("SSDKV_MODELS_S", "3600")),
    )
    preload()
    names = architectures()
    unknown = [
        Row(family_of(name), name, mode, "", "", NOT_RUN, "") for name in names for mode in MODES
    ]
    rows = unknown + read_rows(path)
    write_rows(path, rows)
    dates = {row.architecture: row.date for row in rows}
    for name in sys.argv[2:] or sorted(names, key=dates.__getitem__):
        if time.monotonic() > end:
            break
        made = try_model(name, MODES)
        rows += made
        write_rows(path, rows)
        for row in made:
            sys.stdout.write(f"{row.architecture}, {row.mode}: {row.result}, {row.detail}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
