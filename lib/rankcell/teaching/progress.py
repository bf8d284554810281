"""A tick for each exercise whose checks have passed, kept in the student's folder, and short errors below open ones.

In a copy for students (`make student`) Jupyter tells the kernel which notebook it belongs to and which cell runs;
`exercises` says which of them is an answer, a check, or builds on an answer. An exercise is solved when all its checks
have passed since its answer last ran. A cell that fails because an exercise above it is open says so in one line. Of
what Jupyter does not tell (a cell that is not saved yet, everything in other editors) the kernel sees the source: the
first line of an exercise, and the names of what builds on it; there the line stands below the traceback. The file is
small and stays where it is:

    {"lessons": {"04_collectives": {"Exercise 1: mend the scatter": "solved"}}}
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from . import exercises, names

FILE = "rankcell-progress.json"


def load(shell: Any) -> None:
    if getattr(shell, "_rankcell_teaching", None) is not None:
        return
    shell._rankcell_teaching = follower = CellFollower(_this_notebook(), shell)
    shell.events.register("pre_run_cell", follower.before)
    shell.events.register("post_run_cell", follower.after)


def line(_: Sequence[str] = ()) -> "ProgressTable":
    """What `%ranks progress` shows: each lesson in the notebook's folder with its exercises."""
    rows: dict[str, dict[str, bool]] = {}
    notebook = _this_notebook()
    for path in sorted(notebook.parent.glob("*.ipynb")) if notebook else ():
        with contextlib.suppress(exercises.ExerciseError):
            roles = roles_in(exercises.read(path)).values()
            done = _kept(path.parent).get(path.stem, {})
            if texts := [role.texts[0] for role in roles if role.kind == "answer"]:
                rows[path.stem] = {text: text in done for text in texts}
    return ProgressTable(rows)


class CellRole(NamedTuple):
    """What a cell of a student's copy is: an "answer", a "check", or "later", one that builds on the exercises."""

    kind: str
    texts: tuple[str, ...]


def roles_in(cells: list[dict[str, Any]]) -> dict[str, CellRole]:
    """Cell id -> role, of a student's copy; none in the course's own notebooks: running a solution solves nothing."""
    found = {}
    for cell in cells:
        kept = cell["metadata"].get("rankcell")
        if isinstance(kept, dict) and isinstance(kept.get("builds_on"), list):
            found[cell["id"]] = CellRole("later", tuple(map(str, kept["builds_on"])))
    for index, cell in enumerate(cells):
        text = exercises.exercise_text(cell) if "exercise" in exercises.tags(cell) else None
        checks = [
            place for place in exercises.checks_of(cells, index) if exercises.CHECK in exercises.tags(cells[place])
        ]
        if text and checks:
            found[cell["id"]] = CellRole("answer", (text,))
            found |= {cells[place]["id"]: CellRole("check", (text,)) for place in checks}
    return found


