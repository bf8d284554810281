"""From a folder of notebooks to judgements: each in sessions of its own, several notebooks at a time.

A session runs the lesson's own cells. Where an exercise comes, it runs the student's answer and the lesson's checks,
notes what became of them, and goes on with the lesson's solution: a wrong answer costs no later one. A session that a
limit has ended, or that an answer has spoilt so that the lesson's cells fail, is begun anew; an answer that fails
behind another one that failed is judged once more without it.

The course's own solutions are judged first, in the same way. Where one does not pass on this machine (no Slurm, say),
nobody's answer is judged; how long it takes is added to what an answer may take.
"""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from .exercises import Exercise, ExerciseError, Lesson, is_code, read, tags
from .sandbox import Attempt, Session

PASSED, FAILED, UNTOUCHED, NOT_JUDGED = "passed", "failed", "not begun", "not judged"
_LESSON_SECONDS = 240.0  # for the course's own cells between two exercises: generous, they are known to end
_SOLUTION_SECONDS = 120.0


class Submission(NamedTuple):
    """One notebook of one student: the answers that were begun, by the place of the lesson's solution."""

    student: str
    lesson: str
    answers: dict[int, list[str]]
    problem: str = ""  # why it could not be read


class Judgement(NamedTuple):
    """One exercise of one student: `status`, and the feedback that the student would read."""

    student: str
    lesson: str
    exercise: str
    status: str
    feedback: str = ""


def submissions(folder: Path, lessons: Sequence[Lesson], tell: Callable[[str], None]) -> list[Submission]:
    """The notebooks of lessons in `folder`, by student and lesson; `tell` hears what is left out. Nothing is run.

    A notebook's lesson is told by its name, or by its cells' ids. A student is the first folder in `folder` on the way
    to the notebook; of notebooks in `folder` itself it is what the file's name has besides that of the lesson, and the
    name of `folder` if that is nothing. Of several copies of a lesson the one that was saved last counts, of those that
    were begun.
    """
    found: list[tuple[bool, float, Path, Submission]] = []
    for path in sorted(path for path in folder.rglob("*.ipynb") if path.is_file()):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts):
            continue
        if (lesson := _lesson_of(path, lessons)) is None:
            tell(f"{inside} is left out: it is no lesson with exercises")
            continue
        answers, problem = dict[int, list[str]](), ""
        try:
            answers = lesson.begun(read(path))
        except ExerciseError as error:
            problem = str(error)
        rest = re.sub(r"^[\W_]+|[\W_]+$", "", inside.stem.replace(lesson.name, ""))
        name = inside.parts[0] if len(inside.parts) > 1 else rest or folder.resolve().name
        student = "".join(c if c.isprintable() else "?" for c in name)
        one = Submission(student, lesson.name, answers, problem)
        found.append((bool(answers), path.stat().st_mtime, inside, one))
    counts = dict[tuple[str, str], tuple[Path, Submission]]()
    for _, _, inside, one in sorted(found, key=lambda entry: entry[:3]):
        if (earlier := counts.get(one[:2])) is not None:
            tell(f"{earlier[0]} is left out: {inside} counts")
        counts[one.student, one.lesson] = inside, one
    students = {one.student for _, one in counts.values()}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in students and not path.name.startswith("."):
            tell(f"{path.name} has no notebook of the course")
    return [counts[key][1] for key in sorted(counts)]


def _lesson_of(path: Path, lessons: Sequence[Lesson]) -> Lesson | None:
    if (named := next((one for one in lessons if one.name in path.stem), None)) is not None:
        return named
    with suppress(ExerciseError):
        ids = {cell["id"] for cell in read(path)} - {""}
        return next((one for one in lessons if 2 * sum(c["id"] in ids for c in one.cells) > len(one.cells)), None)
    return None


class Playback:
    """A lesson from its first cell on, answers judged where its exercises stand; `begin` starts a session for it."""

    def __init__(self, lesson: Lesson, begin: Callable[[], Session], given_up: Callable[[], bool]) -> None:
        self._lesson, self._begin, self._given_up = lesson, begin, given_up
        self._session: Session | None = None
        self._place = 0  # the next cell to run
        self._spoilt = False  # whether an answer has failed in this session

    def judge(self, exercise: Exercise, answer: Sequence[str], seconds: float) -> Attempt:
        """How the answer and its checks fare; it is not `judged` where the cells before it fail, whatever it does."""
        names = _named(exercise.solution)
        for _ in range(2):
            failed_before = self._spoilt
            self._session = session = self._session or self._begin()
            if problem := self._advance(session, exercise.index):
                attempt = Attempt(f"the cells before the exercise fail: {problem}", judged=False)
            else:
                checks = [self._lesson.cells[i]["source"] for i in exercise.checks]
                cells = [*answer, *checks]
                attempt = session.run(cells, seconds, self._given_up, may_fail=len(answer), forget=names)
                self._spoilt |= bool(attempt.error)
                if any(attempt.error == f"NameError: name '{name}' is not defined" for name in names):
                    keep = f"{attempt.error} Its first line has to keep `{exercise.solution.splitlines()[0]}`."
                    attempt = attempt._replace(error=keep)
            again = not attempt.judged or (attempt.error and failed_before)
            if again or attempt.over:
                self.close()
            if not again:
                break
        return attempt

    def _advance(self, session: Session, to: int) -> str:
        """Run the lesson's cells up to place `to`: the error of one that failed where it should not, if any did."""
        places = [i for i in range(self._place, to) if is_code(self._lesson.cells[i])]
        self._place = to
        while places:
            attempt = session.run([self._lesson.cells[i]["source"] for i in places], _LESSON_SECONDS, self._given_up)
            deliberate = "raises-exception" in tags(self._lesson.cells[places[attempt.place]])
            if attempt.over or (attempt.error and not deliberate):
                return attempt.error
            places = places[attempt.place + 1 :]
        return ""

    def close(self) -> None:
        """End the session; the next answer gets another one."""
        if self._session is not None:
            self._session.close()
        self._session, self._place, self._spoilt = None, 0, False


