"""One answer in a process of its own: the cells it needs, the answer, the course's checks.

This runs in a fork of a process that has torch, IPython and rankcell loaded (`stage.py`), inside the walls of
`sandbox.py`. It writes lines of JSON to a pipe: `ready` when the cells before the exercise have run, `over` with what
became of the answer. An answer and its checks share a process, as in any notebook: what an answer changes in the
modules of rankcell is put back before its checks run, but code that is written to deceive its judge can do so.
"""

import builtins
import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell

from .. import check, source
from ..results import Run
from ..schedules import actions_of, idle_share

_TERMINAL = re.compile(r"\x1b\[[0-9;]*m")  # colours
_TOLD = 2000  # characters of an error that travel


class _Heard:
    """Standard output of the notebook: a flood costs nothing, the beginning is kept to see what was skipped."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        """Keep the beginning."""
        if len(self.text) < 1 << 16:
            self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""

    def isatty(self) -> bool:
        """It is no terminal."""
        return False

    def fileno(self) -> int:
        """What programs that want a descriptor write to goes nowhere."""
        return 1


def run(order: Mapping[str, Any], pipe: int) -> None:
    """Judge the answer of `order`, tell it to `pipe`, and end the process."""
    process = os.getpid()
    heard = _Heard()
    sys.stdout = sys.stderr = heard  # type: ignore[assignment]
    HistoryManager.enabled = False  # type: ignore[assignment]
    shell = InteractiveShell.instance(colors="nocolor")
    deliberate = set(order["deliberate"])
    for place, code in enumerate(order["context"]):
        error = _error_of(shell, code)
        if error and place not in deliberate:
            _tell(pipe, what="over", passed=False, where="context", error=error)
            os._exit(0)
    _tell(pipe, what="ready")
    heard.text = ""
    before = {id(value) for value in shell.user_ns.values() if isinstance(value, Run)}
    names = set(shell.user_ns)
    modules = _ours()
    error, where, last = "", "answer", None
    for code in order["answer"]:
        if error := _error_of(shell, code):
            break
    if not error:
        where = "check"
        _put_back(shell, names, modules, set(order["binds"]))
        for code in order["checks"]:
            result = shell.run_cell(code, store_history=True)
            if error := _spelled(result):
                break
            last = result.result if isinstance(result.result, check.Verdict) else last
    if os.getpid() != process:  # a copy that the answer has made of itself
        os._exit(0)
    skipped = not error and bool(re.search(r"(?m)^Skipped: ", heard.text))
    runs = {n: v for n, v in shell.user_ns.items() if isinstance(v, Run) and id(v) not in before}
    measured = {} if error or skipped else _measured(order, runs, last)
    _tell(pipe, what="over", passed=not error, where=where, error=error, skipped=skipped, measured=measured)
    os._exit(0)


def _error_of(shell: InteractiveShell, code: str) -> str:
    return _spelled(shell.run_cell(code, store_history=True))


def _spelled(result: Any) -> str:
    """The error of a cell as the learner reads it, without the lines of code around it; empty if there was none."""
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return ""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an answer may raise an error that cannot be shown
        text = type(error).__name__
    return _TERMINAL.sub("", text)[:_TOLD]


def _ours() -> dict[str, dict[str, Any]]:
    """What the modules of rankcell hold."""
    return {
        n: dict(vars(m)) for n, m in sys.modules.items() if n.split(".")[0] == "rankcell" and m is not None
    }


def _put_back(
    shell: InteractiveShell, names: set[str], modules: Mapping[str, dict[str, Any]], binds: set[str]
) -> None:
    """Checks find the modules of rankcell, the names for them and Python's own functions as the course has them."""
    for name, held in modules.items():
        module = sys.modules.get(name)
        for key, value in held.items():
            if module is not None and callable(value) and vars(module).get(key) is not value:
                setattr(module, key, value)
    shell.user_ns["check"] = check
    for name in [n for n in shell.user_ns if hasattr(builtins, n) and n not in names | binds]:
        del shell.user_ns[name]


def _measured(
    order: Mapping[str, Any], runs: Mapping[str, Run], verdict: check.Verdict | None
) -> dict[str, float]:
    """What the checks measured, and what the ranks did in the answer's own run: numbers for a board."""
    found: dict[str, float] = {}
    for code in [order["solution"], *order["checks"]]:
        name = _run_named_by(code)
        if name in runs:
            with contextlib.suppress(Exception):
                found = _of_run(runs[name])
            break
    return {**found, **(dict(verdict.measured) if verdict else {})}


def _run_named_by(code: str) -> str:
    words = code.partition("\n")[0].split()
    if words[:1] != ["%%ranks"]:
        return ""
    try:
        return (source.parse(words[1:]).out or [""])[0]
    except Exception:  # noqa: BLE001 - argparse has several
        return ""


def _of_run(run: Run) -> dict[str, float]:
    """Communication calls of the rank that has most, bytes of all ranks' calls, and what else the run recorded."""
    calls: dict[int, int] = {}
    nbytes = 0
    for event in run.events:
        if event.kind == "comm":
            calls[event.rank] = calls.get(event.rank, 0) + 1
            nbytes += event.nbytes
    found: dict[str, float] = {}
    if calls:
        found = {"calls": max(calls.values()), "bytes": nbytes}
    if actions_of(run.events):
        found["idle share"] = round(idle_share(run.events), 4)
    peaks = [r.peak.total for r in run.ranks if r.peak is not None]
    if peaks:
        found["peak bytes"] = max(peaks)
    return found


def _tell(pipe: int, **what: Any) -> None:
    data = (json.dumps(what) + "\n").encode()
    while data:
        data = data[os.write(pipe, data) :]
