"""The ``batch`` group of options: limits of the Files and Batches API of ``vllm serve``."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from vllm_ssdkv.base.sizes import GIB, KIB, MIB, SIZE_TEXT, parse_size
from vllm_ssdkv.config.schema import PATH_TEXT, Allowed, OptionModel, PathText, Reason


class BatchConfig(OptionModel):
    """Place of batch jobs, and their limits. Only the batch plugin reads it."""

    directory: Annotated[
        PathText | None,
        Allowed(PATH_TEXT),
        Field(
            description="Directory of the batch jobs and of the files of `/v1/files` "
            "(docs/batch.md). Created with mode 0700 if missing. Servers that share it share "
            "their jobs, so they must serve the same models."
        ),
        Reason(
            "null: one per model below $XDG_CACHE_HOME/ssdkv/batch (~/.cache/ssdkv/batch), so "
            "that a first try needs no option and no server runs another one's jobs."
        ),
    ] = None
    capacity: Annotated[
        int,
        Field(
            ge=MIB,
            description="Bytes that uploaded files and results may take together, and lines of "
            "batches in progress, 64 each. When it is used up, uploads are refused, and batches "
            "end with the results that they have.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(parse_size),
        Reason("Holds some twenty of the largest files that are accepted, and their results."),
    ] = 10 * GIB
    key_share: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="Share of `capacity`, of `max_batches` that have not ended, and of uploads "
            "and downloads at a time, that one API key may take.",
        ),
        Reason(
            "null: divided evenly among the server's API keys, so that none can take what is "
            "another one's. More is right where few of many keys are used."
        ),
    ] = None
    max_file: Annotated[
        int,
        Field(ge=KIB, description="Bytes of one uploaded file."),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(parse_size),
        Reason("The limit that OpenAI states, rounded up."),
    ] = 256 * MIB
    max_requests: Annotated[
        int,
        Field(ge=1, le=10_000_000, description="Requests in one batch."),
        Reason("The limit that OpenAI states; each request takes about 200 bytes of memory once."),
    ] = 50_000
    max_batches: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            description="Batches that are remembered, ended ones included. A new one takes the "
            "place of the oldest ended one of the API key that has the most batches. It is refused "
            "when none has ended, or only of keys that have no more batches than its own has "
            "unended.",
        ),
        Reason("A batch an hour for six weeks; a batch that has ended takes less than 2 KiB."),
    ] = 1_000
    concurrency: Annotated[
        int | None,
        Field(ge=1, le=65536, description="Requests of batches that run at a time."),
        Reason(
            "null: half of vLLM's max_num_seqs, so that a request of a user who waits finds a "
            "seat; with --scheduling-policy priority all of it, as batches then have the lowest "
            "priority."
        ),
    ] = None
    kv_share: Annotated[
        float | None,
        Field(gt=0, le=1, description="Share of vLLM's KV that requests of batches may take."),
        Reason(
            "null: half, as of the seats, so that a request of a user who waits finds room; with "
            "--scheduling-policy priority all of it."
        ),
    ] = None
