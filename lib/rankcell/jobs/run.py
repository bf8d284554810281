"""`rankcell run`: starts a command, watches the ranks that it brings to life, says once what went wrong, ends the job.

It changes nothing in the program but what `engine/record.py` listens to. Where each node has a launcher of its own, as
in `srun torchrun`, it stands before `srun`.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..engine.states import rows
from ..results import at_line, name_ranks
from . import records, verdict
from .records import RankRecord
from .watch import WITHOUT_A_WORD, WatchedJob

VERDICT = "verdict.txt"  # of a report, beside the records of the ranks
TICK = 0.2  # seconds between two looks at what the ranks have said
SETTLE = 0.7  # seconds after a rank has failed in which others may say that they did, too
PROVED = 1.5  # seconds for which a proof must hold: a rank that is on the way may fail, and tell more
GRACE = 10.0  # seconds that the launcher has to end a job of which a rank has failed
LAST_NEWS = 5.0  # seconds after the end of the command in which its ranks are heard

_Found = tuple[verdict.JobVerdict, list[RankRecord]]


class Runner:
    """One command, from its start to its end: after `limit` seconds without any progress ranks that stand still are
    reported, and what is known is written into the folder `report`, "" for one that is named by the time.
    """

    def __init__(self, command: Sequence[str], *, limit: float, report: str) -> None:
        self._command, self._limit, self._report = command, limit, report
        self._job = WatchedJob()
        self.verdicts: list[verdict.JobVerdict] = []
        # since when the ranks are in a state that proves something
        self._proved: tuple[float, Any] | None = None
        self._called_slow: set[int] = set()  # ranks

    def run(self) -> int:
        """The exit code: the command's, or 1 if it would be 0 although something went wrong."""
        job = self._job
        try:
            process = self.start(environment(job.invite()))
        except OSError as error:
            job.close()
            print(f"rankcell run: {self._command[0]} cannot be started: {error}.", file=sys.stderr)
            return 127
        before = {n: signal.signal(n, lambda s, _: process.send_signal(s)) for n in (signal.SIGTERM, signal.SIGHUP)}
        # the terminal tells the command, too
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._watch(process)
        finally:
            job.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._report and job.ranks and not self.verdicts:
            self._keep(verdict.finished(job.records()), job.records())
        if not job.ranks and process.returncode == 0:
            how = "Ranks are found by RANK and WORLD_SIZE, or when they call init_process_group"
            deaf = "a Python started with -E, -I or -S does not listen to us."
            print(f"rankcell run: no rank has reported. {how}; {deaf}", file=sys.stderr)
        code = process.returncode
        return (128 - code if code < 0 else code) or int(bool(self.verdicts))

    def start(self, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        """Start the command. Raises OSError if there is none of that name."""
        return subprocess.Popen(self._command, env=environment)

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        """Until the command has ended, and its ranks have been heard."""
        job, gone, limit = self._job, None, None
        while True:
            time.sleep(TICK)
            now = time.monotonic()
            over = not job.living and (bool(self.verdicts) or job.failed is None)
            if gone is not None and (over or now > gone + LAST_NEWS):
                return
            if process.poll() is not None and gone is None:
                gone = now
            if limit is not None and now > limit:
                limit = None
                if job.living:
                    self._end_all(process)
            if not self.verdicts and (found := self._conclude()) is not None:
                self.say(*found)
                job.tell(job.ranks, "release")
                if job.failed is not None and found[0].kind in ("error", "lost", "mismatch"):
                    limit = now + GRACE  # the launcher sees the failure, too
                else:
                    self._end_all(process)

    def _end_all(self, process: "subprocess.Popen[bytes]") -> None:
        self._job.tell(self._job.ranks, "end")
        for number, patience in ((None, 3.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            if number is not None:
                process.send_signal(number)
            limit = time.monotonic() + patience
            while process.poll() is None and time.monotonic() < limit:
                time.sleep(0.05)
            if process.poll() is not None:
                return

    def _conclude(self) -> _Found | None:
        """What has gone wrong by now, and all that is known of each rank; None while nothing has."""
        job, now = self._job, time.monotonic()
        if job.failed is not None:
            if now - job.failed < SETTLE:
                return None
            reports = job.reports()
            found = verdict.judge(reports)
            return None if found is None or _may_have_finished(found, reports) else (found, reports)
        here = job.records()
        if (found := verdict.judge(here)) is None:
            self._proved = None
            return self._stalled(here, now)
        if self._proved is None or self._proved[1] != _standing(here):
            self._proved = now, _standing(here)
        if now - self._proved[0] < PROVED:
            return None
        reports = job.reports()  # newer than the proof: where nobody has moved, all stood there at one moment
        again = verdict.judge(reports) if _standing(reports) == self._proved[1] else None
        return None if again is None else (again, reports)

    def _stalled(self, here: Sequence[RankRecord], now: float) -> _Found | None:
        """The verdict when no rank has called anything for as long as the limit says, and none computes."""
        living = self._job.living
        if not living or any(now - known.called < self._limit for known in living.values()):
            return None
        stands = {r for r, k in living.items() if verdict.waits_for(k.record) or now - k.moved >= self._limit}
        if stands != set(living):
            places = {(k.record.file, k.record.line) for r, k in living.items() if r in stands}
            busy = [r for r, k in living.items() if r not in stands and (k.record.file, k.record.line) not in places]
            if busy:  # the others poll, as those that stand where they do
                self._note_slow(sorted(busy), [k.record for k in living.values()])
            return None
        seen, reports = self._job.reports(), []
        if _standing(seen) != _standing(here):  # somebody has moved since it last said what it does
            return None
        for record in seen:
            if record.rank not in self._job.ranks:
                record = replace(record, phase="absent", why="did not come to init_process_group")
            elif record.phase == "running":
                record = replace(record, threads=False)
                if not verdict.waits_for(record):
                    where = at_line(record.line, record.file) or "an unknown line"
                    record = replace(record, phase="still", why=f"still at {where}, for {record.idle:.0f} s")
            reports.append(record)
        found = verdict.judge(reports)
        if found is None and any(now - known.moved < self._limit for known in living.values()):
            return None  # they wait, but something goes on, such as the first connections on a busy machine
        return found or verdict.stalled(reports, self._limit), reports

    def _note_slow(self, busy: Sequence[int], records: Sequence[RankRecord]) -> None:
        """Say once which ranks compute, and for what the others wait."""
        if self._called_slow.issuperset(busy):
            return
        self._called_slow.update(busy)
        who, states = name_ranks(busy).capitalize(), [verdict.state_of(r) for r in records]
        head = f"rankcell: for {self._limit:.0f} s no rank has called an operation. {who} may be slow, or in an "
        said = f"{head}endless loop: the job goes on.", *rows(states, records[0].world_size, busy)
        print("\n  ".join(said), file=sys.stderr, flush=True)

    def say(self, found: verdict.JobVerdict, reports: Sequence[RankRecord]) -> None:
        """Print the verdict, and write it with what is known of every rank."""
        self.verdicts.append(found)
        print(f"\n{verdict.text(found, reports)}\n\n{self._keep(found, reports)}\n", file=sys.stderr, flush=True)

    def _keep(self, found: verdict.JobVerdict, reports: Sequence[RankRecord]) -> str:
        """Write all of it into the folder of the report; says where that is."""
        folder = Path(self._report or f"rankcell-report-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            records.write(folder, reports)
            (folder / VERDICT).write_text(f"{verdict.text(found, reports)}\n")
        except OSError as error:
            return f"It could not be written to {folder}: {error.strerror}."
        return f"All of this is in {folder}/: `rankcell explain {shlex.quote(str(folder))}` reads it."


def _standing(records: Sequence[RankRecord]) -> Any:
    """What stays the same while nobody moves."""
    return [(r.rank, r.phase, r.calls, [w.seq for w in r.waits]) for r in records]


def _may_have_finished(found: verdict.JobVerdict, reports: Sequence[RankRecord]) -> bool:
    """Whether ranks that went without a word are missed by nobody: a program may end by os._exit(0)."""
    silent = all(r.why == WITHOUT_A_WORD for r in reports if r.rank in found.culprits)
    return found.kind == "lost" and silent and not any(map(verdict.waits_for, reports))


def environment(path: Path) -> dict[str, str]:
    """What a command finds in its environment so that its ranks find us."""
    hook = Path(__file__).parent / "hook"
    return {
        **os.environ,
        # where no environment is active, torchrun stands beside this Python
        "PATH": f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH")))),
        "RANKCELL_JOB": str(path),
        "RANKCELL_LIB": str(Path(__file__).parents[2]),
    }


def main(options: Any) -> int:
    """Run the command as the options say; the number for the shell."""
    if not (command := options.program[1:] if options.program[:1] == ["--"] else options.program):
        print("rankcell run: there is no command. Write it behind --: rankcell run -- torchrun ...", file=sys.stderr)
        return 2
    if int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        print("rankcell run: it stands before srun: rankcell run -- srun torchrun ...", file=sys.stderr)
        return 2
    return Runner(command, limit=options.limit, report=options.report).run()


def explain(options: Any) -> int:
    """Say of the report in a folder what `rankcell run` said; 0 if it could be read."""
    folder = Path(options.folder)
    try:
        if not (found := [records.load(path.read_bytes()) for path in folder.glob("rank-*.pickle")]):
            raise ValueError(f"in {folder} is no report of `rankcell run`.")
        judged = verdict.finished(found) if all(r.phase == "finished" for r in found) else verdict.judge(found)
        # records prove nothing where nothing moved: for how long that was, only the runner knew
        print(verdict.text(judged, found) if judged else (folder / VERDICT).read_text().rstrip("\n"))
        return 0
    except (ValueError, FileNotFoundError) as error:
        print(f"rankcell explain: {error}", file=sys.stderr)
        return 1
