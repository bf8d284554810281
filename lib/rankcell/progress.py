"""A tick for each exercise whose checks have passed, kept in the student's folder; shared only if the student asks.

Jupyter tells the kernel which notebook it belongs to and which cell has run; `exercises` says which of them is an
answer and which a check. An exercise is solved when all its checks have passed since its answer last ran. Only copies
for students count (`make student`): running a solution solves nothing. The file is small and plain:

    {"version": 1, "share": null, "lessons": {"04_collectives": {"Exercise 1: mend the scatter":
        {"state": "solved", "tries": 3, "last": "", "at": 1763820000}}}}

Sharing sends this, a name and nothing else: to a folder, or to the instructor's `rankcell room`.
"""

import contextlib
import html
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from . import exercises
from .errors import OptionError

FILE = "rankcell-progress.json"
SOLVED, TRIED = "solved", "tried"
MARKS = {SOLVED: "✓", TRIED: "✗", "": "·"}
NAME = re.compile(r"[\w][\w .'-]{0,59}")
_SAID = 200  # characters of a message that are kept


class ProgressError(ValueError):
    """A request about progress that cannot be met, and what would do."""


class Progress:
    """What is solved in one folder of students' copies.

    Args:
        notebook: the notebook of this kernel; None where Jupyter has not said which it is, and nothing is kept.
    """

    def __init__(self, notebook: Path | None) -> None:
        self.notebook = notebook
        self.problem = ""  # why nothing can be kept
        self._cells: tuple[float, dict[str, tuple[str, int, int]]] = (0.0, {})
        self._passed: dict[str, set[int]] = {}  # exercise -> its checks that passed since its answer ran
        self._sending = threading.Lock()

    @property
    def file(self) -> Path | None:
        """Where it is kept."""
        return self.notebook.parent / FILE if self.notebook else None

    def heard(self, cell: str | None, error: BaseException | None) -> None:
        """A cell has run; `cell` is its id. It never raises: a full disk must not cost a student the cell."""
        if cell is None or self.notebook is None:
            return
        with contextlib.suppress(OSError, exercises.ExerciseError):
            text, place, checks = self._roles().get(cell, ("", 0, 0))
            if text:
                self._note(text, place, checks, error)

    def _roles(self) -> dict[str, tuple[str, int, int]]:
        """Cell id -> its exercise, its place among the checks (-1: the answer), and how many checks there are.

        Read from the file as it was last saved: new cells are known from then on.
        """
        assert self.notebook is not None
        saved = self.notebook.stat().st_mtime
        if saved != self._cells[0]:
            self._cells = saved, _roles_in(exercises.read(self.notebook))
        return self._cells[1]

    def _note(self, text: str, place: int, checks: int, error: BaseException | None) -> None:
        assert self.notebook is not None
        passed = self._passed.setdefault(text, set())
        if place < 0:
            passed.clear()
        if error is None and place >= 0:
            passed.add(place)
        if error is None and len(passed) < checks:
            return
        known = self.read()
        one = (
            known["lessons"]
            .setdefault(self.notebook.stem, {})
            .setdefault(text, {"state": TRIED, "tries": 0, "last": ""})
        )
        one["at"] = int(time.time())
        if error is None:
            one.update(state=SOLVED, last="")
        elif not isinstance(error, NotImplementedError):  # the stub, which "Run All" runs
            one["tries"] += 1
            one["last"] = f"{type(error).__name__}: {error}".splitlines()[0][:_SAID]
        if error is None or one["tries"]:
            self._write(known)
            if known.get("share"):
                # in a thread of its own: a slow network must not hold up the notebook
                threading.Thread(target=self._send, name="rankcell progress", daemon=True).start()

    def read(self) -> dict[str, Any]:
        """What is kept; nothing where nothing can be read."""
        known: Any = None
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(self.file.read_text("utf-8")) if self.file else None
        fine = isinstance(known, dict) and isinstance(known.get("lessons"), dict)
        return known if fine else {"version": 1, "share": None, "lessons": {}}

    def _write(self, known: Mapping[str, Any]) -> None:
        assert self.file is not None
        draft = self.file.with_suffix(f".{os.getpid()}.part")
        try:
            draft.write_text(json.dumps(known, ensure_ascii=False, indent=1) + "\n", "utf-8")
            draft.replace(self.file)
            self.problem = ""
        except OSError as error:
            self.problem = f"{FILE} cannot be written in the notebook's folder ({error.strerror})"
            return

    def share(self, where: str, name: str) -> str:
        """From now on send the ticks under `name` to a folder or a room's address; a sentence that says what goes out.

        Raises:
            ProgressError: there is no such folder or room, or the name is none.
        """
        if not NAME.fullmatch(name):
            raise ProgressError(f"{name!r} is no name. Write letters, digits, spaces: up to 60.")
        if self.notebook is None:
            raise ProgressError(
                "Nothing can be shared: Jupyter has not told this kernel which notebook it is for."
            )
        known = self.read()
        known["share"] = {"to": where, "name": name}
        if problem := _deliver(known):
            raise ProgressError(problem)
        self._write(known)
        return (
            f"From now on your ticks, your last messages and the name {name} go to {where}, nothing else. "
            f"`%ranks progress private` ends it."
        )

    def keep_private(self) -> str:
        """Share nothing any more; a file in a shared folder is removed."""
        known = self.read()
        share, known["share"] = known.get("share"), None
        if self.notebook is not None:
            self._write(known)
        if not share:
            return "Nothing was shared."
        if not _is_address(share["to"]):
            with self._sending, contextlib.suppress(OSError):  # what is on its way arrives first
                (Path(share["to"]) / f"{share['name']}.json").unlink()
        return f"Nothing is shared any more with {share['to']}."

    def _send(self) -> None:
        """Bring what is kept now to where it is shared, if it still is."""
        with self._sending:
            known = self.read()
            if known.get("share"):
                _deliver(known)

    def view(self) -> "View":
        """What `%ranks progress` shows: each lesson of the folder with its exercises."""
        rows: dict[str, dict[str, str]] = {}
        known = self.read()
        if self.notebook is not None:
            for path in sorted(self.notebook.parent.glob("*.ipynb")):
                with contextlib.suppress(exercises.ExerciseError):
                    texts = dict.fromkeys(text for text, *_ in _roles_in(exercises.read(path)).values())
                    done = known["lessons"].get(path.stem, {})
                    if texts:
                        rows[path.stem] = {t: done.get(t, {}).get("state", "") for t in texts}
        return View(rows, known.get("share"), self.problem)


