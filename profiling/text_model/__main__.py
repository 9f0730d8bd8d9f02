"""``python -P -m vllm_ssdkv.profiling.text_model DIR``: make the text model there, once."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.text_model.fetch import NAME, text_model


def main() -> int:
    """Entry point; the exit status."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -P -m vllm_ssdkv.profiling.text_model DIR\n")
        return 2
    try:
        place = text_model(Path(sys.argv[1]).absolute())
    except BenchError as error:
        sys.stderr.write(f"text model: {error}\n")
        return 1
    sys.stdout.write(f"{NAME}: {place}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
