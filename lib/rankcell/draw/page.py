"""What stands under a rank cell: a `Run` as text and as HTML. Ranks that said the same are shown once. Nothing that
changes from run to run (times, pids) is shown, so that a stored output is the same after every run. Long output shows
its head and tail; the run keeps more of it.
"""

import base64
import html
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from ..results import Display, NotSent, RankResult, Run, name_ranks
from .parts import rank_colour

HEAD, TAIL = 40, 15  # lines shown of a long output
MAX_LINE = 2000  # characters shown of a long line
_MARK = "padding:0 0.6em;margin:0.35em 0;border-left:4px solid "
_PRE = (
    "margin:0;padding:0;background:transparent;border:0;"
    "white-space:pre-wrap;overflow-wrap:anywhere;font-size:var(--jp-code-font-size,0.9em)"
)
_NAME = "font-size:0.85em;opacity:0.75"
_MOVES = re.compile(r"(\r\n|\n|\r|\x1b\[A)")
_NOT_KEPT = re.compile(r"\[\.\.\. (.* MB of output were not kept) \.\.\.\]")  # of a flood, see engine/received.py
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def as_text(run: Run) -> str:
    """`run` for a terminal: a heading per group of ranks that said the same, then what they said."""
    parts = []
    for group in groups(run):
        pieces = (piece for _, piece in _pieces(group[0]))
        plain = (p.rstrip("\n") if isinstance(p, str) else str(p.data.get("text/plain", "")) for p in pieces)
        body = [*filter(None, plain)]
        said = [_heading(group), *(textwrap.indent(text, "  ", lambda line: True) for text in body)]
        parts.append("\n".join(said) if body else f"{said[0]}: {_state(group[0])}")
    return "\n".join([*parts, *_dropped(run)])


def as_html(run: Run) -> str:
    """`run` as HTML that reads without any style sheet, on light and on dark pages."""
    rows = []
    for group in groups(run):
        pieces = [text for kind, piece in _pieces(group[0]) if (text := _as_html(kind, piece))]
        tag, name = "div" if pieces else "span", html.escape(_heading(group))
        said = "".join(pieces) or f': <span style="{_NAME}">{html.escape(_state(group[0]))}</span>'
        colour = rank_colour(group[0].rank) if len(group) == 1 else "#999999"
        mark = _MARK + (colour if group[0].state in ("ok", "running") else "#d55e00")
        rows.append(f'<div style="{mark}"><{tag} style="{_NAME}">{name}</{tag}>{said}</div>')
    rows += [f'<div style="{_NAME}">{html.escape(text)}</div>' for text in _dropped(run)]
    # JupyterLab shows the first line in place of an output that is folded
    return f'<!-- output of ranks -->\n<div class="rankcell-run">{"".join(rows)}</div>'


def _dropped(run: Run) -> list[str]:
    """How many of its oldest events a long run has not kept, one line per group of ranks that dropped as many."""
    ranks = {count: [r.rank for r in run.ran if r.dropped == count] for count in (r.dropped for r in run.ran) if count}
    return [f"{name_ranks(of)}: a long run; its {n:,} oldest events are not kept" for n, of in ranks.items()]


def groups(run: Run) -> list[list[RankResult]]:
    """The ranks that ran, in order of their lowest rank, together where they said the same."""
    found: dict[Any, list[RankResult]] = {}
    for result in run.ran:
        texts = (shorten(apply_carriage_returns(text)) for text in (result.stdout, result.stderr))
        shown = tuple((d.stdout_offset, _freeze(d.data)) for d in result.displays)
        value = repr(result.value) if isinstance(result.value, NotSent) else ""
        said = (result.state, *texts, result.order, shown, _freeze(result.data), value, _state(result))
        found.setdefault(said, []).append(result)
    return list(found.values())


