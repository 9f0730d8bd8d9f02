"""Hooks of vLLM's OpenAI server that the Batch API uses, pinned one by one."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from jinja2 import TemplateError
from prometheus_client import CollectorRegistry, Gauge
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response
from vllm.config import CacheConfig
from vllm.entrypoints.launchers import launcher, run_batch
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo
from vllm.entrypoints.serve.middleware import register
from vllm.exceptions import (
    GenerationError,
    GracefulHTTPError,
    RetryableRequestError,
    VLLMNotFoundError,
    VLLMUnprocessableEntityError,
    VLLMValidationError,
)
from vllm.plugins import ENDPOINT_PLUGINS_GROUP
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.renderers.base import BaseRenderer
from vllm.utils.async_utils import make_async
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import WAITING_REASON_CAPACITY, PrometheusStatLogger

from vllm_ssdkv.base.host import default_root
from vllm_ssdkv.base.sizes import KIB, MIB
from vllm_ssdkv.batch.answers import Reply
from vllm_ssdkv.batch.endpoint_protocol import AbortedError, NoReplyError
from vllm_ssdkv.batch.endpoints import Endpoints, brief, fail_fast
from vllm_ssdkv.batch.engine import RUNNING, USED, WAITING, VllmEngine, kv_cache, load_of
from vllm_ssdkv.batch.plugin import BatchPlugin, api_keys, batch_config, directory, limits
from vllm_ssdkv.batch.request import CHAT, Limits
from vllm_ssdkv.batch.room import KVCache, Load
from vllm_ssdkv.batch.routes import STATE
from vllm_ssdkv.config.batch import BatchConfig


def test_the_plugin_is_one() -> None:
    assert ENDPOINT_PLUGINS_GROUP == "vllm.endpoint_plugins"
    assert isinstance(BatchPlugin(), EndpointPlugin)


def test_plugins_are_attached_before_and_initialised_after_vllms_own() -> None:
    from vllm.entrypoints.launchers.api_server import app_state

    source = inspect.getsource(build_app)
    assert source.index("register_api_routers(") < source.index("attach_endpoint_plugins(")
    source = inspect.getsource(app_state.init_app_state)
    assert source.index("init_generate_state(") < source.index("init_endpoint_plugins_state(")


def test_routes_are_added_where_vllm_has_none() -> None:
    app = FastAPI()
    BatchPlugin().attach_router(app)
    found = {
        (method, route.path)
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert found == {
        ("POST", "/v1/files"),
        ("GET", "/v1/files"),
        ("GET", "/v1/files/{file_id}"),
        ("DELETE", "/v1/files/{file_id}"),
        ("GET", "/v1/files/{file_id}/content"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/batches/{batch_id}"),
        ("POST", "/v1/batches/{batch_id}/cancel"),
    }


def test_serving_objects_take_a_request_alone_and_tell_cached_tokens() -> None:
    for method in (
        OpenAIServingChat.create_chat_completion,
        OpenAIServingCompletion.create_completion,
    ):
        _, request, raw = inspect.signature(method).parameters.values()
        assert request.default is inspect.Parameter.empty
        assert raw.default is None
    for serving in (OpenAIServingChat, OpenAIServingCompletion):
        assert "self.enable_prompt_tokens_details" in inspect.getsource(serving)
    assert "prompt_tokens_details" in UsageInfo.model_fields


class _Renderer(BaseRenderer[Any]):
    """vLLM's own, but for what it renders: only its threads and their end are looked at."""

    def render_messages(self, messages: Any, params: Any) -> Any:  # noqa: ANN401
        pytest.fail("nothing is rendered here")


