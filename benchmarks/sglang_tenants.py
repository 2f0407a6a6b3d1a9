"""What other clients of a server notice while LoRA is trained on it: changed answers, and latency.

python benchmarks/sglang_tenants.py http://127.0.0.1:30000 [--steps 20]

One thread sends greedy requests without an adapter, one after the other: first alone, then during a training run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from importlib import resources

import mezzo

REVIEWS = resources.files("mezzo") / "bundled" / "data" / "reviews"
PROMPTS = [list(range(first, first + 24)) for first in range(100, 1300, 100)]


def ask(url: str, prompt: list[int]) -> tuple[list[int], float]:
    """The greedy continuation of a prompt, and how many milliseconds it took."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        tokens = json.loads(answer.read())["output_ids"]
    return tokens, 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    alone = [ask(given.url, prompt) for prompt in PROMPTS]
    expected = [tokens for tokens, _ in alone]
    during: list[tuple[bool, float]] = []
    done = threading.Event()

    def tenant() -> None:
        while not done.is_set():
            index = len(during) % len(PROMPTS)
            tokens, milliseconds = ask(given.url, PROMPTS[index])
            during.append((tokens == expected[index], milliseconds))

    thread = threading.Thread(target=tenant)
    with tempfile.TemporaryDirectory() as folder:
        thread.start()
        start = time.perf_counter()
        try:
            mezzo.finetune(
                "mezzo/llama-mini",
                engine="sglang",
                url=[given.url],
                task="sst-2",
                train=str(REVIEWS / "train.jsonl"),
                dev=str(REVIEWS / "dev.jsonl"),
                eval_limit=20,
                method="spsa",
                steps=given.steps,
                batch_size=16,
                out=f"{folder}/run",
            )
        finally:
            done.set()
            thread.join()
    changed = sum(not same for same, _ in during)
    before, meanwhile = (statistics.median(times) for times in ([ms for _, ms in alone], [ms for _, ms in during]))
    print(f"{len(during)} requests of another client in {time.perf_counter() - start:.0f} s, {changed} answers changed")
    print(f"median latency {before:.0f} ms alone, {meanwhile:.0f} ms during training")


if __name__ == "__main__":
    main()
