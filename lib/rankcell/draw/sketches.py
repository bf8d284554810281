"""Drawings of what no run shows: what can run out, links, trees, who starts whom. They were drawn once, as SVG in the
folder data/sketches; `sketch` reads one and writes numbers into it.
"""

import html
import re
from importlib import resources

from .svg import Figure


def sketch(name: str, **words: object) -> Figure:
    """The drawing data/sketches/NAME.svg, each {word} in it and in its alt text replaced: `sketch("two_trees")`."""
    svg = resources.files("rankcell").joinpath(f"data/sketches/{name}.svg").read_text("utf-8").strip()
    svg = re.sub(r"{(\w+)}", lambda found: html.escape(str(words[found[1]])), svg)
    alt = re.search('aria-label="([^"]*)"', svg)
    return Figure(svg, html.unescape(alt[1]) if alt else name)
