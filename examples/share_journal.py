"""Share a fine-tuned model as a file of a few kilobytes: export the journal, rebuild and verify the weights elsewhere.

python examples/share_journal.py
"""

import shutil
import tempfile
from pathlib import Path

import mezzo


def main(sender: Path, receiver: Path) -> None:
    run = mezzo.finetune(space="lora", budget="2k", eval_limit=50, threads=1, out=str(sender / "run"))
    journal = mezzo.export(run.out, "journal", sender / "questions.mezzo")
    print(f"{run.steps} steps in {journal.stat().st_size:,} bytes; digest {run.digest[:16]}")

    # Only this file is sent. Anyone with the same base model can rebuild the same weights from it, bit for bit.
    received = Path(shutil.copy(journal, receiver))
    shutil.rmtree(run.out)

    rebuilt = mezzo.verify(received)
    same = rebuilt.ok and rebuilt.digest == run.digest
    print(f"rebuilt {rebuilt.steps} steps: {'the same bits' if same else 'MISMATCH'}")

    adapter = mezzo.export(received, "adapter", receiver / "adapter")
    print("a PEFT adapter:", ", ".join(sorted(path.name for path in adapter.iterdir())))
    for row in mezzo.predict(["A film with a big heart."], received):
        print(row["prediction"], row["probabilities"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as sender, tempfile.TemporaryDirectory() as receiver:
        main(Path(sender), Path(receiver))
