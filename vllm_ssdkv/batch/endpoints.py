"""vLLM's own OpenAI serving objects: where requests of a batch go, as requests of clients do.

Follows ``vllm.entrypoints.launchers.run_batch`` of vLLM 0.32; tests/contract pins what is used.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator
from starlette.responses import Response
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_ssdkv.batch.answers import Reply, Usage
from vllm_ssdkv.batch.endpoint_protocol import AbortedError, NoReplyError
from vllm_ssdkv.batch.engine import is_draining
from vllm_ssdkv.batch.request import CHAT, COMPLETIONS, EMBEDDINGS

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

LAST: Final = 1_000_000
"""Priority of batches where vLLM schedules by priority; clients have 0, larger is later."""

MAX_ERROR: Final = 1000
"""Characters of an error's text. Some of vLLM's repeat what the client sent, all of it, and its
search for paths in them takes time that grows with the cube of their length."""
LONG_S: Final = 0.005
"""Others wait no longer than this for the check of an ordinary request."""
SHOWN_ERRORS: Final = 3
"""Faults of a request that are named; more are counted."""

_LISTS: Final = ("list", "tuple", "set", "frozenset")
_STOPPING: Final = "the engine has ended or is about to"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[_Choice] | None = None


class Endpoints:
    """The endpoints that the model has. To be called on the server's event loop only."""

    def __init__(self, state: State, engine: EngineClient) -> None:
        """Read them from the state that vLLM's ``init_app_state`` has filled."""
        self._engine = engine
        policy = engine.vllm_config.scheduler_config.policy
        self._priority = LAST if policy == "priority" else None
        self._validating = asyncio.Lock()
        self._handlers: dict[str, tuple[SchemaValidator, Callable[[Any], Awaitable[Any]]]] = {}
        chat = getattr(state, "openai_serving_chat", None)
        if chat is not None:
            self._add(CHAT, ChatCompletionRequest, _detailed(chat).create_chat_completion)
        completion = getattr(state, "openai_serving_completion", None)
        if completion is not None:
            self._add(COMPLETIONS, CompletionRequest, _detailed(completion).create_completion)
        embedding = getattr(state, "serving_embedding", None)
        if embedding is not None:
            self._add(EMBEDDINGS, EmbeddingRequest, embedding)
        self.supported = frozenset(self._handlers)

    def _add(
        self,
        endpoint: str,
        request: Any,  # noqa: ANN401 - a type of vLLM's
        handler: Callable[[Any], Awaitable[Any]],
    ) -> None:
        self._handlers[endpoint] = (fail_fast(request), handler)

    @property
    def by_priority(self) -> bool:
        """Check whether vLLM lets other requests go first."""
        return self._priority is not None

    @property
    def seats(self) -> int:
        """Requests that the engine runs at a time."""
        return int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    async def answer(self, endpoint: str, body: dict[str, Any]) -> Reply:
        """The reply of an endpoint of :attr:`supported`.

        Raises:
            NoReplyError: the engine has ended or the server is stopping.
            AbortedError: it has aborted this request only.
        """
        validator, handler = self._handlers[endpoint]
        if self._priority is not None:
            body = {**body, "priority": self._priority}
        try:
            result = await handler(await self._validated(validator, body))
        except EngineDeadError as error:
            raise NoReplyError(str(error)) from error
        except Exception as error:  # noqa: BLE001 - vLLM's own handlers make a response of any
            result = create_error_response(brief(error))
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # vLLM makes an error response of a cancellation ("Client disconnected").
            raise asyncio.CancelledError
        try:
            reply = _reply(result)
        except AbortedError:
            if not self._is_stopping():
                raise
            raise NoReplyError(_STOPPING) from None
        if not reply.succeeded and self._is_stopping():
            raise NoReplyError(_STOPPING)
        return reply

    async def _validated(self, validator: SchemaValidator, body: dict[str, Any]) -> object:
        """The request as vLLM's object. If this took long, others have the event loop for as long.

        Raises:
            ValidationError: it is wrong.
        """
        async with self._validating:
            begun = time.monotonic()
            try:
                return validator.validate_python(body)
            finally:
                took = time.monotonic() - begun
                if took > LONG_S:
                    await asyncio.sleep(took)

    def _is_stopping(self) -> bool:
        """Check whether errors are those of the end.

        A server that drains (``--shutdown-timeout``) lets the engine run on for what it has, but
        has ended the threads that render prompts: new requests get an error until it ends.
        """
        return self._engine.errored or is_draining(self._engine)


def fail_fast(request: Any) -> SchemaValidator:  # noqa: ANN401 - a type of vLLM's
    """The validator of a type, but a list ends at its first item that is wrong.

    Otherwise each item gets an error of its own for each type that it could have had: 300 KB of
    empty messages, 1.5 million errors.
    """
    return SchemaValidator(_with_fail_fast(TypeAdapter(request).core_schema))


def _with_fail_fast(schema: Any) -> Any:  # noqa: ANN401 - any part of a core schema
    if isinstance(schema, dict):
        changed = {key: _with_fail_fast(value) for key, value in schema.items()}
        if isinstance(kind := schema.get("type"), str) and kind in _LISTS:
            changed["fail_fast"] = True
        return changed
    if isinstance(schema, list | tuple):
        return type(schema)(map(_with_fail_fast, schema))
    return schema


def brief(error: Exception) -> Exception:
    """The same error, for :func:`create_error_response`, with a text of bounded length."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        shown = [f"{_place(fault)}: {fault['msg'][:200]}" for fault in faults[:SHOWN_ERRORS]]
        more = len(faults) - len(shown)
        return ValueError("; ".join([*shown, f"and {more} more"] if more else shown))
    text = str(error)
    if len(text) <= MAX_ERROR:
        return error
    text = f"{text[:MAX_ERROR]}…"
    twin = type(error).__new__(type(error), text)
    # What it is made of may be in its text once more.
    twin.__dict__.update({**vars(error), "value": None})
    if len(text) <= len(str(twin)) < 2 * MAX_ERROR:
        return twin
    return ValueError(text) if isinstance(error, ValueError) else RuntimeError(text)


def _place(fault: Any) -> str:  # noqa: ANN401 - pydantic's
    """The field that is wrong; of vLLM's validators in between nobody needs to know."""
    return ".".join(part for part in map(str, fault["loc"]) if "(" not in part)[:100]


def _detailed(serving: Any) -> Any:  # noqa: ANN401 - vLLM's serving objects
    """The same serving object, but its answers say how many prompt tokens were cached."""
    twin = copy.copy(serving)
    twin.enable_prompt_tokens_details = True
    return twin


def _reply(result: Any) -> Reply:  # noqa: ANN401 - what vLLM's serving objects return
    if isinstance(result, ErrorResponse):
        result.error.message = result.error.message[: 2 * MAX_ERROR]
        return Reply(result.error.code, result.model_dump_json().encode())
    if isinstance(result, Response):
        status, content = result.status_code, bytes(result.body)
    else:
        status, content = 200, result.model_dump_json().encode()
    if status != 200:
        return Reply(status, content)
    body = msgspec.json.decode(content, type=_Body)
    if any(choice.finish_reason == "abort" for choice in body.choices or ()):
        raise AbortedError("the engine has aborted a request")
    usage = body.usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    return Reply(
        status,
        content,
        Usage(usage.prompt_tokens, details.cached_tokens or 0, usage.completion_tokens or 0),
    )
