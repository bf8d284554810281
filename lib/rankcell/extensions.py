"""What other parts add to the core, by the words a learner writes: the core imports none of them.

A part that answers to a word has a line in `TABLE`; its module is imported when the word is first used.

    "%ranks WORD"     function(words) -> what the line shows; `words` stand behind WORD
    "rankcell WORD"   function(commands): adds its parser to argparse's sub-commands, with `run=` as a default
    the others        as their comments say
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

TABLE = {
    "%ranks doctor": "doctor:line",
    "%ranks export": "cluster.export:line",
    "%ranks progress": "progress:line",
    "%load_ext rankcell": "progress:load",  # (shell), when the extension is loaded
    "--against": "twin:against",  # (run, model) -> the run with what one process says of it
    "check.against": "against:compare",  # (run, trace, mesh=, names=, rtol=) -> what compares false where they differ
    "rankcell.trace": "engine.trace:Trace",  # (model, optimizer) -> the context that traces, in the notebook
    "rankcell run": "jobs.command:add_command",  # with attach and explain
    "rankcell export": "cluster.export:add_command",
    "rankcell plan": "planner.command:add_command",
    "rankcell doctor": "doctor:add_command",
    "rankcell grade": "grade.command:add_command",
    "rankcell room": "room:add_command",
}


def find(word: str) -> Callable[..., Any]:
    """The function behind a word of the table."""
    module, _, function = TABLE[word].partition(":")
    return getattr(import_module(f"{__package__}.{module}"), function)


def words_of(magic: str) -> list[str]:
    """The words that parts add behind `magic`: "export" of "%ranks"."""
    return [word.removeprefix(f"{magic} ") for word in TABLE if word.startswith(f"{magic} ")]