def test_while_a_server_drains_errors_are_no_answers() -> None:
    """What vLLM ends first is what renders prompts; the engine runs on for as long as it may."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(renderer_num_workers=1, supports_multimodal_inputs=False),
        parallel_config=SimpleNamespace(_api_process_rank=0),
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}

    async def render(request: ChatCompletionRequest) -> ErrorResponse:
        await make_async(lambda: request, executor=renderer._executor)()
        return create_error_response("it is too long")

    def ask() -> Reply:
        return asyncio.run(endpoints.answer(CHAT, body))

    def drain(timeout: float) -> None:
        with pytest.raises(NoReplyError):
            ask()
        drained.append(timeout)

    drained: list[float] = []
    renderer = _Renderer(cast("Any", config), None)
    engine = SimpleNamespace(
        errored=False,
        renderer=renderer,
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(policy="fcfs")),
        engine_core=SimpleNamespace(shutdown=drain),
    )
    chat = SimpleNamespace(create_chat_completion=render)
    endpoints = Endpoints(
        cast("Any", SimpleNamespace(openai_serving_chat=chat)), cast("Any", engine)
    )
    assert ask().status == 400
    AsyncLLM.shutdown(cast("Any", engine), timeout=7)
    assert drained == [7]


def test_what_a_drain_aborts_is_not_sent_again_to_it() -> None:
    async def aborted(_: ChatCompletionRequest) -> Response:
        return Response(b'{"choices": [{"finish_reason": "abort"}]}')

    def ask() -> Reply:
        return asyncio.run(endpoints.answer(CHAT, body))

    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    pool = ThreadPoolExecutor(1)
    engine = SimpleNamespace(
        errored=False,
        renderer=SimpleNamespace(_executor=pool),
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(policy="fcfs")),
    )
    chat = SimpleNamespace(create_chat_completion=aborted)
    endpoints = Endpoints(
        cast("Any", SimpleNamespace(openai_serving_chat=chat)), cast("Any", engine)
    )
    with pytest.raises(AbortedError):
        ask()
    pool.shutdown()
    with pytest.raises(NoReplyError) as stopped:
        ask()
    assert not isinstance(stopped.value, AbortedError)


def test_requests_take_a_priority() -> None:
    body = {"model": "m", "priority": 7}
    adapter = TypeAdapter(EmbeddingRequest)
    assert adapter.validate_python({**body, "input": "x"}).priority == 7
    assert CompletionRequest.model_validate({**body, "prompt": "x"}).priority == 7
    messages = [{"role": "user", "content": "x"}]
    assert ChatCompletionRequest.model_validate({**body, "messages": messages}).priority == 7


def test_run_batch_takes_its_engine_from_the_same_places() -> None:
    source = inspect.getsource(run_batch)
    for name in ("build_async_engine_client", "init_app_state(", "validate_run_batch_args("):
        assert name in source
    assert callable(run_batch.make_arg_parser)


def test_options_come_from_the_connector() -> None:
    def config(connector: str | None) -> SimpleNamespace:
        options = {"batch": {"max_batches": 7}}
        transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=options)
        return SimpleNamespace(kv_transfer_config=transfer if connector else None)

    assert batch_config(config("SSDKVConnector")).max_batches == 7
    assert batch_config(config("OtherConnector")) == BatchConfig()
    assert batch_config(config(None)) == BatchConfig()
    here = directory(BatchConfig(), "model")
    assert here.parent == default_root() / "batch"
    assert here != directory(BatchConfig(), "other")
    assert str(directory(BatchConfig(directory="/there"), "model")) == "/there"


def test_what_batches_log_goes_the_way_of_vllms_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connector does the same in its own processes, but none of it is in an API server's."""
    ours, theirs = logging.getLogger("vllm_ssdkv"), logging.getLogger("vllm")
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(ours, name, getattr(ours, name))
    ours.handlers = []
    monkeypatch.setattr(theirs, "handlers", [logging.NullHandler()])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(
            kv_transfer_config=None,
            model_config=SimpleNamespace(
                model="m", max_model_len=2048, supports_multimodal_inputs=False
            ),
            cache_config=SimpleNamespace(num_gpu_blocks=0),
            scheduler_config=SimpleNamespace(policy="fcfs", max_num_seqs=8),
        )
    )
    state: Any = SimpleNamespace()
    args: Any = SimpleNamespace(api_key=["a", "b", ""])
    asyncio.run(BatchPlugin().init_state(cast("Any", engine), state, args))
    getattr(state, STATE).database.close()
    assert ours.handlers == theirs.handlers


def test_a_local_model_is_known_by_its_real_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for place in ("a", "b"):
        (tmp_path / place / "model").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / place)
        found[place] = directory(BatchConfig(), "./model")
    assert found["a"] != found["b"]
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "link" / "model")
    for name in (tmp_path / "a" / "model", tmp_path / "link" / "model", "../model/", "."):
        assert directory(BatchConfig(), str(name)) == found["a"]
    # A name of the hub is the same everywhere.
    named = directory(BatchConfig(), "owner/model")
    monkeypatch.chdir(tmp_path)
    assert directory(BatchConfig(), "owner/model") == named