class CellFollower:
    """Follows the cells of one kernel: keeps ticks, and shortens the errors of cells below an open exercise."""

    def __init__(self, notebook: Path | None, shell: Any) -> None:
        self._notebook, self._shell = notebook, shell
        self._saved, self._roles = 0.0, dict[str, CellRole]()
        self._role: CellRole | None = None  # of the cell that runs
        self._source = ""
        self._ran = dict[str, str | None]()  # source -> the exercise that it answers; what ran last stands last
        self._answers = dict[str, str]()  # exercise -> what is wrong with its latest answer, before any check
        self._passed = dict[str, set[str]]()  # exercise -> its checks that passed since its answer ran

    def before(self, info: Any) -> None:
        """A cell begins: find its role, and show its errors our way only if it has one."""
        if self._notebook is not None:
            with contextlib.suppress(OSError, exercises.ExerciseError):
                saved = self._notebook.stat().st_mtime  # as it was last saved: new cells are known from then on
                if saved != self._saved:
                    self._saved, self._roles = saved, roles_in(exercises.read(self._notebook))
        self._role, self._source = self._roles.get(info.cell_id or ""), info.raw_cell or ""
        self._shell.set_custom_exc((Exception,) if self._role else (), self._show_error)

    def after(self, result: Any) -> None:
        """A cell has ended: note what it says about its exercise, or say which exercise it wants."""
        error = result.error_before_exec or result.error_in_exec
        role = self._role
        answer = role.texts[0] if role and role.kind == "answer" else None
        if not self._roles:
            answer = exercises.exercise_text({"source": self._source, "metadata": {}})
        self._ran.pop(self._source, None)
        self._ran[self._source] = answer
        if answer is not None:
            self._passed[answer] = set()
            self._answers[answer] = self._problem_of(answer, error)
        elif role is None:
            if isinstance(error, Exception) and any(self._answers.values()):  # does it build on an open exercise?
                problems = map(self._answers.get, names.behind(self._ran.items())[-1])
                if problem := next(filter(None, problems), ""):
                    print(f"{problem} This cell builds on it.", file=sys.stderr)
        elif role.kind == "check" and error is None:
            passed = self._passed.setdefault(role.texts[0], set())
            passed.add(result.info.cell_id)
            if all(i in passed for i, other in self._roles.items() if other == role):
                self._note(role.texts[0])

    def _problem_of(self, text: str, error: BaseException | None) -> str:
        name = exercises.short_name(text)
        if exercises.stub_error(text) in self._source:  # in a function, perhaps, which only its check calls
            return f"{name} is not answered yet."
        if error is None:
            return ""
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"The cell of {name} ended with {first.rstrip('.')}. Repair that first."

    def _show_error(self, shell: Any, kind: type, error: BaseException, trace: Any, tb_offset: Any = None) -> None:
        """Show the error of a cell that has a role: one line where that says all, else as IPython does."""
        if line := self._line_instead(error):
            shell._showtraceback(kind, error, [line])
        else:
            compiled = not isinstance(error, SyntaxError)
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=compiled)

    def _line_instead(self, error: BaseException) -> str:
        """The one line that is shown in place of a traceback; empty where the traceback says more."""
        assert self._role is not None
        if self._role.kind == "answer":
            text = self._role.texts[0]
            return self._problem_of(text, error) if exercises.stub_error(text) in self._source else ""
        for text in self._role.texts:
            missing = f"The cell of {exercises.short_name(text)} has not run yet."
            if problem := self._answers.get(text, missing):
                return problem
        own = isinstance(error, AssertionError) and not hasattr(error, "_render_traceback_")
        return f"{type(error).__name__}: {error}" if self._role.kind == "check" and own and str(error) else ""

    def _note(self, text: str) -> None:
        """Keep a tick, for good; a full disk must not cost a student the cell."""
        assert self._notebook is not None
        folder = self._notebook.parent
        known = _kept(folder)
        known.setdefault(self._notebook.stem, {})[text] = "solved"
        draft = folder / f".{FILE}.{os.getpid()}.part"
        try:
            draft.write_text(json.dumps({"lessons": known}, ensure_ascii=False, indent=1) + "\n", "utf-8")
            draft.replace(folder / FILE)
        except OSError as error:
            print(f"{FILE} cannot be written in the notebook's folder ({error.strerror}).", file=sys.stderr)


@dataclass(frozen=True, repr=False)
class ProgressTable:
    """Lessons and their exercises, each solved or open."""

    rows: Mapping[str, Mapping[str, bool]]

    def __repr__(self) -> str:
        if not self.rows:
            return "Exercises are counted in the copies for students (`make student`), opened in JupyterLab."
        width = max(map(len, self.rows))
        lines = []
        for lesson, solved in self.rows.items():
            marks = " ".join("✓" if done else "·" for done in solved.values())
            lines.append(f"{lesson:{width}}  {sum(solved.values())} of {len(solved)}  {marks}")
        return "\n".join([*lines, "✓ solved   · open"])


def _this_notebook() -> Path | None:
    """The notebook that Jupyter's server has started this kernel for, if it has said so."""
    name = os.environ.get("JPY_SESSION_NAME", "")
    return Path(name) if name.endswith(".ipynb") else None


def _kept(folder: Path) -> dict[str, dict[str, str]]:
    """Lesson -> its solved exercises; nothing where nothing can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        lessons = json.loads((folder / FILE).read_text("utf-8"))["lessons"]
        return {lesson: dict.fromkeys(of, "solved") for lesson, of in lessons.items()}
    return {}
