"""LoRA on SGLang servers that are already running; several URLs are replicas that share each batch.

python -m sglang.launch_server --model-path MODEL --port 30000 --dtype float32 --enable-lora --max-lora-rank 8 \
    --lora-target-modules q_proj k_proj v_proj --max-loras-per-batch 4
python examples/sglang_server.py http://localhost:30000 [http://other:30000 …]

MODEL is the folder that `mezzo.engines.hf_hub.locate("mezzo/llama-mini")` returns. All prompts begin with the same eight
demonstrations, which SGLang computes once for each sign of a step; its own counters tell how many tokens that saves.
"""

import sys
from importlib import resources

import mezzo
from mezzo.runs.folder import Folder

REVIEWS = resources.files("mezzo") / "bundled" / "data" / "reviews"
DEMONSTRATIONS = """a dull and lifeless film It was terrible
the jokes land every time It was great
badly acted and badly lit It was terrible
I would see it twice It was great
an awful waste of time It was terrible
warm, quick and funny It was great
nobody laughed once It was terrible
the best I saw this year It was great
"""


def main(urls: list[str]) -> None:
    run = mezzo.finetune(
        "mezzo/llama-mini",
        engine="sglang",
        url=urls,
        task="sst-2",
        template=DEMONSTRATIONS + "{text} It was",
        max_length=256,
        train=str(REVIEWS / "train.jsonl"),
        dev=str(REVIEWS / "dev.jsonl"),
        eval_limit=50,
        method="spsa",
        steps=20,
        batch_size=16,
        seed=1,
        out="runs/sglang-server",
    )
    print(run)
    (engine,) = [entry for entry in Folder.open(run.out).metrics() if entry["event"] == "engine"]
    print(f"{engine['cached_tokens']} tokens came from the prefix cache, {engine['computed_tokens']} were computed")


if __name__ == "__main__":
    main(sys.argv[1:])
