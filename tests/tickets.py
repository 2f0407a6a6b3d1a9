"""Support tickets as a user would export them: three classes of very different size, commas, quotes and empty cells."""

from __future__ import annotations

import csv
import random
from pathlib import Path

# Category → share of the rows, openings, complaints.
PHRASES = {
    "billing_issue": (
        0.6,
        ("I was charged twice for {thing}", "The invoice for {thing} is wrong", "You took money for {thing}"),
        ("and nobody has paid it back", "although I cancelled in {month}", "and my bank says the sum is {sum}"),
    ),
    "Technical problem": (
        0.3,
        ("The app closes when I open {thing}", "The page for {thing} stays blank", "My phone freezes on {thing}"),
        ("since the update in {month}", "every time I try it", "and the screen only says 'error {sum}'"),
    ),
    "account_access": (
        0.1,
        (
            "I cannot sign in to see {thing}",
            "My password for {thing} is refused",
            "Somebody changed my address for {thing}",
        ),
        ("since {month}", "and the code never arrives", "after {sum} tries"),
    ),
}
THINGS = (
    "the family plan",
    "my last order",
    "the annual report",
    "two train tickets",
    "the music service",
    "my photos",
)
MONTHS = ("January", "March", "May", "July", "autumn", "the first week of June")
OPENINGS = ("", "Hello, ", "Dear team, ", "Good morning! ", "Hi there, ")
ENDINGS = ("", " Please help.", ' I was told to "wait", which I did.', " What now?", " Thanks, Ann")
CHANNELS = ("email", "web", "phone")


def make_tickets(count: int = 400, seed: int = 0) -> list[dict[str, str]]:
    """Rows in random order. Every fortieth has no message, and many have no phone number."""
    draw = random.Random(seed)
    rows = []
    for label, (share, subjects, complaints) in PHRASES.items():
        for _ in range(round(count * share)):
            sentence = (
                f"{draw.choice(OPENINGS)}{draw.choice(subjects)} {draw.choice(complaints)}.{draw.choice(ENDINGS)}"
            )
            facts = {"thing": draw.choice(THINGS), "month": draw.choice(MONTHS), "sum": str(draw.randint(3, 400))}
            rows.append({"channel": draw.choice(CHANNELS), "message": sentence.format(**facts), "category": label})
    draw.shuffle(rows)
    for number, row in enumerate(rows):
        row["message"] = "" if number % 40 == 39 else row["message"]
        row["phone"] = "" if number % 3 else f"+43 {100 + number}"
    return [{"id": str(1000 + number), **row} for number, row in enumerate(rows)]


def write_csv(path: Path, rows: list[dict[str, str]], delimiter: str = ",", header: bool = True) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        if header:
            writer.writeheader()
        writer.writerows(rows)
    return str(path)