# --- what no line may cost


@pytest.mark.parametrize(
    ("request_type", "body", "where"),
    [
        (ChatCompletionRequest, {"messages": [{}] * 100_000}, "messages.0"),
        (ChatCompletionRequest, {"messages": [1] * 100_000}, "messages.0"),
        (ChatCompletionRequest, {"messages": [], "tools": [{}] * 100_000}, "tools.0"),
        (ChatCompletionRequest, {"messages": [], "documents": [{"a": 1}] * 100_000}, "documents.0"),
        (CompletionRequest, {"prompt": [*range(200_000), "x"]}, "prompt."),
        (EmbeddingRequest, {"input": [{}] * 100_000}, "input."),
        (CompletionRequest, {"prompt": "x", "logit_bias": {"x" * 9999: "x"}}, "logit_bias."),
    ],
)
def test_a_request_that_is_wrong_a_hundred_thousand_times_is_told_so_once(
    request_type: Any,  # noqa: ANN401
    body: dict[str, Any],
    where: str,
) -> None:
    """Pydantic makes an error of each item and type: of these, 30 MB to 400 MB of text."""
    begun = time.process_time()
    with pytest.raises(ValidationError) as refused:
        fail_fast(request_type).validate_python(body)
    assert refused.value.error_count() < 50
    answer = create_error_response(brief(refused.value))
    assert time.process_time() - begun < 2
    assert (answer.error.code, answer.error.type) == (400, "BadRequestError")
    assert answer.error.message.startswith(where)
    assert len(answer.error.message) < 1500


def test_what_is_right_stays_so() -> None:
    """The validator is vLLM's own but for where it ends."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}] * 9, "n": 2}
    ours = fail_fast(ChatCompletionRequest).validate_python(body)
    assert isinstance(ours, ChatCompletionRequest)
    assert ours.model_dump() == {
        **ChatCompletionRequest.model_validate(body).model_dump(),
        "request_id": ours.request_id,
    }


PATHS = "/a-" * 100_000
"""vLLM looks for paths in errors, for a time that grows with the cube of the length."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(PATHS), 400),
        (VLLMValidationError(PATHS, parameter="p", value=PATHS), 400),
        (VLLMValidationError("short", parameter="p", value=PATHS), 400),
        (VLLMNotFoundError(PATHS), 404),
        (VLLMUnprocessableEntityError(PATHS), 422),
        (GenerationError(PATHS), 500),
        (RetryableRequestError(PATHS), 503),
        (GracefulHTTPError(PATHS, HTTPStatus.SERVICE_UNAVAILABLE), 503),
        (TemplateError(PATHS), 400),
        (KeyError(PATHS), 500),
        (UnicodeDecodeError("utf-8", PATHS.encode(), 0, 1, PATHS), 400),
    ],
)
def test_errors_of_vllm_are_short_and_keep_their_status(error: Exception, code: int) -> None:
    begun = time.process_time()
    answer = create_error_response(brief(error))
    assert time.process_time() - begun < 2
    assert answer.error.code == code
    assert 10 < len(answer.error.message) < 2500


def test_between_two_requests_that_take_long_to_check_others_have_a_turn() -> None:
    """vLLM tries each part of a message as any of twenty types."""
    parts = [{"role": "user", "content": ["x"] * 10_000}]
    at: list[int] = []
    turns = 0

    async def answer(_: ChatCompletionRequest) -> Response:
        at.append(turns)
        return Response(b"{}")

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def ask(endpoints: Endpoints) -> None:
        other = asyncio.create_task(others())
        body = {"model": "m", "messages": parts}
        await asyncio.gather(*(endpoints.answer(CHAT, dict(body)) for _ in range(4)))
        other.cancel()

    engine = SimpleNamespace(
        errored=False,
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(policy="fcfs")),
    )
    chat = SimpleNamespace(create_chat_completion=answer)
    state = cast("Any", SimpleNamespace(openai_serving_chat=chat))
    asyncio.run(ask(Endpoints(state, cast("Any", engine))))
    assert all(later - earlier > 100 for earlier, later in itertools.pairwise(at))


