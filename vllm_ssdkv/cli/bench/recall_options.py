"""Options of benchmarks of the recall model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_ssdkv.cli import arguments
from vllm_ssdkv.profiling.recall.bench import SPARSE

DirectoryOption = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        parser=arguments.directory_to_write,
        metavar="DIR",
        help="Directory for the stores, on one disk; default: the system's temporary directory.",
    ),
]


SelectorsOption = Annotated[
    str, typer.Option(help=f"Selectors to compare: any of {', '.join(SPARSE)}.")
]


WindowOption = Annotated[
    int,
    typer.Option("--window", min=1, max=8192, help="Newest tokens that every query attends to."),
]


ReuseOption = Annotated[
    int, typer.Option("--reuse-steps", min=1, help="Number of tokens for which a choice is kept.")
]


SimilarityOption = Annotated[
    float,
    typer.Option(
        "--reuse-similarity",
        min=0,
        max=1,
        help="Select again when the query's similarity falls below this.",
    ),
]
