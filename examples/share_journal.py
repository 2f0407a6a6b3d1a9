"""A fine-tune as a file of a few kilobytes: train, export the journal, rebuild the weights elsewhere, verify them.

python examples/share_journal.py
"""

import shutil
import tempfile
from pathlib import Path

import mezzo


def main(here: Path, elsewhere: Path) -> None:
    run = mezzo.finetune(space="lora", steps=20, eval_every=10, eval_limit=50, threads=1, out=str(here / "run"))
    file = mezzo.export(run.out, "journal", here / "reviews.mezzo")
    print(f"{file.stat().st_size:,} bytes stand for {run.steps} steps; digest {run.digest[:16]}")

    # Only this file travels. Whoever has the same base model makes the same weights from it, bit for bit.
    received = Path(shutil.copy(file, elsewhere))
    shutil.rmtree(run.out)

    found = mezzo.verify(received)
    print(f"rebuilt {found.steps} steps: {'the same bits' if found.ok and found.digest == run.digest else 'MISMATCH'}")

    adapter = mezzo.export(received, "adapter", elsewhere / "adapter")
    print("a PEFT adapter:", ", ".join(sorted(path.name for path in adapter.iterdir())))
    for row in mezzo.predict(["A film with a big heart."], received):
        print(row["label"], row["probabilities"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        main(Path(one), Path(two))
