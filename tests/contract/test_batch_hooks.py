"""What the Batch API uses of vLLM's OpenAI server, pinned one by one."""

from __future__ import annotations

import asyncio
import inspect
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.responses import Response
from vllm.entrypoints.launchers import run_batch
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo
from vllm.plugins import ENDPOINT_PLUGINS_GROUP
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.renderers.base import BaseRenderer
from vllm.utils.async_utils import make_async
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_ssdkv.batch.answering import AbortedError, NoReplyError
from vllm_ssdkv.batch.answers import Reply
from vllm_ssdkv.batch.endpoints import Endpoints
from vllm_ssdkv.batch.lines import CHAT
from vllm_ssdkv.batch.plugin import BatchPlugin, batch_config, directory
from vllm_ssdkv.batch.routes import STATE
from vllm_ssdkv.config_batch import BatchConfig
from vllm_ssdkv.host import default_root


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
            model_config=SimpleNamespace(model="m"),
            scheduler_config=SimpleNamespace(policy="fcfs", max_num_seqs=8),
        )
    )
    state: Any = SimpleNamespace()
    asyncio.run(BatchPlugin().init_state(cast("Any", engine), state, cast("Any", None)))
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
