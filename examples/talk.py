"""Conversations with a running `vllm serve`: the tokens of each turn that it did not compute.

    python examples/talk.py --users 4 --turns 3 [--document FILE] [--url http://HOST:8000/v1]

Each user's conversation begins with the text of FILE, if there is one, and then has turns of
--words words. Start the server with `--enable-prompt-tokens-details`.
"""

import argparse
import os
import time
from pathlib import Path

from openai import OpenAI

from vllm_ssdkv.profiling.recall import recall


def main() -> None:
    parser = argparse.ArgumentParser()
    url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    parser.add_argument("--url", default=url)
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--words", type=int, default=600, help="those that a user says in a turn")
    parser.add_argument("--document", type=Path, help="text that each conversation begins with")
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.url, api_key="none", timeout=600.0)
    model = client.models.list().data[0].id
    text = arguments.document.read_text() + "\n" if arguments.document else ""
    words = arguments.words
    talks = [[{"role": "user", "content": text}] for _ in range(arguments.users)]
    prompts = found = 0
    waited = 0.0
    for turn in range(arguments.turns):
        for user, talk in enumerate(talks):
            said = recall.ask("multikey", max(1024, words), seed=turn * arguments.users + user)
            talk[-1]["content"] += recall.text(said.prompt[-words:])
            started = time.monotonic()
            first = 0.0
            answer = ""
            for part in client.chat.completions.create(
                model=model,
                messages=talk,
                max_tokens=16,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            ):
                first = first or time.monotonic() - started
                if part.choices:
                    answer += part.choices[0].delta.content or ""
                elif part.usage:
                    details = part.usage.prompt_tokens_details
                    cached = (details.cached_tokens if details else 0) or 0
                    prompts += part.usage.prompt_tokens
                    found += cached
                    print(f"turn {turn}, user {user}: {part.usage.prompt_tokens} tokens,", end=" ")
                    print(f"{cached} found, first token after {first:.2f} s")
            waited += first
            talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": ""}]
    mean = waited / (arguments.turns * arguments.users)
    print(f"{found} of {prompts} tokens found, first token after {mean:.2f} s on average")


if __name__ == "__main__":
    main()
