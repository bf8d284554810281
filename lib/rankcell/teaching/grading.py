"""From submissions to judgements: each notebook in sessions of its own, several notebooks at a time.

A session runs the lesson's own cells. Where an exercise comes, it runs the student's answer and the lesson's checks,
notes what became of them, and goes on with the lesson's solution: a wrong answer costs no later one. A session that a
limit has ended, or that an answer has spoilt so that the lesson's cells fail, is begun anew; an answer that fails
behind another one that failed is judged once more without it.

The course's own solutions are judged first, in the same way. Where one does not pass on this machine (no Slurm, say),
nobody's answer is judged; how long it takes is added to what an answer may take.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from .exercises import Exercise, ExerciseError, Lesson, is_code, tags
from .reports import FAILED, NOT_JUDGED, PASSED, UNTOUCHED, Judgement
from .sandbox import Attempt, Session
from .submissions import Submission

_LESSON_SECONDS = 240.0  # for the course's own cells between two exercises: generous, they are known to end
_SOLUTION_SECONDS = 120.0


class GradeError(Exception):
    """Why nothing can be judged, in words for whoever grades."""


class Playback:
    """A lesson from its first cell on, answers judged where its exercises stand; `begin` starts a session for it."""

    def __init__(self, lesson: Lesson, begin: Callable[[], Session], given_up: Callable[[], bool]) -> None:
        self._lesson, self._begin, self._given_up = lesson, begin, given_up
        self._session: Session | None = None
        self._place = 0  # the next cell to run
        self._spoilt = False  # whether an answer has failed in this session

    def judge(self, exercise: Exercise, answer: Sequence[str], seconds: float) -> Attempt:
        """How the answer and its checks fare; `limit` is "lesson" where the cells before it fail, whatever it does."""
        for _ in range(2):
            failed_before = self._spoilt
            self._session = session = self._session or self._begin()
            if problem := self._advance(session, exercise.index):
                attempt = Attempt(f"the cells before the exercise fail: {problem}", limit="lesson")
            else:
                checks = [self._lesson.cells[i]["source"] for i in exercise.checks]
                attempt = session.run([*answer, *checks], seconds, self._given_up)
                self._spoilt |= bool(attempt.error)
            again = attempt.limit == "lesson" or (attempt.error and failed_before)
            if again or attempt.limit:
                self.close()
            if not again:
                break
        return attempt

    def _advance(self, session: Session, to: int) -> str:
        """Run the lesson's cells up to place `to`: the error of one that failed where it should not, if any did."""
        places = [i for i in range(self._place, to) if is_code(self._lesson.cells[i])]
        self._place = to
        while places:
            cells = [self._lesson.cells[i]["source"] for i in places]
            attempt = session.run(cells, _LESSON_SECONDS, self._given_up)
            deliberate = "raises-exception" in tags(self._lesson.cells[places[attempt.place]])
            if attempt.limit or (attempt.error and not deliberate):
                return attempt.error
            places = places[attempt.place + 1 :]
        return ""

    def close(self) -> None:
        """End the session; the next answer gets another one."""
        if self._session is not None:
            self._session.close()
        self._session, self._place, self._spoilt = None, 0, False


class Grader:
    """Judges submissions to the lessons of a course.

    Args:
        seconds: what an answer and its checks may take beyond twice what the course's own solution takes.
        jobs: how many notebooks are judged at a time.
        walled: whether sessions run behind bubblewrap.
    """

    def __init__(self, course: Path, lessons: Sequence[Lesson], *, seconds: float, jobs: int, walled: bool) -> None:
        self._course, self._lessons = course, {lesson.name: lesson for lesson in lessons}
        self._seconds, self._jobs, self._walled = seconds, jobs, walled
        self._stopped = threading.Event()
        self._own: dict[str, dict[int, Attempt]] = {}  # lesson -> how its own solutions fare, by place

    def grade(self, found: Sequence[Submission], tell: Callable[[Submission], None]) -> list[Judgement]:
        """Judge all answers; `tell` hears of each notebook that is judged. Ctrl-C ends all sessions."""
        begun: dict[str, set[int]] = {}
        for one in found:
            if answers := self._answers(one):
                begun.setdefault(one.lesson, set()).update(answers)

        def judged(one: Submission) -> list[Judgement]:
            judgements = self._judgements(one)
            tell(one)
            return judgements

        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                own = {name: pool.submit(self._own_solutions, name, places) for name, places in begun.items()}
                self._own = {name: task.result() for name, task in own.items()}
                tasks = [pool.submit(judged, one) for one in found]
                return [judgement for task in tasks for judgement in task.result()]
            except KeyboardInterrupt:
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _answers(self, one: Submission) -> dict[int, list[str]]:
        """The answers that were begun: not those that are missing, or still the stub."""
        exercises = self._lessons[one.lesson].exercises if one.answers else []
        found = {e.index: one.answers.get(e.index, []) for e in exercises}
        stubs = {e.index: [e.stub.strip()] for e in exercises}
        return {at: cells for at, cells in found.items() if [c.strip() for c in cells] not in ([], stubs[at])}

    def _own_solutions(self, name: str, places: set[int]) -> dict[int, Attempt]:
        answers = {e.index: [e.solution] for e in self._lessons[name].exercises if e.index in places}
        return self._attempts(name, answers, dict.fromkeys(answers, _SOLUTION_SECONDS))

    def _attempts(
        self, name: str, answers: Mapping[int, Sequence[str]], seconds: Mapping[int, float]
    ) -> dict[int, Attempt]:
        if not answers:
            return {}

        def begin() -> Session:
            return Session(walled=self._walled, recorded=self._course / "recorded")

        with closing(Playback(self._lessons[name], begin, self._stopped.is_set)) as playback:
            return {
                e.index: playback.judge(e, answers[e.index], seconds[e.index])
                for e in self._lessons[name].exercises
                if e.index in answers and not self._stopped.is_set()
            }

    def _judgements(self, one: Submission) -> list[Judgement]:
        if one.problem:
            return [Judgement(one.student, one.lesson, "the notebook", NOT_JUDGED, one.problem)]
        answers, own = self._answers(one), self._own.get(one.lesson, {})
        seconds = {at: self._seconds + 2 * own[at].seconds for at in answers if not _problem(own[at])}
        attempts = self._attempts(one.lesson, {at: answers[at] for at in seconds}, seconds)
        found = []
        for exercise in self._lessons[one.lesson].exercises:
            at, status, feedback = exercise.index, UNTOUCHED, ""
            if at in attempts:
                feedback = attempts[at].error
                status = NOT_JUDGED if attempts[at].limit == "lesson" else FAILED if feedback else PASSED
            elif at in answers:
                status, feedback = NOT_JUDGED, _problem(own[at])
            found.append(Judgement(one.student, one.lesson, exercise.text, status, feedback))
        return found


def _problem(own: Attempt) -> str:
    """Why nobody's answer can be judged here, by how the course's own solution fared; empty if it passed."""
    if own.skipped:
        return "a cell that its checks need is skipped on this machine"
    return f"the course's own solution fails on this machine: {own.error}" if own.error else ""


def lessons_of(folder: Path) -> list[Lesson]:
    """The lessons of a course that have exercises. Raises GradeError where there are none."""
    try:
        found = [Lesson(path) for path in sorted(folder.glob("*.ipynb"))]
    except ExerciseError as error:
        raise GradeError(str(error)) from None
    found = [lesson for lesson in found if lesson.exercises]
    if not found:
        raise GradeError(f"{folder} holds no lesson with solutions. --course names the course's own notebooks.")
    return found
