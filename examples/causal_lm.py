"""Fine-tune a causal LM: the label word is the next token after the prompt, here `{text} It was`.

python examples/causal_lm.py
"""

import json
import tempfile
from pathlib import Path

import mezzo

SENTENCES = {
    "positive": [
        "a tender , funny and generous film .",
        "the cast is a delight from start to finish .",
        "sharp writing and a warm heart .",
        "one of the best evenings i have had this year .",
        "beautifully shot and beautifully played .",
        "it earns every one of its tears .",
        "a small story told with great care .",
        "fresh , quick and very clever .",
    ],
    "negative": [
        "a dull , loud and empty film .",
        "the cast looks bored from start to finish .",
        "lazy writing and no heart at all .",
        "one of the longest evenings i have had this year .",
        "badly shot and badly played .",
        "it begs for tears and gets none .",
        "a small story told with no care .",
        "stale , slow and rather stupid .",
    ],
}


def main(folder: Path) -> None:
    data = folder / "sentences.jsonl"
    rows = [{"sentence": text, "label": label} for label, texts in SENTENCES.items() for text in texts]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    run = mezzo.finetune(
        "mezzo/llama-mini",
        task="sst-2",
        train=str(data),
        k=4,
        budget="4k",
        threads=1,
        out=str(folder / "run"),
    )
    print(run)
    for row in mezzo.predict(["a film to see twice .", "a film to sleep through ."], run.out):
        print(row["prediction"], row["text"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
