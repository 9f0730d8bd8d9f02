"""``ssdkv warm``: has a running server compute and store the KV of prompts before users ask."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from vllm_ssdkv.base.errors import BatchError
from vllm_ssdkv.batch.lines import LineError, read_lines
from vllm_ssdkv.batch.request import EMBEDDINGS, parse_request
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.server import URL, AnswerError, Key, UnreachableError, Url, call

FAILED: Final = 1
_PROMPT_S: Final = 3600.0
"""Seconds that one prompt may take, its wait for others included."""
_OF_ANSWERS: Final = frozenset(
    {
        "best_of",
        "echo",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "min_tokens",
        "n",
        "prompt_logprobs",
        "top_logprobs",
        "use_beam_search",
    }
)
"""Fields that ask for more than one token, or keep vLLM from looking for stored KV."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt of the file: the line's number, the endpoint, and the request."""

    line: int
    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class _Answer:
    """Outcome of a prompt. ``found`` is None where the server does not tell it."""

    line: int
    tokens: int = 0
    found: int | None = 0
    problem: str = ""
    lost: bool = False


def warm(
    file: Annotated[
        Path,
        typer.Argument(
            parser=arguments.file_to_read,
            metavar="FILE",
            help="File of requests, one JSON object per line, as `ssdkv batch run` takes it.",
        ),
    ],
    url: Url = URL,
    key: Key = "",
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, max=256, help="Prompts that are sent together.")
    ] = 4,
    as_json: arguments.Json = False,
) -> None:
    """Have a server compute and store the KV of FILE's prompts, so that later requests find it.

    Each prompt is sent with a limit of one token. It can be stopped at any time: the same command
    goes on, since prompts that are stored are found and not computed again. Exits with 1 when a
    prompt failed.
    """
    try:
        number = sum(1 for _ in _prompts(file))
    except (LineError, OSError) as error:
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(FAILED) from None
    answers: list[_Answer] = []
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task("prompts", total=number)
    try:
        with bar:
            for answer in _sent(_prompts(file), url, key, min(at_once, number)):
                answers.append(answer)
                if answer.problem:
                    bar.console.print(f"{file}:{answer.line}: {answer.problem}", markup=False)
                if answer.lost:
                    break
                bar.advance(task)
    except (KeyboardInterrupt, SystemExit):
        _tell(answers, number, as_json=as_json)
        raise
    _tell(answers, number, as_json=as_json)
    if any(answer.problem for answer in answers):
        raise typer.Exit(FAILED)


def _prompts(file: Path) -> Iterator[_Prompt]:
    """The prompts of a file, one at a time. Raises LineError, which names the line."""
    with file.open("rb") as lines:
        for line in read_lines(lines):
            try:
                request = parse_request(line.text, None)
                body = {k: v for k, v in request.body().items() if k not in _OF_ANSWERS}
            except LineError as error:
                raise LineError(error.code, f"line {line.number}: {error}") from None
            if request.endpoint == EMBEDDINGS:
                text = f"line {line.number}: embeddings leave no KV; leave the line out"
                raise LineError("invalid_url", text)
            sent = json.dumps({**body, "max_tokens": 1}).encode()
            yield _Prompt(line.number, request.endpoint.removeprefix("/v1"), sent)


def _sent(prompts: Iterator[_Prompt], url: str, key: str, at_once: int) -> Iterator[_Answer]:
    """Answers as they come. The threads end with the process: a server ends requests of those who
    have gone."""
    done: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
    lock = threading.Lock()

    def send() -> None:
        try:
            while True:
                with lock:
                    prompt = next(prompts, None)
                if prompt is None:
                    return
                done.put(_ask(prompt, url, key))
        finally:
            done.put(None)

    for _ in range(at_once):
        threading.Thread(target=send, name="ssdkv-warm", daemon=True).start()
    running = at_once
    while running:
        answer = done.get()
        if answer is None:
            running -= 1
        else:
            yield answer


def _ask(prompt: _Prompt, url: str, key: str) -> _Answer:
    try:
        usage = call(url, key, prompt.path, "POST", prompt.body, _PROMPT_S)["usage"]
        details = usage.get("prompt_tokens_details")
        found = None if details is None else int(details.get("cached_tokens") or 0)
        return _Answer(prompt.line, int(usage["prompt_tokens"]), found)
    except AnswerError as error:
        return _Answer(prompt.line, problem=str(error))
    except UnreachableError as error:
        way_out = "start the server, or name another with --url, and run this command again"
        return _Answer(prompt.line, problem=f"{error}: {way_out}", lost=True)
    except BatchError as error:
        return _Answer(prompt.line, problem=str(error), lost=True)
    except (KeyError, TypeError, ValueError, AttributeError):
        return _Answer(prompt.line, problem=f"{url}: the answer does not tell its tokens")


def _tell(answers: list[_Answer], of: int, *, as_json: bool) -> None:
    """Print what was reached."""
    good = [answer for answer in answers if not answer.problem]
    tokens = sum(answer.tokens for answer in good)
    # A server that does not tell says the same for each prompt.
    found = (
        sum(one.found or 0 for one in good) if all(one.found is not None for one in good) else None
    )
    if as_json:
        content = {"prompts": of, "warmed": len(good), "prompt_tokens": tokens, "found": found}
        arguments.print_json(content)
        return
    known = (
        "how many of them were stored before is told by servers with --enable-prompt-tokens-details"
        if found is None
        else f"{found} of them were stored before"
    )
    typer.echo(f"{len(good)} of {of} prompts warmed, {tokens} tokens; {known}")
