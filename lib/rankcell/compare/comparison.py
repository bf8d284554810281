"""What `check.against` gives: a row for each tensor, and the first that went wrong."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..results import name_ranks, name_some

SHOWN = 12  # rows of the table that is shown
FINAL = ("grad", "parameter")  # what counts in a training
KINDS = {"output": "output", "grad_output": "gradient of the output", "grad": "gradient", "parameter": "weights"}
KINDS |= {"buffer": "buffer"}
PLURALS = KINDS | {"output": "outputs", "grad_output": "gradients of the output", "grad": "gradients"}


@dataclass(frozen=True)
class Row:
    """How the ranks hold one tensor of the dense model.

    `kind` is "output", "grad_output", "grad" or "parameter"; `status` is "fits", "scaled", "partial", "none",
    "missing", "batch" (a number of which each rank has its part), "uncovered" (rows of the batch are on no rank, or on
    more ranks than others), "patchy" (many single rows seem to be on no rank) or "skipped" (nothing to compare).
    `ranks` are those that hold it; of a tensor that is wrong, those where it is. `clue` is what tells more of it.
    """

    name: str
    kind: str
    step: int
    layout: str
    status: str
    ranks: tuple[int, ...]
    line: int = 0
    factor: float = 1.0
    axes: tuple[str, ...] = ()
    says: str = ""
    clue: str = ""

    def found(self, status: str, layout: str, **more: Any) -> "Row":
        """This row, once it is known how the ranks hold the tensor."""
        return replace(self, status=status, layout=layout, **more)

    @property
    def key(self) -> tuple[str, str, int]:
        """What no other tensor has: name, kind and step."""
        return self.name, self.kind, self.step

    @property
    def title(self) -> str:
        """The tensor in words."""
        return f"{self.name or 'the model'}{'.grad' if self.kind == 'grad' else ''}"


@dataclass(frozen=True)
class Comparison:
    """What `check.against` found: `ok`, the `first` wrong tensor, a row for each tensor in the order of computing."""

    rows: tuple[Row, ...]
    first: Row | None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no tensor is wrong."""
        return self.first is None

    def __bool__(self) -> bool:
        return self.ok

    @property
    def text(self) -> str:
        """The verdict in a sentence or two."""
        if self.first is not None:
            return self.first.says
        counts = {k: sum(r.kind == k for r in self.rows) for k in KINDS}
        what = ", ".join(f"{n} {KINDS[k] if n == 1 else PLURALS[k]}" for k, n in counts.items() if n)
        return f"the ranks' tensors make up those of one process: {what}"

    def _shown(self) -> Sequence[Row]:
        """The rows around the first wrong one; of a right comparison the first of each kind."""
        if self.first is None:
            of_kind = {k: [r for r in self.rows if r.kind == k][: SHOWN // 4] for k in KINDS}
            return [row for row in self.rows if row in of_kind[row.kind]]
        at = next((i for i, row in enumerate(self.rows) if row.key == self.first.key), 0)
        start = max(0, min(at - SHOWN // 2, len(self.rows) - SHOWN))
        return self.rows[start : start + SHOWN]

    @property
    def _others(self) -> str:
        """How many tensors there are, and what is wrong among those that are not shown."""
        left = [r for r in self.rows if r.kind in FINAL and r not in self._shown() and r.status != "skipped"]
        wrong = [r.title for r in left if r.status not in ("fits", "batch")]
        some = f"{len(left) - len(wrong)} right, {len(wrong)} wrong{f' ({name_some(wrong, 4)})' if wrong else ''}"
        more = "" if self.ok or not left else f". Gradients and weights that are not shown: {some}"
        return f"{len(self.rows)} tensors in all: .rows{more}"

    def _is_first(self, row: Row) -> bool:
        return self.first is not None and row.key == self.first.key

    def __repr__(self) -> str:
        lines = [f"{'✓' if self.ok else '✗'} {self.text}"]
        for row in self._shown():
            mark = ">" if self._is_first(row) else " "
            lines.append(f" {mark} {row.title:<34} {KINDS[row.kind]:<22} {row.layout}")
        if len(self.rows) > SHOWN:
            lines.append(f"   ({self._others})")
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        colour, veil = ("#009e73", "0,158,115") if self.ok else ("#d55e00", "213,94,0")
        left = 'style="text-align:left"'
        head = "".join(f"<th {left}>{name}</th>" for name in ("tensor", "what", "on the ranks", "where"))
        body = ""
        for row in self._shown():
            style = f"font-weight:600;background:rgba({veil},.12)" if self._is_first(row) else ""
            who = name_ranks(row.ranks) if row.ranks else ""
            cells = (f"<code>{html.escape(row.title)}</code>", KINDS[row.kind], html.escape(row.layout), who)
            body += f'<tr style="{style}">{"".join(f"<td {left}>{cell}</td>" for cell in cells)}</tr>'
        more = f"<p>{html.escape(self._others)}</p>" if len(self.rows) > SHOWN else ""
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return (
            f'<div class="rankcell-check" style="display:inline-block;padding:.15em .6em;border-radius:4px;'
            f'border-left:3px solid {colour};background:rgba({veil},.12);color:inherit">'
            f"{'✓' if self.ok else '✗'} {html.escape(self.text)}</div>"
            f'<table style="font-size:.9em;margin-top:.4em"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
            f"{more}{notes}"
        )
