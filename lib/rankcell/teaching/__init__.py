"""What teachers and students have beside the lessons: exercises, ticks, and the judging of a class.

    exercises      which cells of a notebook are an exercise, its stub and its checks
    names          which cells build on an exercise
    progress       ticks in a student's folder (`%ranks progress`), and short errors below an open exercise
    command        `rankcell grade FOLDER`: the notebooks of many students, judged by the course's own checks
      grading      notebooks by student and lesson; each in sessions of its own: its answers and their checks
      sandbox      the process of a session: what it may take, and the walls around it
      session      what runs in there

It uses rankcell as a lesson does; nothing else of the library needs it. It is no learning management system: no
accounts, no server, no marks beyond passed and failed, and no defence against a student who sets out to deceive.
"""

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext rankcell.teaching`, which `make student` writes into copies: ticks, and short errors."""
    from . import progress

    progress.load(shell)
