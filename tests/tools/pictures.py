"""Draw docs/pictures/: how the kernels work, as SVG.

    python tests/tools/pictures.py

tests/test_pictures.py compares the files with what this draws.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

import torch

from dmattn.reference import dynamic_mask

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
INK, FAINT, LINE = "#222222", "#666666", "#888888"
BLUE, GREEN, ORANGE, GREY, WHITE = "#cfe2f7", "#d3edd3", "#fbdfb8", "#eeeeee", "#ffffff"


class Picture:
    """Shapes on a white sheet, which is legible on dark pages too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title, self.shapes = (width, height), title, [f'<rect width="{width}" height="{height}" rx="6" fill="{WHITE}"/>']

    def box(self, x: float, y: float, width: float, height: float, fill: str = WHITE, line: str = LINE) -> None:
        self.shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{line}"/>')

    def text(self, x: float, y: float, words: str, size: int = 14, anchor: str = "start", ink: str = INK) -> None:
        """Lines of text, the first with its foot at y."""
        for number, line in enumerate(words.split("\n")):
            at = f'x="{x:g}" y="{y + number * (size + 4):g}" font-size="{size}" text-anchor="{anchor}" fill="{ink}"'
            self.shapes.append(f"<text {at}>{escape(line)}</text>")

    def card(self, x: float, y: float, width: float, height: float, head: str, words: str = "", fill: str = WHITE) -> None:
        """A box with a heading, and smaller lines below."""
        self.box(x, y, width, height, fill)
        self.text(x + width / 2, y + 21, head, anchor="middle")
        self.text(x + width / 2, y + 40, words, 12, "middle", FAINT)

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.4" marker-end="url(#tip)"{dash}/>')

    def svg(self) -> str:
        width, height = self.size
        tip = f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/>'
        marker = f'<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">{tip}</marker></defs>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif">'
        return "\n".join((head, f"<title>{escape(self.title)}</title>", marker, *self.shapes, "</svg>\n"))


def call() -> Picture:
    """From attention(...) to the kernels, and what the backward pass gets."""
    sheet = Picture(860, 330, "The path of a call")
    sheet.card(20, 30, 170, 64, "attention(...)", "query, key, value,\nmask, bias, options", BLUE)
    sheet.card(230, 30, 170, 64, "checks", "an error names\nthe argument", BLUE)
    sheet.card(440, 30, 170, 64, "a record?", "of a call that\nlooked like this one", BLUE)
    sheet.card(670, 30, 170, 64, "repeat it", "allocations and\nlaunches", GREEN)
    sheet.card(440, 140, 170, 64, "the table", "the first row of\nkernels that serves", BLUE)
    sheet.card(670, 140, 170, 64, "kernels", "Hopper's, or\nthe portable ones", GREEN)
    sheet.card(230, 140, 170, 64, "PyTorch", "a CPU, or float64:\nchunks of query rows", GREEN)
    sheet.card(440, 250, 170, 60, "out, lse", "kept for the\nbackward pass", ORANGE)
    sheet.card(670, 250, 170, 60, "backward pass", "by the table again", BLUE)
    sheet.arrow((190, 62), (230, 62))
    sheet.arrow((400, 62), (440, 62))
    sheet.arrow((610, 62), (670, 62))
    sheet.text(640, 56, "yes", 12, "middle", FAINT)
    sheet.arrow((525, 94), (525, 140))
    sheet.text(533, 120, "no", 12, ink=FAINT)
    sheet.arrow((610, 172), (670, 172))
    sheet.arrow((315, 94), (315, 140))
    sheet.arrow((315, 204), (315, 280), (440, 280))
    sheet.arrow((755, 204), (755, 228), (575, 228), (575, 250))
    sheet.arrow((840, 62), (852, 62), (852, 228), (590, 228), (590, 250))
    sheet.arrow((610, 280), (670, 280))
    return sheet


def tile() -> Picture:
    """One program's row of tiles under a causal mask, and one tile from near."""
    sheet = Picture(870, 430, "A tile of scores with mask and bias")
    side, left, top, count = 34, 60, 70, 8
    sheet.text(left, 30, "The scores of one head under a causal mask")
    sheet.text(left + side * count / 2, 58, "blocks of keys", 12, "middle", FAINT)
    for row in range(count):
        for col in range(count):
            fill = GREY if col > row else ORANGE if col == row else WHITE
            fill = BLUE if row == 5 and col < row else fill
            sheet.box(left + col * side, top + row * side, side, side, fill)
    sheet.text(left - 8, top + 5.6 * side, "queries", 12, "end", FAINT)
    words = (
        "A program owns the sixth block of queries.",
        "Blue: no hidden pair, no mask needed.",
        "Orange: some pairs are hidden. Grey: never visited.",
    )
    sheet.text(left, top + side * count + 26, "\n".join(words), 12)
    sheet.arrow((left + 4, top + 5.5 * side), (left + 6 * side - 6, top + 5.5 * side))
    x, y, cell = 440, 80, 20
    sheet.text(x, 30, "One tile, on chip")
    for number, (name, fill) in enumerate((("scale * Q Kᵀ", BLUE), ("+ bias tile", GREEN), ("hidden: -inf", ORANGE))):
        at = x + number * 140
        for row in range(5):
            for col in range(5):
                sheet.box(at + col * cell, y + row * cell, cell, cell, GREY if number == 2 and col > row else fill)
        sheet.text(at + 50, y - 10, name, 13, "middle")
        if number:
            sheet.arrow((at - 36, y + 50), (at - 6, y + 50))
    sheet.card(x, 230, 120, 64, "row maximum", "brought up to\ndate", BLUE)
    sheet.card(x + 140, 230, 120, 64, "row sum", "of exp(s - max)", BLUE)
    sheet.card(x + 280, 230, 120, 64, "output", "+ weights times\nthe V tile", BLUE)
    sheet.arrow((x + 340, 185), (x + 340, 205), (x + 60, 205), (x + 60, 230))
    sheet.arrow((x + 200, 205), (x + 200, 230))
    sheet.arrow((x + 340, 205), (x + 340, 230))
    sheet.text(x, 330, "After the last tile: out = output / row sum, lse = max + log(row sum).\nThe tile itself is never stored.", 12)
    return sheet


def backward() -> Picture:
    """Which kernel of the backward pass reads what, and writes which gradient."""
    sheet = Picture(860, 350, "The backward pass: which kernel writes which gradient")
    sheet.card(20, 130, 190, 84, "query terms", "delta = dO . out,\none number a query", BLUE)
    rows = (
        ("kernel of keys", "owns keys, walks over queries", "dK, dV, dBias of keys;\ndBias of pairs that nobody shares"),
        ("kernel of queries", "owns queries, walks over keys", "dQ"),
        ("kernel of a shared bias", "owns a tile, walks over\nbatch entries and heads", "dBias of pairs, shared"),
        ("small kernels", "by distance, by head", "the table of distances, sinks"),
    )
    for number, (name, walk, writes) in enumerate(rows):
        y = 20 + number * 80
        sheet.card(300, y, 230, 66, name, walk, BLUE)
        sheet.box(590, y, 250, 66, GREEN)
        sheet.text(715, y + (38 if "\n" not in writes else 29), writes, 13, "middle")
        sheet.arrow((210, 172), (250, 172), (250, y + 33), (300, y + 33))
        sheet.arrow((530, y + 33), (590, y + 33))
    sheet.text(20, 240, "Each kernel makes its tiles\nof P and dS again, from\nq, k, v, mask, bias, dO and lse.", 12, ink=FAINT)
    sheet.text(20, 310, "In 16 bits the kernel of queries\nmakes the terms, before the others.", 12, ink=FAINT)
    return sheet


def bias_gradient() -> Picture:
    """Four ways to sum dS, by who shares an element of the bias."""
    sheet = Picture(860, 300, "How dBias is made, by the axes that the bias lacks")
    cell, count = 20, 6
    kinds = (("of pairs, its own", "dS itself is stored"), ("of pairs, shared", "tiles of all who share\nit are added in order"))
    kinds += (("of keys", "columns are summed"), ("a table of distances", "diagonals are summed"))
    for number, (name, words) in enumerate(kinds):
        x, y = 30 + number * 212, 60
        sheet.text(x + 60, 30, name, anchor="middle")
        for behind in range(2 if number == 1 else 0, 0, -1):
            sheet.box(x + behind * 9, y - behind * 9, cell * count, cell * count, GREY)
        for row in range(count):
            for col in range(count):
                marked = (number == 0, number == 1 and row < 3 and col < 3, number == 2 and col == 2, number == 3 and col - row == 1)
                sheet.box(x + col * cell, y + row * cell, cell, cell, (BLUE if number != 1 else ORANGE) if any(marked) else WHITE)
        sheet.arrow((x + 60, y + cell * count + 6), (x + 60, y + cell * count + 34))
        at = y + cell * count + 40
        if number < 2:
            sheet.box(x + 40, at, 40, 40, GREEN)
        for place in range(count if number > 1 else 0):
            sheet.box(x + place * cell, at + 10, cell, cell, GREEN if place == (2 if number == 2 else 4) else WHITE)
        sheet.text(x + 60, at + 58, words, 12, "middle", FAINT)
    return sheet


def lifetimes() -> Picture:
    """The dynamic mask of 48 keys of which each query keeps 8: in order of position, and in order of life."""
    length, keep, cell = 48, 8, 7
    scores = torch.tensor([(place * place + 29 * place) * 37 % 101 for place in range(length)]).float()
    mask = dynamic_mask(scores, keep, len_q=length)
    ends = [max(mask[:, key].nonzero().flatten().tolist(), default=-1) for key in range(length)]  # -1 of a key that no query keeps
    ordered = sorted(range(length), key=lambda key: (-ends[key], key))
    sheet = Picture(860, 470, "Lifetimes of keys under a dynamic mask")
    for number, (keys, name) in enumerate(((list(range(length)), "keys by position"), (ordered, "keys by the end of their lives"))):
        x, y = 50 + number * 410, 60
        sheet.text(x, 30, name)
        for row in range(length):
            fills = [BLUE if mask[row, key] else WHITE if key <= row else GREY for key in keys]
            for fill, run in groupby(range(length), key=fills.__getitem__):
                cols = list(run)
                sheet.box(x + cols[0] * cell, y + row * cell, len(cols) * cell, cell, fill, "#cccccc")
        for edge in range(0, length + 1, 8):
            sheet.shapes.append(f'<path d="M{x + edge * cell},{y} v{length * cell} M{x},{y + edge * cell} h{length * cell}" stroke="{INK}"/>')
        kept = mask[:, keys].reshape(6, 8, 6, 8).any(3).any(1).sum().item()
        sheet.text(x, y + length * cell + 22, f"{kept} of 36 tiles hold a kept pair", 12)
    sheet.text(44, 60 + 12, "query", 12, "end", FAINT)
    sheet.text(50, 448, "Blue: kept, 8 keys a query. White: dropped. Grey: later keys, not seen. A column is blue once, without a gap.", 12)
    return sheet


PICTURES = {"call": call, "tile": tile, "backward": backward, "bias_gradient": bias_gradient, "lifetimes": lifetimes}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())
