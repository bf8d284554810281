"""What every picture of the course is made of: a figure, a slider over figures, the colours, the marks. A figure is
stored as a picture inside `text/html`, because that is the one form that JupyterLab shows in an untrusted notebook,
that works from file://, in print and on a phone.
"""

import base64
import html
import json
import re
from dataclasses import dataclass
from importlib import resources
from xml.sax.saxutils import escape

# Okabe and Ito's palette, safe for the colour-blind (https://jfly.uni-koeln.de/color/, 2008). Each
# operation has one, the same in every notebook; two halves of one thing (send and recv) share it.
COLOURS = {
    "compute": "#999999",
    "wait": "#e3e3e3",
    **dict.fromkeys(("send", "recv"), "#e69f00"),
    "all_reduce": "#0072b2",
    "reduce_scatter": "#56b4e9",
    "all_gather": "#009e73",
    "broadcast": "#cc79a7",
    "reduce": "#882255",  # of another palette (Tol's): Okabe and Ito have eight
    **dict.fromkeys(("scatter", "gather"), "#d55e00"),
    "all_to_all": "#f0e442",
    "barrier": "#444444",
}
RANK_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
Px = float
INK, MUTED, PAPER, LINE = "#1a1a1a", "#5a5a5a", "#ffffff", "#c8c8c8"
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',Arial,sans-serif"

# Turns the still picture into a slider between two buttons, on the static site and in a trusted notebook. It opens on
# the first picture: the last one is often the answer. What is beside the slider keeps its width, so that nothing moves
# under the pointer; `lmSuppressShortcuts` tells JupyterLab to leave the arrow keys to it.
_SLIDER = resources.files("rankcell").joinpath("data/slider.js").read_text("utf-8").strip()


@dataclass(frozen=True)
class Figure:
    """One picture: SVG, and the finding in words for screen readers and terminals."""

    svg: str
    alt: str

    def __repr__(self) -> str:
        return self.alt

    def _repr_html_(self, beside: str = "") -> str:
        code = base64.b64encode(self.svg.encode()).decode()
        picture = f'<img alt="{html.escape(self.alt)}" src="data:image/svg+xml;base64,{code}" style="max-width:100%">'
        return f'<figure class="rankcell" style="margin:0.5em 0">{picture}{beside}</figure>'


@dataclass(frozen=True)
class Frames:
    """Several pictures of one size above a slider, which opens on the first of them.

    `labels` says what each picture shows, `name` what the slider moves through. Where scripts are off, and on paper,
    the picture number `still` stands alone.
    """

    figures: tuple[Figure, ...]
    labels: tuple[str, ...]
    name: str = "step"
    still: int = 0

    def __repr__(self) -> str:
        return "\n".join(f"[{label}] {figure.alt}" for label, figure in zip(self.labels, self.figures, strict=True))

    def _repr_html_(self) -> str:
        # the pictures share most of their marks: each mark is stored once, a picture as a list of numbers
        parts: dict[str, int] = {}
        marks = (re.split("(?<=>)(?=<)", figure.svg) for figure in self.figures)
        frames = [[parts.setdefault(mark, len(parts)) for mark in of] for of in marks]
        data: dict[str, object] = {"name": self.name, "parts": list(parts), "frames": frames}
        data |= {"alts": [f.alt for f in self.figures], "labels": self.labels, "still": self.still}
        stored = json.dumps(data).replace("</", "<\\/")
        scripts = f'<script type="application/json">{stored}</script><script>{_SLIDER}</script>'
        return self.figures[self.still]._repr_html_(scripts)


def drawing(width: Px, height: Px, *marks: str, alt: str) -> Figure:
    """A figure of `width` x `height` px on white paper, so that it reads on a dark page too.

    Keep `width` near 640: on a phone (380 px) text of 20 px stays above 11 px then.
    """
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    said = f'role="img" aria-label="{escape(alt, {chr(34): "&quot;"})}" font-family="{FONT}"'
    paper = f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>'
    return Figure(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {said}>{paper}{"".join(marks)}</svg>', alt)


def rect(
    x: Px,
    y: Px,
    width: Px,
    height: Px,
    *,
    fill: str = "none",
    stroke: str = "none",
    stroke_width: Px = 1,
    title: str = "",
    radius: Px = 2,
    dash: str = "",
) -> str:
    """A bar. `title` is what a mouse over it shows."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    thick = f' stroke-width="{stroke_width:g}"' if stroke_width != 1 else ""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    at = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}"'
    return f'<rect{thick} {at} rx="{radius:g}" fill="{fill}" stroke="{stroke}"{dashed}>{tip}</rect>'


def label(
    x: Px, y: Px, text: object, *, size: Px = 20, anchor: str = "start", fill: str = INK, bold: bool = False
) -> str:
    """Text with its baseline at `y`. `anchor` is start, middle or end."""
    weight = ' font-weight="600"' if bold else ""
    look = f'font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"{weight}'
    return f'<text x="{x:.2f}" y="{y:.2f}" {look}>{escape(str(text))}</text>'


def line(
    x1: Px, y1: Px, x2: Px, y2: Px, *, stroke: str = LINE, width: Px = 1, dash: str = "", arrow: bool = False
) -> str:
    """A straight line, with a head at its end where `arrow` is set."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
    mark = f'<line {ends} stroke="{stroke}" stroke-width="{width:g}"{dashed}/>'
    if not arrow:
        return mark
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    size = 5 + width * 1.5
    left = (x2 - size * ux - size / 2 * uy, y2 - size * uy + size / 2 * ux)
    right = (x2 - size * ux + size / 2 * uy, y2 - size * uy - size / 2 * ux)
    head = " ".join(f"{px:.2f},{py:.2f}" for px, py in ((x2, y2), left, right))
    return mark + f'<polygon points="{head}" fill="{stroke}"/>'


def format_bytes(nbytes: float) -> str:
    """`nbytes` with a binary unit: 1 MiB = 2^20 B. The one place that formats bytes."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def format_seconds(seconds: float) -> str:
    """`seconds` with the unit that suits it. The one place that formats time."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 0.9995:  # three digits of less would round up to 1000 of the smaller unit
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
