"""What other parts add to the core, by the words a learner writes: the core imports none of them.

A part that answers to a word has a line in `TABLE`; its module is imported when the word is first used.

    "%ranks WORD"     function(words) -> what the line shows; `words` stand behind WORD
    "rankcell WORD"   function(commands): adds its parser to argparse's sub-commands, with `run=` as a default
    the others        as their comments say
"""

from importlib import import_module
from typing import Any

TABLE = {
    "%ranks doctor": "doctor:line",
    "%ranks progress": "teaching.progress:line",
    "--nodes": "nodes.allocation:Nodes",  # (world_size, nodes, device) -> the host of the world
    "check.against": "compare.judge:compare",
    "rankcell.memory": "observers.meter:measure",
    "rankcell.spans": "observers.spans:spans",
    "rankcell.trace": "compare.trace:of",
    "before a mismatch": "jobs.verdict:parted_before",  # run -> where the ranks went apart, in a sentence, or ""
    "rankcell run": "jobs.command:add_command",  # with explain
    "rankcell doctor": "doctor:add_command",
    "rankcell grade": "teaching.command:add_command",
}


def find(word: str) -> Any:
    """What stands behind a word of the table: a function, or a class."""
    module, _, function = TABLE[word].partition(":")
    return getattr(import_module(f"{__package__}.{module}"), function)


def words_of(magic: str) -> list[str]:
    """The words that parts add behind `magic`: "doctor" of "%ranks"."""
    return [word.removeprefix(f"{magic} ") for word in TABLE if word.startswith(f"{magic} ")]
