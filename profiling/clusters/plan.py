"""Plan of a recording: the model, its documents, and the size of what will be kept."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.recall import recall


@dataclass(frozen=True, slots=True)
class Document:
    """A text to record, or a conversation with the demo's model.

    Attributes:
        path: Of a text file, empty for a task.
        task: Of the demo's model, empty for a text.
    """

    name: str
    path: str = ""
    task: str = ""

    @classmethod
    def of(cls, text: str) -> Document:
        """The task or file that a person named.

        Raises:
            BenchError: there is no such file.
        """
        if text in recall.TASKS:
            return cls(text, task=text)
        path = Path(text).expanduser().absolute()
        if not path.is_file():
            tasks = ", ".join(recall.TASKS)
            raise BenchError(f"--document {text}: neither a file nor one of {tasks}")
        return cls(path.stem, path=str(path))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model's attention, by its ``config.json``."""

    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    positions: int

    @classmethod
    def read(cls, model: Path) -> ModelShape:
        """The shape of a model directory.

        Raises:
            BenchError: ``config.json`` is missing or does not tell it.
        """
        path = model / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            heads = int(config["num_attention_heads"])
            return cls(
                int(config["num_hidden_layers"]),
                heads,
                int(config.get("num_key_value_heads") or heads),
                int(config.get("head_dim") or int(config["hidden_size"]) // heads),
                int(config["max_position_embeddings"]),
            )
        except OSError as error:
            raise BenchError(f"--model: {path} cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BenchError(
                f"--model: {path} does not tell layers, heads and positions ({error!r}); give the "
                "directory of a decoder with attention of one size in all layers"
            ) from error

    def spread(self, count: int) -> list[int]:
        """Numbers of so many layers, evenly from the first to the last."""
        if count >= self.layers:
            return list(range(self.layers))
        return sorted({round(x) for x in np.linspace(0, self.layers - 1, count).tolist()})


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """One engine's life: all documents that are missing, one after the other.

    Attributes:
        model: Path of the model's directory.
        directory: Of the traces.
        store: Of the KV, removed afterwards.
        layers: Numbers of those that are recorded.
        tokens: Of each document, decode steps included.
        prompt: Queries of the prompt's end that are kept.
        steps: Decode steps; the document's own next token is forced in each.
    """

    model: str
    directory: str
    store: str
    documents: tuple[Document, ...]
    layers: tuple[int, ...]
    tokens: int
    prompt: int
    steps: int

    @classmethod
    def from_json(cls, text: str) -> RecordPlan:
        """The plan that :meth:`to_json` wrote."""
        fields = json.loads(text)
        documents = tuple(Document(**one) for one in fields["documents"])
        return cls(**{**fields, "documents": documents, "layers": tuple(fields["layers"])})

    def to_json(self) -> str:
        """As text, for the command line."""
        return json.dumps(asdict(self))

    def settings(self) -> dict[str, Any]:
        """Settings that all traces of a directory have in common.

        The model by the name of its directory, whose place on this machine is nobody's matter.
        """
        return {
            "model": Path(self.model).name,
            "layers": list(self.layers),
            "tokens": self.tokens,
            "prompt": self.prompt,
            "steps": self.steps,
        }

    def bytes_per_document(self, shape: ModelShape) -> int:
        """Size of a trace's arrays."""
        rows = shape.kv_heads * self.tokens + shape.query_heads * (self.prompt + self.steps)
        return 2 * len(self.layers) * rows * shape.head_size
