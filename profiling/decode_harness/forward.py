"""Forward passes of a model, on CUDA as graphs: one a step where attention can be captured, else
graphs that end where a layer's attention begins.

Launching a layer's kernels one by one takes the host longer than the GPU takes to read the layer's
weights. What is captured needs one launch a layer, so a step's time is that of attention and of
weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import torch

from vllm_ssdkv.connector.worker.device_tables import Event
from vllm_ssdkv.profiling.decode_harness.attention import Attention, attention_by


class Graph(Protocol):
    """Work that is captured once, and done at each replay: ``torch.cuda.CUDAGraph``, or another."""

    def capture_begin(self) -> None:
        """Capture what is asked of the device from now on, in place of doing it."""

    def capture_end(self) -> None:
        """The work is complete."""

    def replay(self) -> None:
        """Do the work with what its tensors hold now."""


class PieceOfCUDA:
    """A CUDA graph that shares its memory with the other pieces of a pass.

    Pieces are replayed in the order of their capture: a later one may use what an earlier one has
    freed.
    """

    def __init__(self, pool: Any) -> None:  # noqa: ANN401 - torch's handle
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def capture_begin(self) -> None:
        """Capture the work of this thread; the store's threads go on meanwhile."""
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def capture_end(self) -> None:
        """The work is complete."""
        self._graph.capture_end()

    def replay(self) -> None:
        """Do the work on the current stream."""
        self._graph.replay()


@dataclass(frozen=True, slots=True)
class _Call:
    """Attention of a layer: what the piece before it leaves, and where the next one looks."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    out: torch.Tensor


def plain(
    model: Any,  # noqa: ANN401 - transformers' model
    ids: torch.Tensor,
    positions: torch.Tensor,
    attention: Attention,
) -> torch.Tensor:
    """Logits [R, vocabulary] behind the last of the tokens ``ids`` [R, T], at ``positions``."""
    with attention_by(model, attention), torch.inference_mode():
        out = model(ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    logits: torch.Tensor = out.logits[:, -1]
    return logits


class CapturedForward:
    """The pass of a model over one token of each of R requests, in pieces between attentions, or in
    one piece with an attention that can be captured.

    Example::

        forward = CapturedForward(model, requests=8, graphs=graphs_of(model.device))
        logits = forward(ids, positions, attention)
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - transformers' model
        requests: int,
        graphs: Callable[[], Graph],
        whole: Attention | None = None,
    ) -> None:
        """Capture it; ``graphs`` makes a piece; ``whole`` is captured with the model."""
        shape = requests, 1
        self._ids = torch.zeros(shape, dtype=torch.int64, device=model.device)
        self._positions = torch.zeros_like(self._ids)
        self._pieces: list[Graph] = []
        self._calls: list[_Call] = []
        self._new = graphs
        if model.device.type == "cuda":
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._capture(model, whole)
            current.wait_stream(stream)
        else:
            self._capture(model, whole)

    def _capture(self, model: Any, whole: Attention | None) -> None:  # noqa: ANN401
        # Libraries allocate at their first call, which a capture does not allow.
        plain(model, self._ids, self._positions, whole or _nothing)
        self._begin()
        try:
            self._logits = plain(model, self._ids, self._positions, whole or self._cut)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error counts
                self._pieces[-1].capture_end()
            raise
        self._pieces[-1].capture_end()

    def _begin(self) -> None:
        self._pieces.append(self._new())
        self._pieces[-1].capture_begin()

    def _cut(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        self._pieces[-1].capture_end()
        out = _nothing(module, query, key, value, scale)
        self._calls.append(_Call(module, query, key, value, scale, out))
        self._begin()
        return out

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Logits [R, vocabulary] behind ``ids`` [R, 1], valid until the next call."""
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        with torch.inference_mode():
            for piece, call in zip_longest(self._pieces, self._calls):
                piece.replay()
                if call is not None:
                    found = attention(call.module, call.query, call.key, call.value, call.scale)
                    call.out.copy_(found)
        return self._logits


def _nothing(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Zeros in the shape of attention's output."""
    batch, heads, count, size = query.shape
    return query.new_zeros(batch, count, heads, size)


def graphs_of(device: torch.device) -> Callable[[], Graph] | None:
    """A maker of the pieces of one pass on this device; nothing where there are no graphs."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()
    return lambda: PieceOfCUDA(pool)


def events_of(device: torch.device) -> Callable[[], Event] | None:
    """A maker of marks in the work of this device; nothing where nothing is left to wait for."""
    if device.type != "cuda":
        return None
    made: Callable[[], Event] = torch.cuda.Event
    return made


class Forward:
    """Passes of a model for a decoder.

    They are captured where the device has graphs and each request has one new token. Where that
    fails, kernels are launched one by one, and :attr:`launches` says why.

    Attributes:
        launches: How kernels of the model were launched in the last pass, for people.

    Example::

        forward = Forward(model)
        logits = forward(ids, positions, attention)
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - transformers' model
        self.launches = "one by one"
        self._model = model
        self._graphs = graphs_of(model.device)
        self._captured: dict[tuple[int, bool], CapturedForward] = {}

    @property
    def captures(self) -> bool:
        """Check whether passes can be captured, as far as is known."""
        return self._graphs is not None

    def capture(self, requests: int, whole: Attention) -> None:
        """Capture a pass with its attention, unless that has been done, or fails. The pass is done,
        too."""
        if self._graphs is not None:
            self._capture(requests, self._graphs, whole)

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        whole: Attention | None = None,
    ) -> torch.Tensor:
        """Logits [R, vocabulary] behind the last of ``ids`` [R, T], valid until the next call.

        ``whole``: attention that can be captured, the same one in each call.
        """
        if ids.shape[1] == 1 and self._graphs is not None:
            captured = self._capture(len(ids), self._graphs, whole)
            if captured is not None:
                return captured(ids, positions, attention)
        return plain(self._model, ids, positions, attention)

    def _capture(
        self, requests: int, graphs: Callable[[], Graph], whole: Attention | None
    ) -> CapturedForward | None:
        kind = requests, whole is not None
        if kind not in self._captured:
            # One for each way to attend: a phase that is measured finds its own.
            self._captured = {k: v for k, v in self._captured.items() if k[0] == requests}
            try:
                self._captured[kind] = CapturedForward(self._model, requests, graphs, whole)
            except RuntimeError as error:  # of CUDA, which tells of all that is not permitted so
                self.launches, self._graphs = f"one by one: {error}", None
                return None
        self.launches = "CUDA graphs" if whole is None else "one CUDA graph a step"
        return self._captured[kind]