class Grader:
    """Judges submissions to the lessons of a course, `jobs` notebooks at a time, behind bubblewrap if `walled`. An
    answer and its checks may take `seconds` beyond twice what the course's own solution takes.
    """

    def __init__(self, course: Path, lessons: Sequence[Lesson], *, seconds: float, jobs: int, walled: bool) -> None:
        self._lessons = {lesson.name: lesson for lesson in lessons}
        self._begin = lambda: Session(walled=walled, recorded=course / "recorded")
        self._seconds, self._jobs = seconds, jobs
        self._stopped = threading.Event()
        self._own: dict[str, dict[int, Attempt]] = {}  # lesson -> how its own solutions fare, by place

    def grade(self, found: Sequence[Submission], tell: Callable[[Submission], None]) -> list[Judgement]:
        """Judge all answers; `tell` hears of each notebook that is judged. Ctrl-C ends all sessions: `interrupted`."""
        begun = {one.lesson: set[int]() for one in found}
        for one in found:
            begun[one.lesson] |= one.answers.keys()

        def solved(name: str) -> dict[int, Attempt]:
            own = {e.index: [e.solution] for e in self._lessons[name].exercises if e.index in begun[name]}
            return self._attempts(name, {at: (cells, _SOLUTION_SECONDS) for at, cells in own.items()})

        done = dict[tuple[str, str], list[Judgement]]()

        def judge(one: Submission) -> None:
            judgements = self._judgements(one)
            if not self.interrupted:
                done[one.student, one.lesson] = judgements
                tell(one)

        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                self._own = dict(zip(begun, pool.map(solved, begun), strict=True))
                list(pool.map(judge, found))
            except KeyboardInterrupt:
                self._stopped.set()
        return [judgement for one in found for judgement in done.get(one[:2]) or self._open(one)]

    @property
    def interrupted(self) -> bool:
        return self._stopped.is_set()

    def _open(self, one: Submission) -> list[Judgement]:
        """What is said of a notebook when the judging was interrupted."""
        if one.problem:
            return self._judgements(one)
        exercises = self._lessons[one.lesson].exercises
        begun = {e.text: NOT_JUDGED if e.index in one.answers else UNTOUCHED for e in exercises}
        return [
            Judgement(*one[:2], text, status, "interrupted" * (status == NOT_JUDGED)) for text, status in begun.items()
        ]

    def _attempts(self, name: str, answers: Mapping[int, tuple[Sequence[str], float]]) -> dict[int, Attempt]:
        """How answers fare that may take so many seconds, by the places of their exercises."""
        with closing(Playback(self._lessons[name], self._begin, self._stopped.is_set)) as playback:
            answered = (e for e in self._lessons[name].exercises if e.index in answers)
            return {e.index: playback.judge(e, *answers[e.index]) for e in answered if not self._stopped.is_set()}

    def _judgements(self, one: Submission) -> list[Judgement]:
        if one.problem:
            return [Judgement(one.student, one.lesson, "the notebook", NOT_JUDGED, one.problem)]
        own = self._own[one.lesson]
        seconds = {at: self._seconds + 2 * own[at].seconds for at in one.answers if not _problem(own[at])}
        attempts = self._attempts(one.lesson, {at: (one.answers[at], limit) for at, limit in seconds.items()})
        found = []
        for exercise in self._lessons[one.lesson].exercises:
            at, status, feedback = exercise.index, UNTOUCHED, ""
            if at in attempts:
                feedback = attempts[at].error
                status = NOT_JUDGED if not attempts[at].judged else FAILED if feedback else PASSED
            elif at in one.answers:
                status, feedback = NOT_JUDGED, _problem(own[at])
            found.append(Judgement(one.student, one.lesson, exercise.text, status, feedback))
        return found


def _named(solution: str) -> list[str]:
    """The names that a solution's first line sets in the notebook: none of an earlier cell may be judged."""
    first = solution.split("\n")[0] if solution.startswith("%%ranks") else ""
    return [name for names in re.findall(r"(?:-o|--out|--pull)[ =](\S+)", first) for name in names.split(",")]


def _problem(own: Attempt) -> str:
    """Why nobody's answer can be judged here, by how the course's own solution fared; empty if it passed."""
    if own.skipped:
        return "a cell that its checks need is skipped on this machine"
    return f"the course's own solution fails on this machine: {own.error}" if own.error else ""
