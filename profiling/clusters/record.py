"""A real engine in page mode whose queries and keys are recorded, in a process of its own.

Its events: ``progress`` now and then, ``part`` with each finished document, ``result`` at the end.

Each attention layer of the model gets a :class:`RecordingAttention` in the place of its own, which
hands on every call. So what is recorded is what the plugin's attention was given, and neither the
plugin nor vLLM knows of it. Attention is exact.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.clusters.plan import Document, RecordPlan
from vllm_ssdkv.profiling.clusters.trace import PAGE, WINDOW, Manifest, Trace
from vllm_ssdkv.profiling.forced_decode import FORCED, FORCINGS, ForcedDecode, Forcing
from vllm_ssdkv.profiling.recall import recall
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.recall.run import BLOCK_TOKENS
from vllm_ssdkv.profiling.rig.child_process import Tell, serve
from vllm_ssdkv.profiling.rig.engine import ONE_PROCESS, Engine, Request, transfer_config
from vllm_ssdkv.profiling.rig.page_engine import CHUNK, STAGING

_PROGRESS_STEPS: Final = 16


class Recorder:
    """Queries and keys of one document, by layer and position. Used by the forward pass's thread.

    Attributes:
        query: float16 [layers, query heads, queries, size].
        key: float16 [layers, KV heads, tokens, size].
    """

    def __init__(self, layers: int, tokens: int, queries: int):
        self._tokens = tokens
        self._first = tokens - queries
        self._layers = layers
        self.query = np.empty((0, 0, 0, 0), np.float16)
        self.key = np.empty((0, 0, 0, 0), np.float16)
        self._seen = np.zeros((layers, tokens), np.bool_)
        self.scale = 0.0

    def take(self, layer: int, first: int, query: torch.Tensor, key: torch.Tensor) -> None:
        """Keep the queries [T, Hq, D] and keys [T, Hkv, D] of tokens from ``first`` on."""
        if not self.query.size:
            queries = self._tokens - self._first
            size = query.shape[2]
            self.query = np.zeros((self._layers, query.shape[1], queries, size), np.float16)
            self.key = np.zeros((self._layers, key.shape[1], self._tokens, size), np.float16)
        end = min(first + len(key), self._tokens)
        kept = max(first, self._first)
        self.key[layer, :, first:end] = _by_head(key[: end - first])
        if kept < end:
            rows = _by_head(query[kept - first : end - first])
            self.query[layer, :, kept - self._first : end - self._first] = rows
        self._seen[layer, first:end] = True

    def require_all(self) -> None:
        """Raise BenchError unless every token of every layer was seen, with finite values."""
        if not self._seen.all():
            raise BenchError(f"the engine left out {int((~self._seen).sum())} tokens of layers")
        if not (np.isfinite(self.query).all() and np.isfinite(self.key).all()):
            raise BenchError("queries or keys are beyond the range of float16")


def _by_head(values: torch.Tensor) -> NDArray[np.float16]:
    """[T, H, D] to [H, T, D]."""
    rows: NDArray[np.float16] = values.detach().cpu().to(torch.float16).numpy().swapaxes(0, 1)
    return rows


class RecordingAttention:
    """Attention of a layer that shows a recorder what it is given, and does what ``inner`` does."""

    def __init__(self, inner: Any, layer: int):  # noqa: ANN401 - vLLM's attention of any backend
        self.inner = inner
        self.layer = layer
        self.recorder: Recorder | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever vLLM asks for
        return getattr(self.inner, name)

    def forward(
        self,
        layer: Any,  # noqa: ANN401 - vLLM's
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,  # noqa: ANN401 - PagedMetadata
        *rest: Any,  # noqa: ANN401 - as above
        **more: Any,  # noqa: ANN401 - as above
    ) -> Any:  # noqa: ANN401 - as above
        """See vLLM. Steps without rows, as in warm-ups, are not recorded."""
        out = self.inner.forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)
        rows = None if attn_metadata is None else attn_metadata.rows
        if self.recorder is not None and rows is not None:
            count = attn_metadata.num_actual_tokens
            size = self.inner.head_size
            self.recorder.take(
                self.layer,
                int(rows.first_position[0]),
                query[:count].view(count, -1, size),
                key[:count].view(count, -1, size),
            )
        return out


def record(plan: RecordPlan, tell: Tell) -> None:
    """Record all documents of the plan; each is in the manifest as soon as it is whole."""
    engine = Engine(**_engine_settings(plan))
    attention = _attach(engine, plan)
    directory = Path(plan.directory)
    manifest = Manifest.read(directory) or Manifest(plan.settings())
    for number, document in enumerate(plan.documents):
        prompt, forced = _tokens(engine, document, plan)
        recorder = Recorder(len(plan.layers), plan.tokens, plan.prompt + plan.steps)
        for one in attention:
            one.recorder = recorder
        _run(engine, document.name, prompt, forced, tell)
        recorder.require_all()
        counted = len(prompt) - plan.prompt if document.task else len(prompt) - WINDOW
        trace = Trace(
            document.name,
            recorder.query,
            recorder.key,
            np.array(plan.layers, np.int64),
            counted // PAGE * PAGE,
            plan.prompt,
            float(attention[0].inner.scale),
        )
        part = trace.write(directory)
        manifest.parts[document.name] = part
        manifest.write(directory)
        tell("part", number=number, part=asdict(part))
    engine.close()
    tell("result")


def _engine_settings(plan: RecordPlan) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``: one request at a time, its whole KV in DRAM."""
    per_token = bytes_per_token(Path(plan.model))
    content = plan.tokens * per_token
    options = {
        "mode": "page",
        "devices": [{"path": plan.store, "capacity": 6 * content + 64 * MIB, "weight": 1}],
        "dram_gib": f"{STAGING + 256 * MIB + 3 * content}B",
        "hbm_window_tokens": WINDOW,
        "selector": "exact",
        "io": {"staging": STAGING},
    }
    return {
        "model": plan.model,
        "max_model_len": plan.tokens + 1,
        "block_size": BLOCK_TOKENS,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": (WINDOW + CHUNK + 2 * BLOCK_TOKENS) * per_token,
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        "logits_processors": [ForcedDecode],
        **transfer_config(options),
    }


