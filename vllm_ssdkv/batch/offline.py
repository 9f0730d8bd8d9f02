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

from pydantic import ValidationError

from vllm_ssdkv.base.errors import BatchError, SSDKVError
from vllm_ssdkv.batch.answers import NO_TOKENS, Usage, failure_line, run_batch_line
from vllm_ssdkv.batch.endpoint_protocol import Answering, NoReplyError
from vllm_ssdkv.batch.output_log import PartialOutput
from vllm_ssdkv.batch.request import Request, parse_request
from vllm_ssdkv.batch.sending import DEATHS, died
from vllm_ssdkv.batch.validation import MAX_ERRORS, Entry, Plan, plan

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
    """Progress of a run.

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
    problems = found.errors or found.summary.bad
    if problems:
        lines = [
            f"{path}:{problem['line']}: {problem['message']}"
            if problem["line"]
            else f"{path}: {problem['message']}"
            for problem in problems
        ]
        more = max(found.summary.bad_lines, len(lines)) - len(lines)
        if more:
            lines.append(f"and {more} more (only the first {MAX_ERRORS} are shown)")
        raise BatchError("\n".join(lines))
    return found


def _read(path: Path, entry: Entry) -> Request:
    with path.open("rb") as file:
        file.seek(entry.offset)
        return parse_request(file.read(entry.length), None)


class _Run:
    """Requests of a run that are sent, and those under way."""

    def __init__(
        self,
        partial: PartialOutput,
        answering: Answering,
        progress: Progress,
        tell: Callable[[Progress], None],
    ) -> None:
        self._partial = partial
        self._answering = answering
        self._progress = progress
        self._tell = tell
        self._under_way: set[str] = set()

    async def send(self, request: Request) -> None:
        custom_id = request.custom_id
        self._partial.begin(custom_id)
        self._under_way.add(custom_id)
        reply = await self._answering.answer(request.endpoint, request.body())
        self._partial.append(custom_id, run_batch_line(custom_id, reply))
        self._under_way.discard(custom_id)
        self._progress.failed += not reply.succeeded
        self._progress.usage += reply.usage
        self._done()

    def give_up(self, request: Request) -> None:
        self._partial.append(request.custom_id, failure_line(died(request.custom_id)))
        self._progress.failed += 1
        self._done()

    def _done(self) -> None:
        self._progress.done += 1
        self._tell(self._progress)

    def put_back(self) -> None:
        self._partial.put_back(self._under_way)


async def run(
    path: Path,
    found: Plan,
    partial: PartialOutput,
    answering: Answering,
    concurrency: int,
    tell: Callable[[Progress], None],
) -> Progress:
    """Send what has no answer yet, in order, and append the answers.

    What was under way when an engine died is sent last, each alone; what was so twice is not.

    Raises:
        NoReplyError: the engine has ended; what was answered is kept.
        OSError: a file failed.
    """
    summary = found.summary
    share = summary.shared_blocks / max(1, summary.blocks)
    progress = Progress(summary.lines, failed=partial.failed, expected_share=share)
    sending = _Run(partial, answering, progress, tell)
    answered = partial.answered
    entries = found.in_order()
    suspects: list[Entry] = []

    async def work() -> None:
        for entry in entries:
            request = _read(path, entry)
            attempts = partial.attempts(request.custom_id)
            if request.custom_id in answered:
                progress.done += 1
            elif attempts >= DEATHS:
                sending.give_up(request)
            elif attempts:
                suspects.append(entry)
            else:
                await sending.send(request)

    tasks = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
        for entry in suspects:
            await sending.send(_read(path, entry))
    except NoReplyError:
        raise
    except BaseException:  # Ctrl-C, or a file: no request is to blame
        sending.put_back()
        raise
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

    Raises:
        BatchError: vLLM refuses a setting, or its engine did not start.
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
    client_of = build_async_engine_client(args, usage_context=UsageContext.OPENAI_BATCH_RUNNER)
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(client_of)
            state = State()
            await init_app_state(client, state, args, await client.get_supported_tasks())
            endpoints = Endpoints(state, client)
        except SSDKVError:
            raise
        except Exception as error:
            raise BatchError(f"vLLM does not start: {_cause(error)}") from error
        yield endpoints


def _cause(error: Exception) -> str:
    """The text of an error as one line, without the values that pydantic repeats."""
    texts = [str(error)]
    if isinstance(error, ValidationError):
        texts = [fault["msg"] for fault in error.errors(include_url=False, include_input=False)]
    return " ".join("; ".join(texts).split()) or type(error).__name__


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
        if len(partial.answered) < found.summary.lines:
            async with engine(["--model", model, *arguments]) as endpoints:
                _check_endpoints(path, found, endpoints)
                concurrency = QUEUE * endpoints.seats
                progress = await run(path, found, partial, endpoints, concurrency, tell)
        else:
            done = found.summary.lines
            progress = Progress(done, done=done, failed=partial.failed)
        names = [_read(path, entry).custom_id for entry in found.entries]
        partial.publish(names)
    finally:
        partial.close()
    return progress


def _check_endpoints(path: Path, found: Plan, endpoints: Endpoints) -> None:
    for entry in found.entries:
        endpoint = _read(path, entry).endpoint
        if endpoint not in endpoints.supported:
            raise BatchError(f"{path}:{entry.number}: this model has no {endpoint}")
