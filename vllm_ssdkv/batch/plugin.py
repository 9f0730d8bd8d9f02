"""vLLM entry point ``vllm.endpoint_plugins``: the Batch API on ``vllm serve``.

Follows ``vllm.plugins.endpoint_plugins.interface`` of vLLM 0.32. Loaded only when ``VLLM_PLUGINS``
names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from vllm import envs

from vllm_ssdkv.base.host import default_root
from vllm_ssdkv.base.log import show_log
from vllm_ssdkv.base.sizes import KIB, MIB
from vllm_ssdkv.batch.api_error import ApiError, respond
from vllm_ssdkv.batch.heap import return_large
from vllm_ssdkv.batch.prometheus import server_counters
from vllm_ssdkv.batch.request import Limits
from vllm_ssdkv.batch.room import Room
from vllm_ssdkv.batch.routes import STATE, router
from vllm_ssdkv.batch.runner import Runner
from vllm_ssdkv.batch.service import open_service
from vllm_ssdkv.batch.users import STATE as USERS
from vllm_ssdkv.batch.users import CountUsers, Users
from vllm_ssdkv.config.batch import BatchConfig
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.names import CONNECTOR

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient

logger = logging.getLogger(__name__)

RUNNER: Final = "ssdkv_batch_runner"
"""Name of the :class:`Runner` in the app's state."""


STOP_S: Final = 30.0
"""Time that a server which ends waits for the runner's work in progress."""
LEAST_TEXT: Final = 384 * KIB
"""Tokens that a prompt may have in any case: some are to be truncated."""
MAX_BYTES_PER_TOKEN: Final = 32
"""Maximum for a whole prompt. Four are usual; single tokens, such as many blanks, may have more."""
IMAGES_UNDER_WAY: Final = 256 * MIB
"""Lines of images are long, and decoded one at a time."""
MAX_LOGPROBS: Final = 8 * KIB
"""Maximum of one request; vLLM takes up to fifty microseconds for each."""


class BatchPlugin:
    """One per API server process."""

    name = "ssdkv_batch"
    required_tasks = ("generate", "embed")

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and run the batches while the server runs."""
        app.include_router(router)
        app.add_exception_handler(ApiError, respond)
        app.add_middleware(CountUsers)
        inner = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            async with inner(app) as state, running(app.state):
                yield state

        app.router.lifespan_context = lifespan

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Open the directory of the jobs.

        Raises:
            ConfigError: an option is wrong.
            OSError, StoreError: the directory cannot be used. Either ends the start.
        """
        from vllm_ssdkv.batch.endpoints import Endpoints
        from vllm_ssdkv.batch.engine import VllmEngine

        if engine_client is None:
            return  # a server without an engine: the routes say that there is no batch API
        show_log()
        return_large()
        vllm_config = engine_client.vllm_config
        config = batch_config(vllm_config)
        endpoints = Endpoints(state, engine_client)
        engine = VllmEngine(engine_client)
        place = directory(config, str(vllm_config.model_config.model))
        service = await asyncio.to_thread(
            open_service, place, config, endpoints.supported, keys=api_keys(args)
        )
        users_first = endpoints.by_priority
        concurrency = config.concurrency or max(1, endpoints.seats // (1 if users_first else 2))
        share = config.kv_share or (1.0 if users_first else 0.5)
        counters = server_counters()
        runner = Runner(
            service,
            endpoints,
            concurrency,
            counters,
            engine=engine,
            room=Room(engine.kv, share, users_first=users_first),
            limits=limits(vllm_config, concurrency),
        )
        setattr(state, STATE, service)
        setattr(state, USERS, await asyncio.to_thread(Users, place, engine, counters))
        setattr(state, RUNNER, runner)
        logger.info(
            "batches: in %s; %d requests at a time, %.0f %% of KV; %s",
            place,
            concurrency,
            100 * share,
            ", ".join(sorted(endpoints.supported)),
        )


def batch_config(vllm_config: VllmConfig) -> BatchConfig:
    """The options of this server: those given to our connector, else the defaults.

    Raises:
        ConfigError: one is wrong.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return BatchConfig()
    return SSDKVConfig.from_extra_config(transfer.kv_connector_extra_config).batch


def api_keys(args: Namespace) -> int:
    """The number of keys that the server takes, as vLLM's middleware finds them."""
    return len({key for key in (args.api_key or [envs.VLLM_API_KEY]) if key})


def limits(vllm_config: VllmConfig, concurrency: int) -> Limits:
    """Limits of a line on this server.

    A text that has more bytes per token than any language cannot fit into the model's context;
    what images take is another matter.
    """
    context = int(vllm_config.model_config.max_model_len)
    found = Limits(answers=concurrency, logprobs=MAX_LOGPROBS, context=context)
    if vllm_config.model_config.supports_multimodal_inputs:
        return replace(found, under_way=IMAGES_UNDER_WAY)
    return replace(found, text=max(LEAST_TEXT, MAX_BYTES_PER_TOKEN * context))


def directory(config: BatchConfig, model: str) -> Path:
    """Directory of the jobs of a model's server."""
    if config.directory is not None:
        return Path(config.directory)
    if os.path.exists(model):  # "./model" is another one elsewhere, and has other names, too
        model = os.path.realpath(model)
    return default_root() / "batch" / hashlib.sha256(model.encode()).hexdigest()[:16]


@contextlib.asynccontextmanager
async def running(state: State) -> AsyncIterator[None]:
    """Run the batches of an app while the block lasts."""
    runner: Runner | None = getattr(state, RUNNER, None)
    if runner is None:
        yield
        return
    task = asyncio.create_task(runner.run())
    task.add_done_callback(_log_end)
    try:
        yield
    finally:
        task.cancel()
        _, late = await asyncio.wait([task], timeout=STOP_S)
        if late:
            logger.error("batches: running did not end in %g s; the next start goes on", STOP_S)
        getattr(state, STATE).database.close()
        getattr(state, USERS).close()


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("batches: running has ended; restart the server", exc_info=error)
