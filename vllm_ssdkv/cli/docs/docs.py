"""``ssdkv lab docs``: write the generated pages, or check that they are up to date."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.docs.command_page import commands_page
from vllm_ssdkv.cli.docs.doc_pages import (
    metrics_page,
    options_for_tests_page,
    options_page,
    with_section,
)
from vllm_ssdkv.cli.docs.fpga_page import fpga_page
from vllm_ssdkv.cli.docs.messages_page import messages_page
from vllm_ssdkv.cli.docs.models_page import models_page
from vllm_ssdkv.cli.docs.papers_page import papers_page
from vllm_ssdkv.fpga_offload.generate import FILES
from vllm_ssdkv.profiling.gpu_pack.page import gpu_page
from vllm_ssdkv.profiling.models.rows import read_rows
from vllm_ssdkv.profiling.sizing.validate import section as section_of_runs

app = typer.Typer(no_args_is_help=True, help="Write or check the generated pages.")

_Directory = Annotated[
    Path,
    typer.Argument(
        parser=arguments.place,
        metavar="DIR",
        help="Folder of the pages, docs/ of the repository.",
    ),
]


def pages(directory: Path) -> dict[str, str]:
    """File name and text of every generated page, and of pages with a generated table, if they are
    there, and of files for the FPGA's tools, if their folder is beside ``directory``. Runs are in
    ``directory / "gpu"`` and ``directory / "sizing"``."""
    found = {
        "cli.md": commands_page(),
        "fpga-tables.md": fpga_page(),
        "gpu.md": gpu_page(directory / "gpu"),
        "messages.md": messages_page(),
        "metrics.md": metrics_page(),
        "models.md": models_page(read_rows(directory / "models" / "rows.jsonl")),
        "options.md": options_page(),
        "options-for-tests.md": options_for_tests_page(),
        "papers.md": papers_page(),
    }
    sizing = directory / "sizing.md"
    if sizing.is_file():
        text = sizing.read_text(encoding="utf-8")
        runs = section_of_runs(directory / "sizing" / "runs.jsonl")
        found[sizing.name] = with_section(text, "validation", runs)
    return found | fpga_files(directory)


def fpga_files(directory: Path) -> dict[str, str]:
    """Text of files for the FPGA's tools, by path from ``directory``, if their folder is there."""
    folder = Path("..") / "fpga_offload" / "generated"
    if not (directory / folder).is_dir():
        return {}
    return {str(folder / name): text() for name, text in FILES.items()}


def stale(directory: Path, fresh: Mapping[str, str]) -> dict[str, str]:
    """The pages that differ from what would be written, each with a unified diff."""
    found: dict[str, str] = {}
    for name, text in fresh.items():
        path = directory / name
        present = path.read_text(encoding="utf-8") if path.is_file() else ""
        if present != text:
            lines = difflib.unified_diff(
                present.splitlines(), text.splitlines(), str(path), "generated", lineterm="", n=1
            )
            found[name] = "\n".join(lines)
    return found


@app.command()
def write(directory: _Directory) -> None:
    """Write the generated pages into DIR, the table in sizing.md, and the headers of the FPGA
    kernels beside DIR."""
    directory.mkdir(parents=True, exist_ok=True)
    fresh = pages(directory)
    for name in stale(directory, fresh):
        (directory / name).write_text(fresh[name], encoding="utf-8")
        typer.echo(f"wrote {directory / name}")


@app.command()
def check(directory: _Directory) -> None:
    """Fail, with a diff, when a page in DIR differs from the output of `docs write`."""
    found = stale(directory, pages(directory))
    for diff in found.values():
        typer.echo(diff)
    if found:
        typer.echo(f"run: ssdkv lab docs write {directory}", err=True)
        raise typer.Exit(1)
