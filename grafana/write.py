"""Write the dashboards' JSON: ``python -P -m vllm_ssdkv.grafana.write DIR``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from vllm_ssdkv.grafana.batch import batch
from vllm_ssdkv.grafana.devices import devices
from vllm_ssdkv.grafana.nodes import nodes
from vllm_ssdkv.grafana.overview import overview
from vllm_ssdkv.grafana.sparse import sparse


def dashboards() -> dict[str, str]:
    """File name and text of every dashboard."""
    boards = {
        "overview": overview(),
        "devices": devices(),
        "sparse": sparse(),
        "batch": batch(),
        "nodes": nodes(),
    }
    texts: dict[str, str] = {}
    for name, board in boards.items():
        plain = json.loads(JSONEncoder().encode(board.build()))
        for number, panel in enumerate(plain["panels"], 1):
            panel["id"] = number
        texts[f"{name}.json"] = json.dumps(plain, indent=1, sort_keys=True) + "\n"
    return texts


def main() -> None:
    """Write into the directory that the command line names."""
    parser = argparse.ArgumentParser(description="Write the dashboards' JSON.")
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        help="directory of the dashboards; created if missing",
    )
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in dashboards().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
