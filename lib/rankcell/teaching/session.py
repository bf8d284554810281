"""The process of a session, which `sandbox` starts: it runs the cells that the grader sends, in one IPython. An order
is a line of JSON on what was standard input: cells, run until one fails; how many of them may fail (the student's: a
first attempt that was left there costs nothing), unless all of these do; and names that are to be gone before. The
answer, how they ended, is a line on what was standard output. What the cells print goes nowhere.
"""

import io
import json
import os
import re
import resource
import sys
from typing import Any

from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell

from ..engine import system

_FILE_BYTES = 1 << 29  # of one file
_KEPT = 1 << 16  # characters of output that are kept, to see what was skipped
_TOLD = 2000  # characters of an error that travel
_OURS = re.compile(r'File "<cell \d+>", ')  # that number counts cells of the session, not of the notebook
_ESCAPES = re.compile("\x1b\\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Output(io.TextIOBase):
    """Standard output and error of the cells: a flood costs nothing."""

    text = ""

    def write(self, text: str) -> int:
        if len(self.text) < _KEPT:
            self.text += text[:_KEPT]
        return len(text)

    def fileno(self) -> int:
        return 1  # for programs that want a descriptor: it leads nowhere


def main() -> None:
    """Serve the grader until it closes the pipe."""
    system.die_with_parent()
    _serve_in_a_child()
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.nice(5)  # whoever watches comes first
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    HistoryManager.enabled = False  # type: ignore[assignment]
    shell = InteractiveShell.instance(colors="nocolor")
    process = os.getpid()
    for line in orders:
        sys.stdout = sys.stderr = output = _Output()  # type: ignore[assignment]
        cells, may_fail, forget = json.loads(line)
        for name in forget:
            shell.user_ns.pop(name, None)
        place, error, own = -1, "", list[str]()
        for place, code in enumerate(cells):
            failed = _error_of(shell.run_cell(code, store_history=True))
            if failed and (place >= may_fail or len(own) == may_fail - 1):
                error = failed + (f" (A cell of the answer ended with {own[-1]})" if own and place >= may_fail else "")
                break
            own += [failed] * bool(failed)
        if os.getpid() != process:  # a copy that the cells have made of it
            os._exit(0)
        skipped = bool(re.search(r"(?m)^Skipped: ", output.text))
        answers.write(json.dumps({"error": error, "place": place, "skipped": skipped}) + "\n")
        answers.flush()


def _serve_in_a_child() -> None:
    """Go on in a child, and end as it ends: cells that kill their parent kill this process, and not the grader."""
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    system.die_with_parent()


def _error_of(result: Any) -> str:
    """The error of a cell as the student reads it, without the lines of code around it; empty if there was none."""
    if (error := result.error_before_exec or result.error_in_exec) is None:
        return ""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an answer may raise an error that cannot be shown
        text = type(error).__name__
    return _OURS.sub("", _ESCAPES.sub("", text))[:_TOLD].encode("utf-8", "replace").decode()


if __name__ == "__main__":
    main()