class View:
    """Lessons and their exercises, each solved, tried or not begun; shows as text and as HTML."""

    def __init__(self, rows: Mapping[str, Mapping[str, str]], share: Any, problem: str) -> None:
        self.rows, self.share, self.problem = rows, share, problem

    def _notes(self) -> list[str]:
        notes = []
        if not self.rows:
            notes.append(
                "Exercises are counted in the copies for students (`make student`), opened in JupyterLab."
            )
        if self.problem:
            notes.append(f"Nothing is kept: {self.problem}.")
        if self.share:
            notes.append(
                f"Shared as {self.share['name']} with {self.share['to']}. `%ranks progress private` ends it."
            )
        return notes

    def __repr__(self) -> str:
        width = max(map(len, self.rows), default=0)
        lines = []
        for lesson, states in self.rows.items():
            solved = sum(state == SOLVED for state in states.values())
            marks = " ".join(MARKS[state] for state in states.values())
            done = "  ✓ lesson" if solved == len(states) else ""
            lines.append(f"{lesson:{width}}  {solved} of {len(states)}  {marks}{done}")
        if self.rows:
            lines.append("✓ solved   ✗ tried   · not begun")
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        rows = []
        for lesson, states in self.rows.items():
            solved = sum(state == SOLVED for state in states.values())
            titles = {text: html.escape(f"{text}: {state or 'not begun'}") for text, state in states.items()}
            marks = " ".join(
                f'<span title="{titles[text]}">{MARKS[state]}</span>' for text, state in states.items()
            )
            tick = " ✓" if solved == len(states) else ""
            rows.append(
                f'<tr><td style="text-align:left"><a href="{html.escape(lesson)}.ipynb">{html.escape(lesson)}</a>{tick}'
                f'</td><td>{solved} of {len(states)}</td><td style="text-align:left">{marks}</td></tr>'
            )
        legend = "<div>✓ solved &nbsp; ✗ tried &nbsp; · not begun</div>" if rows else ""
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self._notes())
        return f"<table>{''.join(rows)}</table>{legend}{notes}"


