"""From submissions to judgements: an order for each answer, several at a time.

The course's own solution of each exercise is judged first, in the same way: where it does not pass on this machine
(no Slurm, say), nobody is judged; how long it takes is added to what an answer may take; and it says whether the few
cells that define what the exercise uses are enough, or those that change it, or all cells above, must run before.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import exercises
from ..exercises import Exercise, Lesson
from . import results, sandbox
from .submissions import Submission

_OWN_SECONDS = 120.0  # for the course's own solution: it is known to end
_INTERRUPTED = "the judging was interrupted before this answer was judged"
_PASS_ON = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from rankcell.grade import stage; stage.main(int(sys.argv[1]))"
)


class GradeError(Exception):
    """Why nothing can be judged, in words for whoever grades."""


class Stage:
    """The process that answers are forked from. Safe to use from several threads; started anew if it is lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asks: socket.socket | None = None
        self._waiting: set[socket.socket] = set()  # one for each answer that is being judged
        self._ended = False
        self.sealing = sandbox.Sealing(False, False)

    def start(self) -> None:
        """Start it and wait until it has imported torch (seconds)."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PASS_ON, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the grader, who then ends it
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else None,
            )
        line = ours.makefile("rb").readline()
        if not line:
            raise GradeError("the process that answers are forked from ended: does `import torch` work here?")
        self.sealing = sandbox.Sealing(**json.loads(line))
        self._asks = ours

    def judge(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """What became of one order; `lost` is in it if its keeper was ended, by whomever."""
        lost = {"passed": False, "where": "answer", "error": "its judge was ended", "lost": True}
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                for _ in range(2):
                    if self._ended:  # perhaps just now: then nothing is started anew
                        return lost
                    try:
                        if self._asks is None:
                            self.start()
                        assert self._asks is not None
                        socket.send_fds(self._asks, [b"j"], [theirs.fileno()])
                        self._waiting.add(ours)
                        break
                    except OSError:
                        self._close()
            try:
                ours.sendall(json.dumps(order).encode() + b"\n")
                with ours.makefile("rb") as file:
                    line = file.readline()
                    file.read()  # until its keeper is gone, too
            except OSError:
                line = b""
            with self._lock:
                self._waiting.discard(ours)
        if not line:
            return lost
        return dict(json.loads(line))

    def close(self) -> None:
        """End it for good. Answers that are being judged are given up: each is `lost` as soon as it is ended."""
        self._ended = True
        with self._lock:  # no thread is about to start another one
            for one in self._waiting:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_WR)  # its keeper sees that, ends the answer, and says so
            self._close()

    def _close(self) -> None:
        if self._asks is not None:
            self._asks.close()
            self._asks = None
        if self._process is not None:
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


@dataclass(frozen=True)
class _Context:
    """What must run before an exercise, as its own solution has shown: "few", "more" or "all" cells."""

    extent: str
    seconds: float = 0.0  # what the solution and its checks took
    problem: str = ""


class Grader:
    """Judges submissions to the lessons of a course.

    Args:
        seconds: what an answer and its checks may take beyond twice what the course's own solution takes.
        jobs: how many answers are judged at a time.
    """

    def __init__(
        self,
        lessons: Sequence[Lesson],
        *,
        seconds: float = 10.0,
        jobs: int = 2,
        limits: sandbox.Limits | None = None,
    ) -> None:
        self.lessons = {lesson.name: lesson for lesson in lessons}
        self.seconds, self.jobs, self.limits = seconds, jobs, limits or sandbox.Limits()
        self.stage = Stage()
        self.interrupted = False
        self._contexts: dict[tuple[str, int], _Context] = {}

    def grade(
        self, submissions: Sequence[Submission], tell: Callable[[results.Judgement], None] = lambda _: None
    ) -> list[results.Judgement]:
        """Judge all answers; `tell` hears of each judgement when it is made.

        Ctrl-C ends it: what was not judged until then says so, and `interrupted` is True. A KeyboardInterrupt is raised
        only where no answer was judged.
        """
        work = [
            (s, e)
            for s in submissions
            for e in (self.lessons[s.lesson].exercises if s.lesson in self.lessons else ())
        ]
        begun = {(e.lesson, e.index): e for s, e in work if not s.problem and not _untouched(s, e)}
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                self.stage.start()
                self._contexts = dict(zip(begun, pool.map(self.context, begun.values()), strict=True))
                judged = [pool.submit(self._judge, s, e, tell) for s, e in work]
                try:
                    wait(judged)
                    found = self._again(work, [one.result() for one in judged], tell)
                except KeyboardInterrupt:
                    self.interrupted = True
                    self.stage.close()
                    found = self._again(work, [one.result() for one in judged], tell)
                    if not any(verdict for _, verdict in found):
                        raise
            finally:
                self.stage.close()
        unread = [
            results.Judgement(s.student, s.lesson, "the notebook", results.FAILED, s.problem)
            for s in submissions
            if s.problem and s.lesson not in self.lessons
        ]
        return [judgement for judgement, _ in found] + unread

    def context(self, exercise: Exercise) -> _Context:
        """How the course's own solution fares: with few of the cells above, with more, with all."""
        verdict: dict[str, Any] = {}
        for extent in ("few", "more", "all"):
            verdict = self.stage.judge(self._order(exercise, [exercise.solution], extent, _OWN_SECONDS))
            if verdict.get("skipped"):
                return _Context(extent, problem="a cell that its checks need is skipped on this machine")
            if verdict["passed"]:
                return _Context(extent, verdict["seconds"])
        return _Context("all", problem=f"the course's own solution fails on this machine: {verdict['error']}")

    def _order(
        self, exercise: Exercise, answer: Sequence[str], extent: str, seconds: float
    ) -> dict[str, Any]:
        lesson = self.lessons[exercise.lesson]
        if extent == "all":
            context = lesson.before(exercise)
        else:
            context = lesson.needs(exercise, answer, changes=extent == "more")
        cells = [lesson.cells[i] for i in context]
        return {
            "context": [cell["source"] for cell in cells],
            "deliberate": [k for k, cell in enumerate(cells) if "raises-exception" in exercises.tags(cell)],
            "answer": list(answer),
            "checks": [lesson.cells[i]["source"] for i in exercise.checks],
            "solution": exercise.solution,
            "binds": sorted(exercises.binds(exercise.solution)),
            "seconds": seconds,
            "limits": asdict(self.limits),
        }

    def _judge(
        self, submission: Submission, exercise: Exercise, tell: Callable[[results.Judgement], None]
    ) -> tuple[results.Judgement, dict[str, Any]]:
        def concluded(status: str, feedback: str = "", **more: Any) -> results.Judgement:
            found = results.Judgement(
                submission.student, submission.lesson, exercise.text, status, feedback, **more
            )
            tell(found)
            return found

        if submission.problem:
            return concluded(results.FAILED, submission.problem), {}
        if _untouched(submission, exercise):
            return concluded(results.UNTOUCHED), {}
        if self.interrupted:
            return concluded(results.NOT_JUDGED, _INTERRUPTED), {}
        context = self._contexts[exercise.lesson, exercise.index]
        if context.problem:
            return concluded(results.NOT_JUDGED, context.problem), {}
        began = time.monotonic()
        allowed = self.seconds + 2 * context.seconds
        verdict = self.stage.judge(
            self._order(exercise, submission.answers[exercise.index], context.extent, allowed)
        )
        if verdict["where"] in ("context", "judge") and not verdict["passed"]:
            # an answer may use names that its few cells do not define; it must not be said to be wrong for that
            verdict = self.stage.judge(
                self._order(exercise, submission.answers[exercise.index], "all", allowed)
            )
        if self.interrupted and verdict.get("lost"):
            return concluded(results.NOT_JUDGED, _INTERRUPTED), {}
        if verdict["where"] in ("context", "judge") and not verdict["passed"]:
            feedback = f"the cells before the exercise fail: {verdict['error']}"
            return concluded(results.NOT_JUDGED, feedback, seconds=verdict.get("seconds", 0.0)), verdict
        verdict["ran"] = began, time.monotonic()
        judgement = concluded(
            results.PASSED if verdict["passed"] else results.FAILED,
            verdict["error"],
            seconds=verdict.get("seconds", 0.0),
            limit=verdict.get("limit", ""),
            measured=verdict.get("measured", {}),
        )
        return judgement, verdict

    def _again(
        self,
        work: Sequence[tuple[Submission, Exercise]],
        found: list[tuple[results.Judgement, dict[str, Any]]],
        tell: Callable[[results.Judgement], None],
    ) -> list[tuple[results.Judgement, dict[str, Any]]]:
        """Judge once more, alone, whoever may have suffered from another's answer.

        That is whose judge was ended; and, where another answer took all processes or all memory, whoever did not end
        in time at the same time as it, or (where answers have no processes of their own) failed beside it.
        """
        greedy = [v["ran"] for _, v in found if v.get("limit") in ("processes", "memory") and "ran" in v]
        breaks = ("time",) if self.stage.sealing.namespaces else ("time", "")
        for place, (judgement, verdict) in enumerate(found):
            began, ended = verdict.get("ran", (0.0, 0.0))
            beside = any(began < end and start < ended for start, end in greedy)
            suffered = beside and judgement.status == results.FAILED and judgement.limit in breaks
            if verdict.get("lost") or suffered:
                found[place] = self._judge(*work[place], tell)
        return found


def _untouched(submission: Submission, exercise: Exercise) -> bool:
    """Whether the student has left the stub as it was, or has removed the cell."""
    answer = submission.answers.get(exercise.index, [])
    return not answer or [a.strip() for a in answer] == [exercise.stub.strip()]


def lessons_of(folder: Path) -> list[Lesson]:
    """The lessons of a course that have exercises. Raises GradeError where there are none."""
    try:
        found = [Lesson(path) for path in sorted(folder.glob("*.ipynb"))]
    except exercises.ExerciseError as error:
        raise GradeError(str(error)) from None
    found = [lesson for lesson in found if lesson.exercises]
    if not found:
        raise GradeError(
            f"{folder} holds no lesson with solutions. Name the folder of the course's own notebooks: "
            f"`rankcell grade FOLDER --course notebooks`."
        )
    return found
