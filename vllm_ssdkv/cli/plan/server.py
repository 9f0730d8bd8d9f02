"""Counts of a running server's requests."""

from __future__ import annotations

import math

from vllm_ssdkv.cli.monitor.metrics_scrape import Scrape, fetch, page_url
from vllm_ssdkv.profiling.sizing.workload import Counted, Workload, of_counted


def of_server(url: str, *, at_a_time: int | None) -> Workload:
    """Requests as a server counted them since its start.

    Raises:
        ScrapeError: it cannot be reached, or is no vLLM.
        ConfigError: it has answered nothing yet.
    """
    page = page_url(url)
    return of_counted(counted(fetch(page, ours=False)), page, at_a_time=at_a_time)


def counted(page: Scrape) -> Counted:
    """The counts of a page; all engines together."""
    prompts, outputs = "vllm:request_prompt_tokens", "vllm:request_generation_tokens"
    found = page.total("vllm:prefix_cache_hits_total")
    found += page.total("vllm:external_prefix_cache_hits_total")
    asked = page.total("vllm:prefix_cache_queries_total")
    running = page.total("vllm:num_requests_running") + page.total("vllm:num_requests_waiting")
    return Counted(
        prompts=page.total(f"{prompts}_count"),
        prompt_tokens=page.total(f"{prompts}_sum"),
        outputs=page.total(f"{outputs}_count"),
        output_tokens=page.total(f"{outputs}_sum"),
        longest_prompt=_longest(page, prompts),
        longest_output=_longest(page, outputs),
        asked=asked or page.total("vllm:external_prefix_cache_queries_total"),
        found=found,
        running=round(running),
    )


def _longest(page: Scrape, histogram: str) -> float:
    """Upper end of the highest bucket that holds something; 0 where that is none.

    vLLM's ends are 1, 2, 5, 10 and so on; the last one that is named is below the server's limit,
    and what is longer is in the next one.
    """
    counts: dict[float, float] = {}
    for labels, value in page.series(f"{histogram}_bucket"):
        end = float(labels["le"])
        counts[end] = counts.get(end, 0.0) + value
    total = max(counts.values(), default=0.0)
    ends = sorted(end for end in counts if math.isfinite(end))
    if not total or not ends:
        return 0.0
    last = ends[-1]
    beyond = last * (2.5 if str(last).startswith("2") else 2.0)
    return next((end for end in ends if counts[end] >= total), beyond)
