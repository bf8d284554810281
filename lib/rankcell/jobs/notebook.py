"""A notebook of what a folder holds: the verdict, who waits for whom, the timeline, who sent how many bytes to whom.

Its cells compute everything anew from the folder; what stands under them was made when it was written.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..draw.timeline import timeline
from ..draw.traffic import traffic
from ..draw.waits import waits
from ..results import Run
from . import explain


def run_of(found: explain.Found) -> Run:
    """What `found` holds as the pictures take it."""
    from ..results import RankResult

    events = found.events
    size = max([r.world_size for r in found.records] + [e.rank + 1 for e in events], default=0)
    ranks = tuple(RankResult(r, events=tuple(e for e in events if e.rank == r)) for r in range(size))
    return Run("", ranks, standstill=tuple(explain.standings(found)))


def sent(found: explain.Found) -> list[list[int]]:
    """Bytes that rank i gave to send to rank j, `sent(found)[i][j]`, in the operations that are kept: those of sends,
    and of collectives in equal parts to all others of the group. What an algorithm really moves differs.
    """
    size = max([r.world_size for r in found.records] + [e.rank + 1 for e in found.events], default=0)
    matrix = [[0] * size for _ in range(size)]
    for event in found.events:
        if event.kind != "comm" or event.op == "recv":
            continue
        others = [event.peer] if event.op == "send" else [r for r in event.ranks if r != event.rank]
        for other in others:
            if other is not None and 0 <= other < size and event.rank < size:
                matrix[event.rank][other] += event.nbytes // max(len(others), 1)
    return matrix


def make(found: explain.Found, folder: Path) -> dict[str, Any]:
    """The notebook, as JSON."""
    run = run_of(found)
    cells = [
        _text(
            f"# What happened to the job of `{folder.name}`\n\nMade by `rankcell explain`; run it again to change it."
        ),
        _code(
            "from rankcell.draw.timeline import timeline\nfrom rankcell.draw.traffic import traffic\n"
            "from rankcell.draw.waits import waits\nfrom rankcell.jobs import explain, notebook\n\n"
            f"found = explain.read({str(folder)!r})\nrun = notebook.run_of(found)\nprint(explain.text(found))",
            {"output_type": "stream", "name": "stdout", "text": f"{explain.text(found)}\n"},
        ),
    ]
    if any(s.waits_for for s in run.standstill):
        cells += [_text("## Who waits for whom"), _shown("waits(run)", lambda: waits(run))]
    if run.events:
        cells += [_text("## When"), _shown("timeline(run)", lambda: timeline(run))]
    if any(map(any, sent(found))):
        title = "given to send, in the operations that are kept"
        cells += [
            _text("## Bytes from rank to rank"),
            _shown(
                f"traffic(notebook.sent(found), title={title!r})", lambda: traffic(sent(found), title=title)
            ),
        ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def _code(source: str, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "cell_type": "code", "metadata": {}, "source": source, "execution_count": None, "outputs": list(outputs)
    }  # fmt: skip


def _shown(source: str, draw: Callable[[], Any]) -> dict[str, Any]:
    figure = draw()
    data = {"text/plain": repr(figure), "text/html": figure._repr_html_()}
    shown = {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
    return _code(source, shown)
