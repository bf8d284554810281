"""What teachers and students have beside the lessons: exercises, ticks, and the judging of a class.

It uses rankcell as a lesson does; nothing else of the library needs it. It is no learning management system: no
accounts, no server, no marks beyond passed and failed, and no defence against a student who sets out to deceive.
"""

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext rankcell.teaching`, which `make student` writes into copies: ticks, and short errors."""
    from . import progress

    progress.load(shell)
