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
            "(docs/batch.md). It is created with mode 0700 if missing. Servers that share it "
            "share their jobs, so they must serve the same models."
        ),
        Reason(
            "null: one directory per model below $XDG_CACHE_HOME/ssdkv/batch "
            "(~/.cache/ssdkv/batch), so that a first try needs no option and no server runs the "
            "jobs of another."
        ),
    ] = None
    capacity: Annotated[
        int,
        Field(
            ge=MIB,
            description="Total size of uploaded files and results; each line of a batch in "
            "progress adds 64 bytes. Once it is used up, uploads are refused, and running batches "
            "end with the results that they have.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(parse_size),
        Reason("It holds about twenty files of the maximum size, and their results."),
    ] = 10 * GIB
    key_share: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="Share that one API key may take of `capacity`, of the `max_batches` that "
            "have not ended, and of concurrent uploads and downloads.",
        ),
        Reason(
            "null: each of the server's API keys gets an equal share, so that none can take the "
            "share of another. Raise it where few of many keys are used."
        ),
    ] = None
    max_file: Annotated[
        int,
        Field(ge=KIB, description="Maximum size of one uploaded file."),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(parse_size),
        Reason("The limit that OpenAI states, rounded up."),
    ] = 256 * MIB
    max_requests: Annotated[
        int,
        Field(ge=1, le=10_000_000, description="Maximum number of requests in one batch."),
        Reason("The limit that OpenAI states; each request takes about 200 bytes of memory once."),
    ] = 50_000
    max_batches: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            description="Number of batches that the server remembers, ended ones included. A new "
            "batch replaces the oldest ended one of the API key that has the most batches. It is "
            "refused if none has ended, or if every ended one belongs to a key with no more "
            "batches than its own key has unended.",
        ),
        Reason("1,000: a batch an hour for six weeks; an ended batch takes less than 2 KiB."),
    ] = 1_000
    concurrency: Annotated[
        int | None,
        Field(ge=1, le=65536, description="Maximum number of concurrent batch requests."),
        Reason(
            "null: half of vLLM's max_num_seqs, so that an interactive request can start at once. "
            "With --scheduling-policy priority it is all of max_num_seqs, as batches then have "
            "the lowest priority."
        ),
    ] = None
    kv_share: Annotated[
        float | None,
        Field(gt=0, le=1, description="Share of vLLM's KV cache that batch requests may take."),
        Reason(
            "null: half, as for `concurrency`, so that an interactive request finds room; with "
            "--scheduling-policy priority all of it."
        ),
    ] = None
