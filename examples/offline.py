"""Offline inference: run it twice, and the second run reads KV instead of computing it.

    python examples/offline.py
    python examples/offline.py --page --device /mnt/nvme0 --device /mnt/nvme1
    python examples/offline.py --node unix:///run/ssdkv/node.sock

Without --device and --node, KV goes to a directory of the model's own in ~/.cache/ssdkv.
"""

import argparse
from typing import Any

from vllm import LLM, SamplingParams

from vllm_ssdkv.profiling.recall import recall


def prompts(file: str | None) -> list[str]:
    """The lines of a file, or four questions for the demo model with 4096 tokens of context."""
    if file is None:
        return [recall.text(recall.ask(task, 4096, seed=0).prompt) for task in recall.TASKS]
    with open(file, encoding="utf-8") as lines:
        return [line.strip() for line in lines if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(recall.MODEL_DIR), help="default: the demo model")
    parser.add_argument("--prompts", help="file with one prompt per line")
    parser.add_argument("--device", action="append", default=[], help="directory on an SSD")
    parser.add_argument("--node", action="append", default=[], help="address of a storage node")
    parser.add_argument("--page", action="store_true", help="contexts may exceed the KV cache")
    arguments = parser.parse_args()

    options: dict[str, Any] = {"mode": "page" if arguments.page else "reuse"}
    if arguments.device:
        options["devices"] = arguments.device
    if arguments.node:
        options |= {"nodes": arguments.node, "replicas": min(2, len(arguments.node))}
    llm = LLM(
        arguments.model,
        kv_transfer_config={
            "kv_connector": "SSDKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        },
        disable_log_stats=False,  # measures the time to the first token
    )
    outputs = llm.generate(prompts(arguments.prompts), SamplingParams(temperature=0, max_tokens=24))
    for output in outputs:
        print(
            f"{len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} from the store, "
            f"first token after {output.metrics.first_token_latency:.2f} s: "
            f"{output.outputs[0].text}"
        )


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
