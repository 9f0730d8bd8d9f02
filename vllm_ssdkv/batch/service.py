"""State of one server that its routes share: configuration, files, jobs, and who asks."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from vllm_ssdkv.batch.database import Database
from vllm_ssdkv.batch.files import Files
from vllm_ssdkv.batch.jobs import Jobs
from vllm_ssdkv.batch.transfers import Transfers
from vllm_ssdkv.config.batch import BatchConfig


@dataclass(frozen=True, slots=True)
class Service:
    """Everything below the HTTP surface but the running.

    Attributes:
        directory: The directory of the jobs, absolute.
        transfers: Uploads and downloads under way in this process.
        endpoints: Endpoints that batches may name.
        wakers: Called when there is something to do; the runner of this process adds itself.
    """

    directory: Path
    config: BatchConfig
    database: Database
    files: Files
    jobs: Jobs
    transfers: Transfers
    salt: bytes
    endpoints: frozenset[str]
    wakers: list[Callable[[], None]] = field(default_factory=list)

    def wake(self) -> None:
        """Tell the runner that there is something to do. On the event loop's thread."""
        for waker in self.wakers:
            waker()

    def owner(self, request: Request) -> bytes:
        """A name for the key that a request came with; the key itself is kept nowhere.

        vLLM has checked the key where the server has keys. Without, each key that clients make up
        still has files of its own.
        """
        _, _, key = request.headers.get("authorization", "").partition(" ")
        return hmac.new(self.salt, key.encode("utf-8", "replace"), hashlib.sha256).digest()


def open_service(
    directory: Path,
    config: BatchConfig,
    endpoints: frozenset[str],
    clock: Callable[[], float] = time.time,
    keys: int = 1,
) -> Service:
    """Open the directory of the jobs, or make it with mode 0700. Blocks on I/O.

    Args:
        directory: Where it is.
        config: Options.
        endpoints: Endpoints that batches may name.
        clock: Seconds since the epoch.
        keys: Number of API keys that the server takes; each has its share, see ``key_share``.

    Raises:
        OSError: it cannot be created.
        StoreError: its database cannot be read.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    database = Database(directory / "jobs.db")
    try:
        row = database.row("SELECT value FROM settings WHERE name = 'salt'")
        share = 1 / max(1, keys) if config.key_share is None else config.key_share
        files = Files(database, directory / "files", config, clock, share)
        return Service(
            directory=directory,
            config=config,
            database=database,
            files=files,
            jobs=Jobs(database, files, config, clock, share),
            transfers=Transfers(share),
            salt=b"" if row is None else bytes(row["value"]),
            endpoints=endpoints,
        )
    except BaseException:
        database.close()
        raise
