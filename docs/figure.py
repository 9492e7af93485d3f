"""Draws what moves in an exchange: `python docs/figure.py` writes docs/exchange.svg. Needs matplotlib."""

from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

TOKENS = (3, 2, 1)  # of each rank
HEADS_PER_RANK = 2
HEADS = HEADS_PER_RANK * len(TOKENS)
COLOURS = ("#0072B2", "#E69F00", "#009E73")  # Okabe and Ito: told apart with any colour vision
INK = "#7A7A7A"  # legible on white and on near-black
STYLE = {
    "svg.fonttype": "none",  # text stays text, in the reader's font
    "svg.hashsalt": "headpar",  # the same file each time
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
}


def draw(path: Path) -> None:
    """Write the figure."""
    with plt.rc_context(STYLE):
        figure, (before, after) = plt.subplots(1, 2, figsize=(8, 3.5), gridspec_kw={"wspace": 0.55})
        cells(before, held_by=rank_of_token, small=rank_of_head)
        cells(after, held_by=rank_of_head, small=rank_of_token)
        before.set_title("my tokens, all heads", color=INK)
        after.set_title("all tokens, my heads", color=INK)
        brackets(before, after)
        for height, text, start, end in ((0.60, "dispatch", 0.455, 0.57), (0.46, "return", 0.57, 0.455)):
            figure.text(0.5125, height + 0.025, text, ha="center")
            arrow = {"arrowstyle": "-|>", "color": INK, "lw": 1.5}
            before.annotate(
                "", (end, height), (start, height), xycoords="figure fraction", arrowprops=arrow, annotation_clip=False
            )
        figure.text(
            0.5,
            0.01,
            "colour: the rank that holds it; small square: the rank that it goes to, or came from",
            ha="center",
        )
        figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None, "Creator": None})
        plt.close(figure)


def rank_of_token(token: int, head: int) -> int:
    """Whose token it is."""
    return next(rank for rank, end in enumerate(accumulate(TOKENS)) if token < end)


def rank_of_head(token: int, head: int) -> int:
    """Whose head it is."""
    return head // HEADS_PER_RANK


def cells(axes: Any, held_by: Any, small: Any) -> None:
    """A square per token and head, in the colour of the rank that holds it."""
    for token in range(sum(TOKENS)):
        for head in range(HEADS):
            other = COLOURS[small(token, head)]
            axes.add_patch(
                Rectangle((head + 0.34, token + 0.34), 0.32, 0.32, facecolor=other, edgecolor="white", lw=0.8)
            )
    axes.set(xlim=(0, HEADS), ylim=(sum(TOKENS), 0), aspect="equal", xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def brackets(before: Any, after: Any) -> None:
    """The ranks beside their tokens on the left, under their heads on the right."""
    start = 0
    for rank, count in enumerate(TOKENS):
        tokens = f"{count} token{'s' if count > 1 else ''}"
        before.text(-0.3, start + count / 2, f"rank {rank}\n{tokens}", ha="right", va="center", color=INK)
        start += count
        middle = (rank + 0.5) * HEADS_PER_RANK
        after.text(middle, sum(TOKENS) + 0.25, f"rank {rank}", ha="center", va="top", color=INK)
    before.text(HEADS / 2, sum(TOKENS) + 0.25, f"{HEADS} heads", ha="center", va="top", color=INK)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("exchange.svg"))
