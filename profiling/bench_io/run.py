"""The run: everybody in turns, several times over, medians at the end."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.bench_io.case import Case, Contender, Sample


@dataclass(slots=True)
class Result:
    """All samples of one contender in one case."""

    case: Case
    contender: str
    samples: list[Sample] = field(default_factory=list)
    refused: str | None = None
    """Reason why it does not run this case; it has no samples then."""
    error: str | None = None
    """Error of the run; samples of runs before it are kept, but count for nothing."""

    @property
    def measured(self) -> bool:
        """Check whether its figures mean anything."""
        return bool(self.samples) and self.error is None

    def median(self, figure: Callable[[Sample], float]) -> float:
        """Median of a figure over the samples.

        Raises:
            statistics.StatisticsError: there is none.
        """
        return statistics.median(map(figure, self.samples))


def ratio(result: Result, reference: Result | None) -> float | None:
    """Throughput as a share of the reference's in the same case; None without either."""
    if reference is None or not (result.measured and reference.measured):
        return None
    mine = result.median(lambda sample: sample.bytes_per_s)
    return mine / reference.median(lambda sample: sample.bytes_per_s)


def run_case(
    case: Case, contenders: Sequence[Contender], repeats: int, seconds: float
) -> list[Result]:
    """Check everybody, then measure in turns; each repeat begins with another contender.

    An error of one contender ends its part in this case and is kept in its result.
    """
    results = [
        Result(case, contender.name, refused=contender.refuses(case)) for contender in contenders
    ]
    pairs = [
        (contender, result)
        for contender, result in zip(contenders, results, strict=True)
        if result.refused is None
    ]

    for contender, result in pairs:
        try:
            contender.check(case)
        except BenchError as error:
            result.error = str(error)
    for repeat in range(repeats):
        first = repeat % max(1, len(pairs))
        for contender, result in pairs[first:] + pairs[:first]:
            if result.error is None:
                try:
                    result.samples.append(contender.run(case, seconds))
                except BenchError as error:
                    result.error = str(error)
    return results
