"""A batch from a file into a file, on an engine in this process, as ``vllm run-batch`` does it:
but ordered by common prefix, with progress, and going on where an interrupted run ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_ssdkv.batch.answering import Answering
from vllm_ssdkv.batch.answers import NO_TOKENS, Usage, run_batch_line
from vllm_ssdkv.batch.jobs import MAX_ERRORS
from vllm_ssdkv.batch.lines import Line, parse_request
from vllm_ssdkv.batch.partial import PartialOutput
from vllm_ssdkv.batch.validation import Plan, plan
from vllm_ssdkv.errors import BatchError

if TYPE_CHECKING:
    from vllm_ssdkv.batch.endpoints import Endpoints

MAX_REQUESTS: Final = 10_000_000
SHUTDOWN_S: Final = 60
"""Seconds that the engine has to end, unless vLLM is told otherwise: its own default is none, and
what waits to be written then is lost to the store."""
QUEUE: Final = 2
"""Requests that are sent at a time, as a multiple of those that the engine runs at a time: so
that one is always waiting when another ends."""


@dataclass
class Progress:
    """How far it is.

    Attributes:
        requests: All of the input.
        done: Those that have their answer, earlier runs included.
        failed: Answers that are an error, earlier runs included.
        usage: Tokens of this run.
        expected_share: Share of the prompts, by text, that the order makes common with the one
            before.
    """

    requests: int
    done: int = 0
    failed: int = 0
    usage: Usage = NO_TOKENS
    expected_share: float = 0.0


def read_plan(path: Path) -> Plan:
    """The requests of a file and their order.

    Raises:
        BatchError: a line is no request; each is named.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        found = plan(file, None, MAX_REQUESTS)
    problems = found.errors or found.bad
    if problems:
        lines = [
            f"{path}:{problem['line']}: {problem['message']}"
            if problem["line"]
            else f"{path}: {problem['message']}"
            for problem in problems
        ]
        more = max(found.bad_lines, len(lines)) - len(lines)
        if more:
            lines.append(f"and {more} more (only the first {MAX_ERRORS} are shown)")
        raise BatchError("\n".join(lines))
    return found


def _read(path: Path, line: Line) -> bytes:
    with path.open("rb") as file:
        file.seek(line.offset)
        return file.read(line.length)


async def run(
    path: Path,
    found: Plan,
    partial: PartialOutput,
    answering: Answering,
    concurrency: int,
    tell: Callable[[Progress], None],
) -> Progress:
    """Send what has no answer yet, in order, and append the answers.

    Raises:
        NoReplyError: the engine has ended; what was answered is kept.
        OSError: a file failed.
    """
    blocks = max(1, found.order.blocks)
    share = found.order.shared_blocks / blocks
    progress = Progress(len(found.lines), failed=partial.failed, expected_share=share)
    answered = partial.answered
    positions = iter(found.order.positions)

    async def work() -> None:
        for position in positions:
            text = _read(path, found.lines[position])
            request = parse_request(text, None)
            if request.custom_id in answered:
                progress.done += 1
                continue
            reply = await answering.answer(request.endpoint, request.body)
            partial.append(request.custom_id, run_batch_line(request.custom_id, reply))
            progress.done += 1
            progress.failed += not reply.succeeded
            progress.usage += reply.usage
            tell(progress)

    tasks = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    tell(progress)
    return progress


@contextlib.asynccontextmanager
async def engine(arguments: Sequence[str]) -> AsyncIterator[Endpoints]:
    """An engine in this process, from vLLM's own command line options.

    Follows ``vllm.entrypoints.launchers.run_batch`` of vLLM 0.32. Unknown options end the process
    with vLLM's message.
    """
    from starlette.datastructures import State
    from vllm.entrypoints.launchers.api_server.entry import (
        build_async_engine_client,
        init_app_state,
    )
    from vllm.entrypoints.launchers.run_batch import make_arg_parser, validate_run_batch_args
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_ssdkv.batch.endpoints import Endpoints

    parser = make_arg_parser(FlexibleArgumentParser(prog="ssdkv batch run"))
    parser.set_defaults(shutdown_timeout=SHUTDOWN_S)
    args = parser.parse_args(["--input-file", "-", "--output-file", "-", *arguments])
    validate_run_batch_args(args)
    async with build_async_engine_client(
        args, usage_context=UsageContext.OPENAI_BATCH_RUNNER
    ) as client:
        state = State()
        await init_app_state(client, state, args, await client.get_supported_tasks())
        yield Endpoints(state, client)


async def run_file(
    path: Path, output: Path, model: str, arguments: Sequence[str], tell: Callable[[Progress], None]
) -> Progress:
    """Answer every request of ``path`` and write ``output``, in the order of the input.

    Raises:
        BatchError: the input has bad lines, the output exists, another process writes it, or
            the model has not the endpoint of a request.
        NoReplyError: the engine has ended; another run goes on.
        OSError: a file failed; another run goes on.
    """
    if output.exists():
        raise BatchError(f"{output} exists; remove it, or give another name")
    found = read_plan(path)
    partial = PartialOutput(path, output, model)
    try:
        if len(partial.answered) < len(found.lines):
            async with engine(["--model", model, *arguments]) as endpoints:
                _check_endpoints(path, found, endpoints)
                concurrency = QUEUE * endpoints.seats
                progress = await run(path, found, partial, endpoints, concurrency, tell)
        else:
            done = len(found.lines)
            progress = Progress(done, done=done, failed=partial.failed)
        names = [parse_request(_read(path, line), None).custom_id for line in found.lines]
        partial.publish(names)
    finally:
        partial.close()
    return progress


def _check_endpoints(path: Path, found: Plan, endpoints: Endpoints) -> None:
    for line in found.lines:
        endpoint = parse_request(_read(path, line), None).endpoint
        if endpoint not in endpoints.supported:
            raise BatchError(f"{path}:{line.number}: this model has no {endpoint}")