def _attach(engine: Engine, plan: RecordPlan) -> list[RecordingAttention]:
    """Put a recording attention into each layer that the plan names.

    Raises:
        BenchError: the model has other layers than its configuration says.
    """
    config = engine.core.vllm_config
    layers = list(get_layers_from_vllm_config(config, AttentionLayerBase).values())
    if max(plan.layers) >= len(layers):
        raise BenchError(f"the engine has {len(layers)} attention layers, not {max(plan.layers)}")
    made = []
    for number, layer in enumerate(plan.layers):
        recording = RecordingAttention(layers[layer].impl, number)
        layers[layer].impl = recording
        made.append(recording)
    return made


def _tokens(engine: Engine, document: Document, plan: RecordPlan) -> tuple[list[int], list[int]]:
    """Prompt of a document, and the tokens that follow it.

    Raises:
        BenchError: the file is too short or no text.
    """
    turns = plan.prompt + plan.steps
    if document.task:
        task: Any = document.task
        context, asked = recall.conversation(task, plan.tokens - turns, turns, seed=0)
        ids = [*context.tolist(), *asked.tolist()]
    else:
        try:
            text = Path(document.path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise BenchError(f"{document.path} cannot be read: {error.strerror}") from error
        # As many as are wanted, and no more: tokens are bytes at least.
        ids = engine.llm.get_tokenizer().encode(text[: 32 * plan.tokens])[: plan.tokens]
    if len(ids) < plan.tokens:
        raise BenchError(
            f"{document.path} has {len(ids)} tokens, not {plan.tokens}: take a longer text, or set "
            "--tokens"
        )
    return ids[: -plan.steps], ids[-plan.steps :]


def _run(engine: Engine, name: str, prompt: list[int], forced: list[int], tell: Tell) -> None:
    """Compute a prompt, and a decode step for each forced token."""
    FORCINGS[name] = Forcing((*forced, forced[-1]))
    # An answer's last token is fed to nothing: one more is asked for than are to be decoded.
    asked = Request(name, prompt, len(forced) + 1, {FORCED: name}, detokenize=False)
    for steps, _ in enumerate(engine.steps([asked]), 1):
        if steps % _PROGRESS_STEPS == 1:
            done = min(1.0, steps / (-(-len(prompt) // CHUNK) + len(forced)))
            tell("progress", document=name, done=done)


def main(plan: str, tell: Tell) -> None:
    """Record by a plan that is JSON."""
    os.environ.update(ONE_PROCESS)  # the recorder sees what the engine does
    try:
        record(RecordPlan.from_json(plan), tell)
    except BenchError as error:
        tell("refused", reason=str(error))
        raise SystemExit(1) from error


if __name__ == "__main__":
    serve(main)
