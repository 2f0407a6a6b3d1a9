"""LoRA on SGLang in process, with the bundled causal model. SGLang spawns its processes, which needs the guard at the end."""

from importlib import resources

import mezzo

REVIEWS = resources.files("mezzo") / "bundled" / "data" / "reviews"


def main() -> None:
    run = mezzo.finetune(
        "mezzo/llama-mini",
        engine="sglang",
        task="sst-2",
        train=str(REVIEWS / "train.jsonl"),
        dev=str(REVIEWS / "dev.jsonl"),
        test=str(REVIEWS / "test.jsonl"),
        targets=("all-linear",),
        steps=400,
        batch_size=16,
        lr=3e-4,
        eps=1e-2,
        schedule="linear",
        seed=1,
        out="runs/sglang-lora",
    )
    print(run)


if __name__ == "__main__":
    main()
