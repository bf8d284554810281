"""The process of a session, which `sandbox` starts: it runs the cells that the grader sends, in one IPython. An order
is a line of JSON on what was standard input: a list of cells, run until one fails. The answer, how they ended, is a
line on what was standard output. What the cells print goes nowhere.
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
        place, error = -1, ""
        for code in json.loads(line):
            place += 1
            if error := _error_of(shell.run_cell(code, store_history=True)):
                break
        if os.getpid() != process:  # a copy that the cells have made of it
            os._exit(0)
        skipped = bool(re.search(r"(?m)^Skipped: ", output.text))
        answers.write(json.dumps({"error": error, "place": place, "skipped": skipped}) + "\n")
        answers.flush()


def _error_of(result: Any) -> str:
    """The error of a cell as the student reads it, without the lines of code around it; empty if there was none."""
    if (error := result.error_before_exec or result.error_in_exec) is None:
        return ""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an answer may raise an error that cannot be shown
        text = type(error).__name__
    return _ESCAPES.sub("", text)[:_TOLD].encode("utf-8", "replace").decode()


if __name__ == "__main__":
    main()
