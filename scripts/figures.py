"""Draw the figures of the documentation: `python scripts/figures.py` writes docs/figures/*.svg, always the same bytes.

The path of zeroth-order steps is computed, with the package's own noise and the published step. The curves of the first run are
those of runs that were recorded: `for s in 0 1 2 3 4; do mezzo train --seed $s --out runs/$s; done`, then
`python scripts/figures.py --record runs/*`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Callable
from html import escape
from pathlib import Path

import numpy as np

from mezzo.method import noise
from mezzo.runs.result import read_curve

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
RECORDED = Path(__file__).with_name("first_run.csv")
INK, SOFT, BLUE, ORANGE, GREEN, PALE = "#1c2430", "#6b7280", "#2563eb", "#d97706", "#15803d", "#eef2f7"


class Picture:
    """Shapes on a white card, readable on light and dark pages."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self.shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            f'aria-label="{escape(description)}" font-family="system-ui, sans-serif" font-size="15">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        ]

    def text(self, x: float, y: float, text: str, color: str = INK, anchor: str = "middle", size: int = 15) -> None:
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
        )

    def line(
        self, points: list[tuple[float, float]], color: str = INK, width: float = 2, dash: str = "", tip: bool = False
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        attributes = (f' stroke-dasharray="{dash}"' if dash else "") + (' marker-end="url(#tip)"' if tip else "")
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{attributes}/>'
        )

    def dot(self, x: float, y: float, color: str, size: float = 6) -> None:
        self.shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{color}"/>')

    def box(
        self, x: float, y: float, width: float, height: float, text: str, fill: str = PALE, color: str = INK
    ) -> None:
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" fill="{fill}" stroke="{SOFT}"/>'
        )
        lines = text.split("\n")
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + 20 * (number - (len(lines) - 1) / 2), line, color)

    def ellipse(self, x: float, y: float, rx: float, ry: float) -> None:
        self.shapes.append(
            f'<ellipse cx="{x:.1f}" cy="{y:.1f}" rx="{rx:.1f}" ry="{ry:.1f}" fill="none" stroke="{SOFT}" opacity="0.45"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.shapes, "</svg>"]) + "\n"


def step() -> Picture:
    """Two losses along a random direction, the slope between them, and the step downhill."""
    picture = Picture(
        640, 340, "The loss along a random direction z, measured at θ minus εz and θ plus εz, gives a slope"
    )

    def loss(x: float) -> float:
        return 230 - 170 * ((x - 200) / 330) ** 2

    picture.line([(60, 290), (600, 290)], tip=True)
    picture.line([(60, 290), (60, 40)], tip=True)
    picture.text(560, 318, "along z", SOFT)
    picture.text(92, 46, "loss", SOFT)
    picture.line([(x, loss(x)) for x in range(80, 541, 4)], BLUE, 3)
    left, middle, right = 330, 400, 470
    for at, name in ((left, "θ−εz"), (middle, "θ"), (right, "θ+εz")):
        picture.line([(at, 290), (at, loss(at))], SOFT, 1, "3 4")
        picture.text(at, 312, name)
    for at, name in ((left, "L₋"), (right, "L₊")):
        picture.line([(60, loss(at)), (at, loss(at))], SOFT, 1, "3 4")
        picture.text(42, loss(at) + 5, name)
        picture.dot(at, loss(at), ORANGE)
    slope = (loss(right) - loss(left)) / (right - left)
    picture.line([(290, loss(left) - 40 * slope), (510, loss(right) + 40 * slope)], ORANGE)
    picture.text(150, 84, "g = (L₊ − L₋) / 2ε", ORANGE, "start", 18)
    picture.line([(middle, 270), (middle - 130, 270)], GREEN, 3, tip=True)
    picture.text(middle - 140, 275, "step: −lr · g · z", GREEN, "end")
    return picture


def words() -> Picture:
    """From a text to a loss through a template and label words."""
    picture = Picture(
        760, 210, "A template turns a text into a sentence with a mask; label words at the mask become a loss"
    )
    picture.box(16, 70, 150, 64, "A patient,\ngenerous film.")
    picture.box(244, 70, 166, 64, "A patient, generous\nfilm. It was [MASK].")
    picture.box(464, 30, 130, 56, "“ terrible”\n−1.3", "#fdf1e3")
    picture.box(464, 118, 130, 56, "“ great”\n+2.1", "#e8f5ec")
    picture.box(640, 70, 104, 64, "cross-\nentropy")
    picture.line([(166, 102), (242, 102)], tip=True)
    picture.line([(410, 92), (462, 62)], tip=True)
    picture.line([(410, 112), (462, 142)], tip=True)
    picture.line([(594, 60), (638, 90)], tip=True)
    picture.line([(594, 146), (638, 114)], tip=True)
    picture.text(203, 92, "template", SOFT, size=13)
    picture.text(91, 160, "label: positive", SOFT, size=13)
    picture.text(529, 198, "scores of the LM head", SOFT, size=13)
    return picture


def forward() -> Picture:
    """Both probes stacked along the batch dimension of one forward pass."""
    picture = Picture(720, 230, "The rows at θ+εz and θ−εz share one forward pass; base weights are read once")
    picture.box(16, 80, 110, 70, "batch\nB examples")
    picture.box(186, 30, 150, 56, "rows at θ+εz", "#fdf1e3")
    picture.box(186, 144, 150, 56, "rows at θ−εz", "#e8f5ec")
    picture.box(396, 62, 150, 106, "one forward pass,\nbase weights\nread once", "#e7eefc")
    picture.box(606, 30, 98, 56, "scores → L₊", "#fdf1e3")
    picture.box(606, 144, 98, 56, "scores → L₋", "#e8f5ec")
    for start, end in (
        ((126, 105), (184, 62)),
        ((126, 125), (184, 168)),
        ((336, 58), (394, 92)),
        ((336, 172), (394, 138)),
    ):
        picture.line([start, end], tip=True)
    for start, end in (((546, 92), (604, 62)), ((546, 138), (604, 168))):
        picture.line([start, end], tip=True)
    return picture


def journal() -> Picture:
    """Base model plus (seed, scalar) pairs give the weights."""
    picture = Picture(760, 210, "Base model plus journal of seeds and scalars gives the fine-tuned weights bit for bit")
    picture.box(16, 62, 150, 86, "base model\nθ₀\ndigest 998b…")
    picture.text(196, 112, "+", size=28)
    rows = (
        "step, seed, coefficient",
        "0, 10811875…, −4.2e-06",
        "1, 87731204…, +1.1e-05",
        "2, 55013377…, −7.9e-06",
        "…",
    )
    picture.box(226, 40, 240, 130, "\n".join(rows), "#fdf1e3")
    picture.line([(466, 105), (566, 105)], tip=True)
    picture.text(516, 92, "replay", SOFT, size=13)
    picture.text(516, 126, "θ ← θ − c·z", SOFT, size=13)
    picture.box(572, 62, 172, 86, "fine-tuned weights,\nthe same bits\non any machine", "#e8f5ec")
    picture.text(346, 194, "journal: 20,000 steps in less than 100 KB", SOFT, size=13)
    return picture


def descent() -> Picture:
    """The path of many zeroth-order steps on a quadratic loss, next to that of gradient descent."""
    picture = Picture(
        640, 390, "Zeroth-order steps take a noisy path to the minimum that gradient descent reaches directly"
    )
    curve = np.array([1.0, 4.0])

    def to_pixels(point: np.ndarray) -> tuple[float, float]:
        return 320 + 105 * float(point[0]), 210 - 105 * float(point[1])

    for level in (0.05, 0.3, 0.8, 1.6, 2.7, 4.1):
        picture.ellipse(320, 210, 105 * math.sqrt(2 * level), 105 * math.sqrt(2 * level / 4))
    start = np.array([-2.6, 1.1])
    gradient, zeroth = [start], [start]
    for _ in range(60):
        gradient.append(gradient[-1] - 0.08 * curve * gradient[-1])
    for number in range(120):
        z = np.array([noise.dense("gaussian", noise.step_seed(2, number, 0), "figure", i, i + 1)[0] for i in (0, 1)])
        up, down = (float((curve * (zeroth[-1] + sign * 1e-3 * z) ** 2).sum()) / 2 for sign in (1, -1))
        zeroth.append(zeroth[-1] - 0.04 * (up - down) / 2e-3 * z)
    picture.line([to_pixels(p) for p in gradient], SOFT, 2.5, "6 4")
    picture.line([to_pixels(p) for p in zeroth], BLUE, 2)
    for point in zeroth[::4]:
        picture.dot(*to_pixels(point), BLUE, 2.6)
    picture.dot(*to_pixels(start), INK)
    picture.text(to_pixels(start)[0], to_pixels(start)[1] - 12, "start")
    picture.line([(404, 28), (436, 28)], BLUE, 3)
    picture.text(444, 33, "zeroth-order steps", anchor="start", size=14)
    picture.line([(404, 50), (436, 50)], SOFT, 3, "6 4")
    picture.text(444, 55, "gradient descent", anchor="start", size=14)
    return picture


def first_run() -> Picture:
    """Dev accuracy of the recorded runs."""
    with RECORDED.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["run"], []).append((float(row["example_forwards"]), float(row["value"])))
    picture = Picture(
        640,
        340,
        f"Dev accuracy of {len(curves)} runs of mezzo train, which differ in their seed, over example-forwards",
    )
    most = max(x for curve in curves.values() for x, _ in curve)

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        return 70 + 530 * x / most, 290 - 240 * y / 0.8

    picture.line([(70, 290), (610, 290)], tip=True)
    picture.line([(70, 290), (70, 36)], tip=True)
    for share in (0.2, 0.4, 0.6):
        picture.line([to_pixels(0, share), to_pixels(most, share)], SOFT, 0.5)
        picture.text(60, to_pixels(0, share)[1] + 5, f"{share:.0%}", SOFT, "end", 13)
    for millions in range(1, int(most / 1e6) + 1):
        picture.text(to_pixels(1e6 * millions, 0)[0], 310, f"{millions}M", SOFT, size=13)
    picture.text(82, 48, "dev accuracy", SOFT, "start", 13)
    picture.text(600, 330, "example-forwards", SOFT, "end", 13)
    for curve in curves.values():
        picture.line([to_pixels(x, y) for x, y in curve], BLUE, 1.8)
    return picture


def record(folders: list[Path]) -> None:
    """Keep the curves of these runs."""
    with RECORDED.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("run", "example_forwards", "value"))
        for number, folder in enumerate(folders):
            events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            for point in read_curve(events):
                table.writerow((number, round(point["example_forwards"]), round(point["value"], 4)))


FIGURES: dict[str, Callable[[], Picture]] = {f.__name__: f for f in (first_run, step, words, forward, journal, descent)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="+", type=Path, metavar="RUN", help="runs whose curves are drawn from now on")
    if folders := parser.parse_args().record:
        record(folders)
    FOLDER.mkdir(exist_ok=True)
    for name, make in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(str(make()), encoding="utf-8")


if __name__ == "__main__":
    main()