@cache
def of_this_kernel() -> Progress:
    """That of the notebook that Jupyter's server has started this kernel for."""
    name = os.environ.get("JPY_SESSION_NAME", "")
    return Progress(Path(name) if name.endswith(".ipynb") else None)


def line(words: Sequence[str]) -> View | None:
    """`%ranks progress`: which exercises are solved; `share WHERE NAME` sends it, `private` ends that."""
    mine = of_this_kernel()
    if not words:
        return mine.view()
    try:
        if words[0] == "share" and len(words) >= 3:
            print(mine.share(words[1], " ".join(words[2:])))
        elif [*words] == ["private"]:
            print(mine.keep_private())
        else:
            raise ProgressError(
                "write `%ranks progress`, `%ranks progress share FOLDER-OR-ADDRESS NAME`, or "
                "`%ranks progress private`."
            )
    except ProgressError as error:
        raise OptionError(str(error)) from None
    return None


def load(shell: Any) -> None:
    """Follow the cells of this kernel."""
    if getattr(shell, "_rankcell_progress", None) is None:
        shell._rankcell_progress = _after_cell
        shell.events.register("post_run_cell", _after_cell)


def _after_cell(result: Any) -> None:
    """A cell of the notebook has run, with this `result` of IPython's."""
    error = result.error_before_exec or result.error_in_exec
    of_this_kernel().heard(getattr(result.info, "cell_id", None), error)


def _roles_in(cells: list[dict[str, Any]]) -> dict[str, tuple[str, int, int]]:
    found = {}
    for index, cell in enumerate(cells):
        if "exercise" not in exercises.tags(cell):
            continue
        text = exercises.exercise_text(cell)
        checks = exercises.checks_of(cells, index)
        if text and checks:
            for place, at in enumerate([index, *checks], -1):
                found[cells[at].get("id", "")] = (text, place, len(checks))
    return found


def _is_address(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def _deliver(known: Mapping[str, Any]) -> str:
    """Bring what is shared to where it goes; why that failed, or nothing."""
    where, name = known["share"]["to"], known["share"]["name"]
    message = json.dumps(
        {"version": 1, "name": name, "at": int(time.time()), "lessons": known["lessons"]}, ensure_ascii=False
    )
    if not _is_address(where):
        folder = Path(where).expanduser()
        draft = folder / f".{name}.{os.getpid()}.part"
        try:
            draft.write_text(message + "\n", "utf-8")
            draft.replace(folder / f"{name}.json")
        except OSError as error:
            return f"{where} cannot be written to ({error.strerror}). Name a folder that exists, or a room's address."
        return ""
    request = urllib.request.Request(
        where, data=message.encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    # the room is a machine of the same network: a proxy for the internet does not know it
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5):
            return ""
    except urllib.error.HTTPError as error:
        return f"the room at {where} does not take it ({error.code}): is the address whole, key included?"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"no room answers at {where} ({reason}). Does `rankcell room` still run, in the same network?"
