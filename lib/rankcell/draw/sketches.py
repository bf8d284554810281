"""Drawings of what no run shows: what can run out, links, trees, who starts whom. They were drawn once, as SVG.

`sketch` reads one from the folder data/sketches and writes numbers into it. What was measured is drawn elsewhere in
this package.
"""

import html
import re
from importlib import resources

from .svg import Figure

_FOLDER = resources.files(__package__.rpartition(".")[0]) / "data" / "sketches"


def sketch(name: str, **words: object) -> Figure:
    """The drawing data/sketches/NAME.svg, each {word} in it and in its alt text replaced.

        sketch("two_trees")

    Raises:
        ValueError: there is no such drawing, or it has other words.
    """
    files = {file.name.removesuffix(".svg"): file for file in _FOLDER.iterdir()}
    if name not in files:
        raise ValueError(f"There is no sketch {name!r}. Those there are: {', '.join(sorted(files))}.")
    svg = files[name].read_text("utf-8").strip()
    if (found := set(re.findall(r"{(\w+)}", svg))) != set(words):
        raise ValueError(f"The sketch {name} has a place for {', '.join(sorted(found)) or 'no word'}.")
    for word, said in words.items():
        svg = svg.replace(f"{{{word}}}", html.escape(str(said)))
    found_alt = re.search('aria-label="([^"]*)"', svg)
    return Figure(svg, html.unescape(found_alt[1]) if found_alt else name)
