"""A question with a long context to a running `vllm serve`, through OpenAI's client.

    python examples/serve_client.py [--url http://127.0.0.1:8000/v1]

See README.md next to this file for how to start the server.
"""

import argparse
import time

from openai import OpenAI

from vllm_ssdkv.profiling.recall import recall


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the context")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another context")
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.url, api_key="none", timeout=600.0)
    model = client.models.list().data[0].id
    question = recall.ask("multikey", arguments.tokens, arguments.seed)
    started = time.monotonic()
    first = None
    answer = ""
    for part in client.completions.create(
        model=model,
        prompt=recall.text(question.prompt),
        max_tokens=len(question.answer),
        temperature=0,
        stream=True,
    ):
        first = first or time.monotonic()
        answer += part.choices[0].text
    print(f"question: {recall.text(question.prompt[-4:])}")
    print(f"answer: {answer.strip()}")
    print(f"the demo model should say: {recall.text(question.answer)}")
    if first is not None:
        print(f"first token after {first - started:.2f} s")


if __name__ == "__main__":
    main()