def test_a_short_error_is_as_it_was() -> None:
    error = VLLMValidationError("it is too long", parameter="p", value=7)
    assert brief(error) is error


def test_the_server_tells_its_keys_and_what_a_line_may_ask() -> None:
    def keys(given: list[str] | None) -> int:
        return api_keys(cast("Any", SimpleNamespace(api_key=given)))

    assert (keys(None), keys([]), keys(["a"]), keys(["a", "b", "a", ""])) == (0, 0, 1, 2)
    source = inspect.getsource(register)
    assert "[key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]" in source

    def found(context: int, images: bool) -> Limits:
        model = SimpleNamespace(max_model_len=context, supports_multimodal_inputs=images)
        return limits(cast("Any", SimpleNamespace(model_config=model)), 7)

    assert found(2048, images=False).text == 384 * KIB
    assert found(100_000, images=False).text == 3_200_000
    assert found(100_000, images=True).text is None
    assert found(2048, images=True) == Limits(None, 7, 8 * KIB, 2048, 256 * MIB)


# --- the engine


def test_the_load_is_in_vllms_own_metrics() -> None:
    source = inspect.getsource(PrometheusStatLogger)
    for name in (WAITING, RUNNING, USED):
        assert f'"{name}"' in source
    assert WAITING_REASON_CAPACITY == "capacity"
    assert "num_waiting_reqs=num_waiting - num_deferred" in inspect.getsource(Scheduler.make_stats)
    registry = CollectorRegistry()
    waiting = Gauge(WAITING, "", ["engine", "reason"], registry=registry)
    running = Gauge(RUNNING, "", ["engine"], registry=registry)
    assert load_of(registry.collect()) is None
    used = Gauge(USED, "", ["engine"], registry=registry)
    for engine in ("0", "1"):
        waiting.labels(engine, "capacity").set(2)
        waiting.labels(engine, "deferred").set(50)
        running.labels(engine).set(3)
        used.labels(engine).set(0.25 if engine == "0" else 0.75)
    Gauge("vllm:other", "", registry=registry).set(9)
    assert load_of(registry.collect()) == Load(waiting=4, running=6, used=0.5)


def kv(blocks: int | None, concurrency: float | None, longest: int, engines: int = 1) -> Any:  # noqa: ANN401
    return kv_cache(
        cast(
            "Any",
            SimpleNamespace(
                cache_config=SimpleNamespace(
                    num_gpu_blocks=blocks, block_size=16, kv_cache_max_concurrency=concurrency
                ),
                model_config=SimpleNamespace(max_model_len=longest),
                parallel_config=SimpleNamespace(data_parallel_size=engines),
            ),
        )
    )


def test_kv_is_counted_as_requests_take_it() -> None:
    for name in ("num_gpu_blocks", "block_size", "kv_cache_max_concurrency"):
        assert name in CacheConfig.__dataclass_fields__
    # One group of layers: a thousand blocks of 16 tokens are eight contexts of 2,000.
    assert kv(1000, 8.0, 2000) == KVCache(16_000, 2000)
    # Two groups: as many blocks for four.
    assert kv(1000, 4.0, 2000) == KVCache(8000, 2000)
    # A window of 500 tokens is all that a request of 100,000 keeps.
    assert kv(1000, 32.0, 100_000) == KVCache(16_000, 500)
    assert kv(1000, 8.0, 2000, engines=2) == KVCache(32_000, 2000)
    assert kv(0, None, 2000) is None


def test_an_end_that_nobody_asked_for_is_a_death() -> None:
    pool = ThreadPoolExecutor(1)
    client = SimpleNamespace(
        errored=False,
        renderer=SimpleNamespace(_executor=pool),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=0)),
    )
    engine = VllmEngine(cast("Any", client))
    assert not engine.died
    client.errored = True
    assert engine.died
    # A server that is told to end first ends what renders prompts, and then the engine.
    pool.shutdown()
    assert not engine.died
    source = inspect.getsource(AsyncLLM.shutdown)
    assert source.index("renderer.shutdown()") < source.index("engine_core.shutdown(")
    assert "engine_client.shutdown" in inspect.getsource(launcher)