def apply_carriage_returns(text: str) -> str:
    """`text` as a terminal would leave it: a carriage return begins the line anew (progress bars do this), and "cursor
    up" goes back to the one above (those of `tqdm(position=rank)` do this, below lines that nobody fills here).
    """
    if "\r" not in text:
        return text
    lines, at, column = [""], 0, 0
    for part in _MOVES.split(text):
        if part in ("\n", "\r\n"):
            at, column = at + 1, 0
            lines += [""] * (at == len(lines))
        elif part == "\r":
            column = 0
        elif part.startswith("\x1b["):
            at = max(0, at - 1)
        elif part:
            lines[at] = lines[at][:column].ljust(column) + part + lines[at][column + len(part) :]
            column += len(part)
    left = "\n".join(lines)
    return left.lstrip("\n") if "\x1b[A" in text else left


def shorten(text: str) -> str:
    """Head and tail of a long text, with the number of lines left out between them."""
    lines = text.removesuffix("\n").split("\n")
    if len(lines) > HEAD + TAIL + 5:
        gone = _NOT_KEPT.search("\n".join(lines[HEAD:-TAIL]))
        them = f"them, and {gone[1]}" if gone else "all of them"
        more = f"... {len(lines) - HEAD - TAIL:,} more lines: run.ranks[r].stdout has {them} ..."
        lines = [*lines[:HEAD], more, *lines[-TAIL:]]
    cut = ((line, len(line) - MAX_LINE) for line in lines)
    return "\n".join(f"{line[:MAX_LINE]}... ({n:,} more characters)" if n > 0 else line for line, n in cut)


def _heading(group: Sequence[RankResult]) -> str:
    names = dict.fromkeys(r.node for r in group if r.node)
    return name_ranks([r.rank for r in group]) + (f" on {', '.join(names)}" if names else "")


def _state(result: RankResult) -> str:
    """What stands behind a rank that has said nothing: "done", "running", or why it ended."""
    if result.error is None:
        return "done" if result.state == "ok" else "running"
    return result.error.message if result.state == "lost" else str(result.error)


def _pieces(result: RankResult) -> list[tuple[str, Any]]:
    """What a rank said, in order, as (kind, text or `Display`): kinds are out, display, err and value."""
    out, err = result.stdout.encode(), result.stderr.encode()
    # places in stdout where something else stands: displays, and what went to stderr meanwhile
    marks: list[tuple[int, str, Any]] = [(d.stdout_offset, "display", d) for d in result.displays]
    turns = result.order
    ends = [begin for begin, _ in turns[1:]] + [len(err)]
    if turns and turns[0][0] == 0 and ends == sorted(ends) and ends[-1] <= len(err):
        marks += [(place, "err", err[begin:end]) for (begin, place), end in zip(turns, ends, strict=True)]
        err = b""
    pieces: list[tuple[str, Any]] = []
    at = 0
    for place, kind, what in sorted(marks, key=lambda mark: mark[0]):
        place = min(max(place, at), len(out))
        pieces += [("out", _text(out[at:place])), (kind, what if kind == "display" else _text(what))]
        at = place
    data = {"text/plain": result.value.text} if isinstance(result.value, NotSent) else {}
    value = [("value", Display(result.data or data))] if result.data or data else []
    return [*pieces, ("out", _text(out[at:])), ("err", _text(err)), *value]


def _text(raw: bytes) -> str:
    return shorten(apply_carriage_returns(raw.decode("utf-8", "replace")))


def _as_html(kind: str, piece: str | Display) -> str:
    if isinstance(piece, Display):
        data = piece.data
        if "text/html" in data:
            return str(data["text/html"])
        for image in ("image/svg+xml", "image/png", "image/jpeg"):
            if image in data:
                raw = data[image].encode() if image == "image/svg+xml" else data[image]
                text = base64.b64encode(raw).decode() if isinstance(raw, bytes) else str(raw).replace("\n", "")
                alt = html.escape(str(data.get("text/plain", "figure")))
                return f'<img alt="{alt}" src="data:{image};base64,{text}" style="max-width:100%">'
        piece = shorten(str(data.get("text/plain", "")))
    quiet = ";opacity:0.75" if kind == "err" else ""  # progress bars and logs go there, too: no alarm
    return f'<pre style="{_PRE}{quiet}">{html.escape(_ANSI.sub("", piece.rstrip(chr(10))))}</pre>' if piece else ""


def _freeze(data: Any) -> Any:
    return tuple(sorted((k, v if isinstance(v, (str, bytes)) else repr(v)) for k, v in data.items()))
