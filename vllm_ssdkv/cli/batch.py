"""``ssdkv batch``: batches of requests from files, and those of a running server."""

from __future__ import annotations

import asyncio
import os
import urllib.parse
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from vllm_ssdkv.base.errors import BatchError, SSDKVError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.server import URL, Key, UnreachableError, Url, call

app = typer.Typer(no_args_is_help=True, help="Run and manage batches of requests.")

FAILED: Final = 1

_Id = Annotated[str, typer.Argument(metavar="BATCH", help="ID of the batch, as ls shows it.")]


def _fail(error: Exception) -> typer.Exit:
    typer.echo(str(error), err=True)
    return typer.Exit(FAILED)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    input_file: Annotated[
        Path,
        typer.Argument(
            parser=arguments.file_to_read,
            metavar="IN",
            help="File of requests, one JSON object per line.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            parser=arguments.file_to_write,
            metavar="OUT",
            help="File for the answers; it must not exist.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option("--model", parser=os.path.expanduser, help="Model, as vLLM takes it."),
    ],
    as_json: arguments.Json = False,
) -> None:
    """Answer the requests of IN, without a server; all other options go to vLLM.

    The formats are those of `vllm run-batch`. Requests with a common prefix run together. The same
    command continues an interrupted run. Exits with 1 when a request failed; its line in OUT has
    the reason. vLLM's log goes to the error output.
    """
    from vllm_ssdkv.batch.offline import Progress, run_file

    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[saved]}"),
        console=Console(stderr=True),
    )
    task = bar.add_task("requests", total=None, saved="")

    def tell(progress: Progress) -> None:
        bar.update(task, total=progress.requests, completed=progress.done, saved=_saved(progress))

    try:
        with bar, arguments.output_for_results():
            ended = asyncio.run(run_file(input_file, output, model, context.args, tell))
    except (SSDKVError, OSError) as error:
        raise _fail(error) from None
    if as_json:
        arguments.print_json(
            {
                "requests": ended.requests,
                "failed": ended.failed,
                "prompt_tokens": ended.usage.prompt,
                "cached_tokens": ended.usage.cached,
                "completion_tokens": ended.usage.completion,
                "shared_prefix_share": round(ended.expected_share, 4),
            }
        )
    else:
        typer.echo(f"{ended.requests} requests answered; {_saved(ended) or 'nothing was left'}")
    if ended.failed:
        typer.echo(f"{ended.failed} of them with an error, see {output}", err=True)
        raise typer.Exit(FAILED)


def _saved(progress: Any) -> str:  # noqa: ANN401 - offline.Progress, imported when needed
    if not progress.usage.prompt:
        return ""
    share = progress.usage.cached / progress.usage.prompt
    return (
        f"{progress.usage.cached} of {progress.usage.prompt} prompt tokens saved ({share:.0%}; "
        f"expected {progress.expected_share:.0%})"
    )


def _call(url: str, key: str, path: str, method: str = "GET") -> dict[str, Any]:
    """The JSON object that the server answers. Raises BatchError, which says how to start one."""
    try:
        return call(url, key, path, method)
    except UnreachableError as error:
        raise BatchError(
            f"{error}: start vllm serve with VLLM_PLUGINS=ssdkv,ssdkv_batch, or name another "
            "server with --url"
        ) from None


def _when(seconds: int | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M UTC}"


@app.command("ls")
def list_batches(url: Url = URL, key: Key = "", as_json: arguments.Json = False) -> None:
    """List the newest 100 batches of a server."""
    try:
        found = _call(url, key, "/batches?limit=100")["data"]
    except BatchError as error:
        raise _fail(error) from None
    if as_json:
        arguments.print_json(found)
        return
    if not found:
        typer.echo(
            "No batches were made with this key. A server lists the batches of one key only, also "
            "where it asks for none: give the key that the batches were made with (--api-key, "
            "OPENAI_API_KEY), for example EMPTY."
        )
        return
    table = Table(
        "Batch", "Status", "Answered", "Failed", "Of", "Created", box=None, pad_edge=False
    )
    for batch in found:
        counts = batch["request_counts"]
        table.add_row(
            Text(batch["id"], overflow="fold"),
            Text(batch["status"]),
            *(str(counts[name]) for name in ("completed", "failed", "total")),
            _when(batch["created_at"]),
        )
    Console().print(table)


@app.command()
def show(identifier: _Id, url: Url = URL, key: Key = "") -> None:
    """Print a server's record of a batch, as JSON."""
    _print(url, key, f"/batches/{urllib.parse.quote(identifier, safe='')}", "GET")


@app.command()
def cancel(identifier: _Id, url: Url = URL, key: Key = "") -> None:
    """Cancel a batch of a server; requests that are answered keep their answers."""
    _print(url, key, f"/batches/{urllib.parse.quote(identifier, safe='')}/cancel", "POST")


def _print(url: str, key: str, path: str, method: str) -> None:
    try:
        arguments.print_json(_call(url, key, path, method))
    except BatchError as error:
        raise _fail(error) from None
