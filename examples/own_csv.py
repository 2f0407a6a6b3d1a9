"""Train on your own CSV file with your own labels: describe the task in a few lines, train, label new texts.

python examples/own_csv.py
"""

import csv
import tempfile
from pathlib import Path

import mezzo

TASK = {
    "columns": ["message"],
    "template": "{message} It was [MASK].",
    "words": {"praise": "great", "complaint": "terrible"},
}
MESSAGES = {
    "praise": [
        "The parcel came a day early.",
        "Your staff solved it in one call.",
        "The new menu is a joy to use.",
        "Best headphones I have ever had.",
        "I recommend the shop to all my friends.",
        "The repair was quick and the price was fair.",
        "My daughter loves the bike.",
        "A pleasure from the first minute to the last.",
    ],
    "complaint": [
        "The parcel never came.",
        "I waited an hour and nobody answered.",
        "The new menu hides everything I need.",
        "The headphones broke after a week.",
        "I will not buy here again.",
        "The repair cost more than a new one.",
        "The bike came without its wheels.",
        "A waste of money and of my evening.",
    ],
}


def main(folder: Path) -> None:
    data = folder / "messages.csv"
    with data.open("w", newline="") as file:
        rows = [{"message": text, "label": label} for label, texts in MESSAGES.items() for text in texts]
        writer = csv.DictWriter(file, ["message", "label"])
        writer.writeheader()
        writer.writerows(rows)

    # k=4: four examples per label for training, and four more per label to choose the best checkpoint.
    run = mezzo.finetune(task=TASK, train=str(data), k=4, budget="10k", threads=1, out=str(folder / "run"))
    print(run)

    for row in mezzo.predict(["It works like a dream.", "The box was empty."], run.out):
        print(row["prediction"], row["probabilities"], row["message"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
