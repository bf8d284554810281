"""`rankcell run`: starts a command, watches the ranks that it brings to life, says once what went wrong, ends the job.

The ranks connect back and prove that they know a key, as the agents of `engine/nodes.py` do; they may be on any
node that reads the user's home directory. Twice a second they are asked what they do. It never asks the program
itself, and it changes nothing in it but what `engine/record.py` listens to.
"""

import contextlib
import json
import os
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..engine import channel, diagnose, nodes, system
from ..engine.messages import Answer, Question, Status
from ..results import at_line, name_ranks
from . import inside, records, stacks, verdict
from .records import Record
from .talk import Arrival, Ended, Look

POLL = 0.5  # seconds between two questions
ANSWER = 0.4  # seconds to wait for the answers
LEAVES = 3.0  # seconds that ranks on other nodes have to remove what they have written
SETTLE = 0.7  # seconds after a rank has failed in which others may say that they did, too
SILENT = (
    3.0  # seconds without an answer after which a rank is looked at from outside: it holds the interpreter
)
GRACE = 10.0  # seconds that the launcher has to end a job of which a rank has failed
BUSY, MOVED = 0.02, 1 << 18  # of a core, and bytes per second: a rank that uses less stands still
WITHOUT_A_WORD, FINISHED = "ended without a word: it was killed, or called os._exit", "finished"


@dataclass
class Known:
    """One rank, as the runner knows it."""

    arrival: Arrival
    channel: channel.Channel
    status: Status | None = None
    blocked: bool = False
    ended: Record | None = None  # its last word
    lost: Record | None = None
    asked: float | None = None  # when, if it has not answered
    answers: dict[int, Any] = field(default_factory=dict)
    called: float = field(default_factory=time.monotonic)  # when it was last seen to call something new
    moved: float = field(default_factory=time.monotonic)  # ... or to compute, read or write
    calls: int = -1
    used: tuple[float, float, int] | None = None  # when, CPU seconds, bytes
    runs: int = 0  # looks in a row in which it had a core, or waited for one as on a busy machine
    stack: tuple[stacks.Thread, ...] = ()  # seen from outside

    @property
    def over(self) -> bool:
        return self.ended is not None or self.lost is not None


class Job:
    """The ranks that have come, and what is to be said of them.

    Args:
        limit: seconds without any progress after which ranks that stand still are reported.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.ranks: dict[int, Known] = {}
        self.world_size = 0
        self.restart = 0
        self.came = 0  # ranks that have ever arrived
        self._key = secrets.token_bytes(32)
        self.token = secrets.token_hex(8)
        self._listener = socket.create_server(("", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wake, wake = socket.socketpair()
        self._selector.register(wake, selectors.EVENT_READ, None)
        self._woken = wake
        self._new: list[tuple[Arrival, channel.Channel]] = []
        self._numbers = 0
        self._failed: float | None = None  # when the first rank has failed
        self._proved: tuple[float, Any] | None = None
        self._released = False
        self.noted: set[int] = set()  # slow ranks that were told of
        self._host = inside.host()
        threading.Thread(target=self._accept, daemon=True).start()

    def invite(self, name: str = "") -> Path:
        """The file by which the ranks find us. Raises FileExistsError if there is one of that name."""
        try:
            return nodes.write_key(self._key, self.port, name=name, token=self.token)
        except FileExistsError:
            raise
        except OSError:  # no home: then the ranks are on this machine
            path = Path(tempfile.mkdtemp(prefix="rankcell-")) / "job.json"
            told = {
                "addresses": system.addresses(),
                "port": self.port,
                "key": self._key.hex(),
                "token": self.token,
            }
            path.touch(0o600)
            path.write_text(json.dumps(told))
            return path

    def close(self) -> None:
        """Forget the ranks; those that run go on without us."""
        self._listener.close()
        for known in self.ranks.values():
            known.channel.close()
            if known.arrival.host == self._host:
                shutil.rmtree(known.arrival.folder, ignore_errors=True)
        Path(f"/dev/shm/rankcell-{self.token}").unlink(missing_ok=True)

    # --- who comes and goes

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            channel.authenticate(sock, self._key, server=True)
            talk = channel.Channel(sock)
            arrival = talk.receive()
            system.keep_alive(sock, reads_always=True)
        except (PermissionError, OSError, EOFError):  # not one of ours: nothing it said was read
            sock.close()
            return
        self._new.append((arrival, talk))
        with contextlib.suppress(OSError):
            self._wake.send(b".")

    def _welcome(self) -> None:
        while self._new:
            arrival, talk = self._new.pop(0)
            if arrival.restart > self.restart:  # torchrun has started all ranks anew
                for known in self.ranks.values():
                    self._forget(known)
                self.ranks.clear()
                self.world_size = 0
                self.restart, self._failed, self._proved, self._released = arrival.restart, None, None, False
            if arrival.restart < self.restart or arrival.rank in self.ranks:
                talk.close()
                continue
            self.ranks[arrival.rank] = Known(arrival, talk)
            self.world_size = max(self.world_size, arrival.world_size)
            self.came += 1
            self._selector.register(talk, selectors.EVENT_READ, arrival.rank)
            if len(self.ranks) == self.world_size:
                hosts: dict[str, list[int]] = {}
                for rank, known in sorted(self.ranks.items()):
                    hosts.setdefault(known.arrival.host, []).append(rank)
                for near in hosts.values():
                    for rank in near:
                        self._tell(rank, "near", tuple(near))

    def _forget(self, known: Known) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(known.channel)
        known.channel.close()

    def pump(self, timeout: float) -> None:
        """Take in what comes, for at most `timeout` seconds, or until something has come."""
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._woken.recv(4096)
                continue
            rank = key.data
            known = self.ranks[rank]
            try:
                said = known.channel.poll()
            except (EOFError, OSError):
                self._forget(known)
                if known.ended is None and known.lost is None:
                    known.lost = self._last_of(known)
                    if known.lost.phase == "lost":
                        self._failed = self._failed or time.monotonic()
                continue
            for message in said:
                if isinstance(message, Answer):
                    known.asked = None
                    known.answers[message.number] = message.value
                elif isinstance(message, Ended):
                    known.ended = replace(message.record, at=time.time())
                    if message.record.phase == "error":
                        self._failed = self._failed or time.monotonic()
                    if self._released:
                        self._tell(rank, "go")
        self._welcome()

    def _last_of(self, known: Known) -> Record:
        """A rank whose process has ended without a word."""
        arrival, status = known.arrival, known.status
        here = arrival.host == self._host
        how, text = WITHOUT_A_WORD, ""
        if here:
            how = _how_it_ended(arrival.pid) or how
            if how == FINISHED:
                # it may not have answered the last question, and has no thread any more that could
                return replace(self._state(known), phase="finished", waits=(), threads=False, at=time.time())
            text = stacks.last(arrival.pid, arrival.folder)
        else:
            near = [
                r
                for r, k in self.ranks.items()
                if k.arrival.host == arrival.host and not k.over and k is not known
            ]
            if near:
                text = self.ask(near[:1], "last", (arrival.pid, arrival.folder)).get(near[0]) or ""
        crash = text.partition("Fatal Python error: ")[2].partition("\n")
        threads = stacks.faulthandler_threads(crash[2]) if crash[2] else ()
        stack = threads[0].frames if threads else ()
        own = [f for f in stack if stacks.is_own(f.filename)]
        place = (
            (own[-1].filename, own[-1].lineno) if own else (status.file, status.line) if status else ("", 0)
        )
        if crash[0]:
            how = f"crashed: {crash[0]}"
        return Record(
            arrival.rank, arrival.world_size, "lost", how, arrival.node, place[1], place[0],
            counts=dict(status.counts) if status else {}, calls=status.calls if status else 0,
            stack=stack, at=time.time(), origin=("rankcell",),
        )  # fmt: skip

    # --- questions

    def _tell(self, rank: int, about: str, argument: Any = None) -> int:
        known = self.ranks[rank]
        self._numbers += 1
        with contextlib.suppress(OSError):
            known.channel.send(Question(self._numbers, about, argument))
        return self._numbers

    def ask(
        self, ranks: Sequence[int], about: str, argument: Any = None, wait: float = ANSWER
    ) -> dict[int, Any]:
        """The answers of those `ranks` that answer within `wait` seconds."""
        numbers = {}
        for rank in ranks:
            known = self.ranks[rank]
            if known.over or (known.asked is not None and about == "look"):
                continue  # it has not answered the last question: it reads no other
            known.asked = known.asked or time.monotonic()
            numbers[rank] = self._tell(rank, about, argument)
        end = time.monotonic() + wait
        while any(not self.ranks[r].over and n not in self.ranks[r].answers for r, n in numbers.items()):
            left = end - time.monotonic()
            if left <= 0:
                break
            self.pump(left)
            if any(r not in self.ranks for r in numbers):  # started anew meanwhile
                return {}
        return {r: self.ranks[r].answers.pop(n) for r, n in numbers.items() if n in self.ranks[r].answers}

    def look(self) -> None:
        """Find out what every rank does now."""
        found = self.ask([r for r, k in self.ranks.items() if not k.over], "look")
        now = time.monotonic()
        for rank, look in found.items():
            if isinstance(look, Look):
                self._take(self.ranks[rank], look, now)
        for known in list(self.ranks.values()):
            if not known.over and known.asked is not None and now - known.asked > SILENT:
                self._peek(known, now)

    def _take(self, known: Known, look: Look, now: float) -> None:
        if look.status is not None:
            status = look.status
            state = diagnose.from_status(status, known.status)
            known.blocked, known.status = state.blocked_in_torch, status
            known.stack = ()
            if status.calls != known.calls:
                known.calls, known.called, known.moved = status.calls, now, now
        known.runs = known.runs + 1 if look.runs else 0
        if known.runs > 1:  # once is chance: what polls runs for a moment, too
            known.moved = now
        if known.used is not None:
            at, cpu, moved = known.used
            if now - at < 1.0:
                return
            if look.cpu - cpu > BUSY * (now - at) or look.moved - moved > MOVED * (now - at):
                known.moved = now
        known.used = now, look.cpu, look.moved

    def _peek(self, known: Known, now: float) -> None:
        """Look at a rank from outside that cannot answer, because it holds the interpreter in a long call of C."""
        arrival = known.arrival
        if known.used is not None and now - known.used[0] < SILENT:
            return
        if arrival.host == self._host:
            look: Any = inside.peek(arrival.pid, arrival.folder)
        else:
            near = [
                r
                for r, k in self.ranks.items()
                if k.arrival.host == arrival.host and not k.over and k.asked is None
            ]
            look = (
                self.ask(near[:1], "peek", (arrival.pid, arrival.folder), wait=2.0).get(near[0])
                if near
                else None
            )
        if isinstance(look, Look):
            known.stack = look.threads
            self._take(known, look, now)

    # --- what is to be said

    def _state(self, known: Known) -> Record:
        """What the last look at a rank has shown, without its stack."""
        if known.ended is not None or known.lost is not None:
            return known.ended or known.lost  # type: ignore[return-value]
        arrival, status = known.arrival, known.status
        record = Record(arrival.rank, arrival.world_size, node=arrival.node, counts={}, origin=("rankcell",))
        if status is None:
            return record
        return replace(
            record, line=status.line, file=status.file, waits=status.waits, counts=status.counts, calls=status.calls,
            joins=status.joins, blocked=known.blocked, threads=status.threads or known.asked is not None,
            idle=time.monotonic() - known.moved,
        )  # fmt: skip

    def records(self) -> list[Record]:
        """What is known of each rank at the last look; ranks that have not come are taken to be on the way."""
        found = {rank: self._state(known) for rank, known in self.ranks.items()}
        for rank in range(self.world_size):
            found.setdefault(rank, Record(rank, self.world_size, counts={}))
        return [record for _, record in sorted(found.items())]

    def reports(self) -> list[Record]:
        """The same with stacks and last operations."""
        asked = [r for r, k in self.ranks.items() if not k.over]
        answers = self.ask(asked, "report", wait=3.0)
        found = []
        for record in self.records():
            report = answers.get(record.rank)
            known = self.ranks.get(record.rank)
            if isinstance(report, Record) and known is not None and not known.over:
                record = replace(report, blocked=record.blocked, idle=record.idle)
            elif known is not None and not known.over and known.stack:
                stack = known.stack[0].frames
                own = [f for f in stack if stacks.is_own(f.filename)]
                place = (own[-1].lineno, own[-1].filename) if own else (0, "")
                record = replace(record, stack=stack, line=place[0], file=place[1])
            found.append(record)
        return found

    def conclude(self) -> tuple[verdict.Verdict, list[Record]] | None:
        """What has gone wrong by now, and all that is known of each rank; None while nothing has."""
        now = time.monotonic()
        if self._failed is not None:
            if now - self._failed < SETTLE:
                return None
            reports = self.reports()
            found = verdict.judge(reports)
            if found is None or (found.kind == "lost" and self._may_have_finished(found, reports)):
                return None
            return found, reports
        found = verdict.judge(self.records())
        if found is not None:
            seen = (
                found.headline,
                [(r.rank, r.phase, r.calls, [w.seq for w in r.waits]) for r in self.records()],
            )
            if self._proved is None or self._proved[1] != seen:
                self._proved = now, seen
                return None
            settled = diagnose.settled([verdict.state_of(r) for r in self.records()])
            if now - self._proved[0] < (POLL if settled else 2.0):
                return None
            reports = self.reports()
            again = verdict.judge(reports)
            return None if again is None else (again, reports)
        self._proved = None
        return self._stalled(now)

    def _may_have_finished(self, found: verdict.Verdict, reports: Sequence[Record]) -> bool:
        """Whether ranks that went without a word are missed by nobody: a program may end by os._exit(0)."""
        silent = all(r.why == WITHOUT_A_WORD for r in reports if r.rank in found.culprits)
        return silent and not any(verdict.state_of(r).blocking for r in reports)

    def _stalled(self, now: float) -> tuple[verdict.Verdict, list[Record]] | None:
        """The verdict when nothing has moved for as long as the limit says."""
        living = [k for k in self.ranks.values() if not k.over]
        if not living or any(now - k.called < self.limit for k in living):
            return None
        states = {k.arrival.rank: verdict.state_of(self._state(k)) for k in living}
        busy = [r for r, s in states.items() if not s.standing and now - self.ranks[r].moved < self.limit]
        if busy:
            return None
        reports = []
        for record in self.reports():
            if record.rank not in self.ranks:
                record = replace(record, phase="absent", why="has not come to init_process_group")
            elif record.phase == "running":
                record = replace(record, threads=False)
                if not verdict.state_of(record).standing:
                    record = replace(
                        record, phase="still", why=_still(record, now - self.ranks[record.rank].moved)
                    )
            reports.append(record)
        found = verdict.judge(reports)
        if found is None:
            found = verdict.unclear(
                reports,
                f"nothing has moved for {self.limit:.0f} s.",
                "Everybody has come to the operation that it stands in: what does not end is the transfer itself. Look "
                "at the network and at what the backend logs.",
            )
        return found, reports

    def since(self, found: verdict.Verdict) -> float:
        """When that could be known at the earliest: after the first failure, the last call, or the limit."""
        if self._failed is not None:
            return self._failed
        living = [k for k in self.ranks.values() if not k.over]
        if found.kind in ("still", "unclear"):
            return (
                max(k.moved if not verdict.state_of(self._state(k)).standing else k.called for k in living)
                + self.limit
            )
        return max((k.called for k in living), default=time.monotonic())

    def slow(self) -> str:
        """A line about ranks that compute while all others have waited for them as long as the limit says; "" else."""
        now = time.monotonic()
        living = {r: k for r, k in self.ranks.items() if not k.over}
        if not living or any(now - k.called < self.limit for k in living.values()):
            return ""
        states = {r: verdict.state_of(self._state(k)) for r, k in living.items()}
        busy = [r for r, s in states.items() if not s.standing]
        if any(w.op == "init_process_group" for s in states.values() for w in s.blocking):
            return ""  # they are on the way to the first operation: importing torch takes a while
        if not busy or len(busy) == len(living) or self.noted >= set(busy):
            return ""
        self.noted |= set(busy)
        where = at_line(states[busy[0]].line, states[busy[0]].file)
        verb, it = ("computes", "it") if len(busy) == 1 else ("compute", "them")
        return (
            f"{name_ranks(busy)} {verb}{f' at {where}' if where else ''}, and the others have waited for {it} for "
            f"{self.limit:.0f} s. This may be slow, or an endless loop: the job goes on."
        )

    def release(self) -> None:
        """Let failed ranks end, now and later: what there is to say has been said."""
        self._released = True
        for rank, known in self.ranks.items():
            if known.ended is not None:
                self._tell(rank, "go")

    def end(self) -> None:
        """End the processes of all ranks that can still hear us."""
        # On other nodes they remove their folders first, all of them: once one of them has ended, the launcher ends
        # the others, and does not wait until they are done.
        told = {
            rank: self._tell(rank, "leave")
            for rank, known in self.ranks.items()
            if known.lost is None and known.arrival.host != self._host
        }
        limit = time.monotonic() + LEAVES
        while time.monotonic() < limit and any(
            (known := self.ranks.get(rank)) is not None and known.lost is None and number not in known.answers
            for rank, number in told.items()
        ):
            self.pump(0.05)
        for rank, known in self.ranks.items():
            if known.lost is None:
                self._tell(rank, "end")

    @property
    def living(self) -> bool:
        """Whether ranks are there that have not ended."""
        return any(not k.over for k in self.ranks.values())


def _still(record: Record, seconds: float) -> str:
    """Where a rank stands still, in words that follow "stands"."""
    where = at_line(record.line, record.file) or "an unknown line"
    text = f"still at {where}"
    for name, frames in record.others:
        own = [f for f in frames if stacks.is_own(f.filename)]
        if name.startswith("worker") and own:
            text += f", behind its worker at {at_line(own[-1].lineno, own[-1].filename)}"
            break
    return f"{text}, for {seconds:.0f} s"


def _how_it_ended(pid: int) -> str:
    """How a process of this machine has ended, as long as the kernel says it: until its parent has asked."""
    end = time.monotonic() + 0.08
    while time.monotonic() < end:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            return ""
        if words[0] == "Z":
            status = int(words[49])
            if status & 0x7F:
                number = status & 0x7F
                return f"was killed by {signal.Signals(number).name} (signal {number})"
            return f"ended with exit code {status >> 8} and no exception" if status else FINISHED
        time.sleep(0.002)
    return ""


# --- the command


def environment(path: Path) -> dict[str, str]:
    """What a command finds in its environment so that its ranks find us."""
    hook = Path(__file__).parent / "hook"
    before = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": f"{hook}{os.pathsep}{before}" if before else str(hook),
        "RANKCELL_JOB": str(path),
        "RANKCELL_LIB": str(Path(__file__).parents[2]),
    }


def _part_of_a_step() -> str:
    """The name under which the runners of a Slurm step meet; "" outside of one, or if it has one task only."""
    if int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) < 2 or "SLURM_PROCID" not in os.environ:
        return ""
    return f"run-{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"


def _join(name: str, command: Sequence[str]) -> None:
    """Become the command, whose ranks report to the runner of task 0."""
    path = Path.home() / ".rankcell" / f"{name}.json"
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    os.execvpe(command[0], list(command), environment(path))


class Runner:
    """One command, from its start to its end."""

    def __init__(self, command: Sequence[str], *, limit: float, end: bool, report: str) -> None:
        self._command, self._end, self._report = command, end, report
        self._job = Job(limit)
        self.verdicts: list[verdict.Verdict] = []
        self.late = 0.0  # seconds from when the last verdict could be known at the earliest to the verdict
        self._said: set[int] = set()  # restarts of which a verdict was given
        self._failed = False

    def run(self, name: str = "") -> int:
        """The exit code: the command's, or 1 if it would be 0 although something went wrong."""
        job = self._job
        path = job.invite(name)
        try:
            process = self.start(environment(path))
        except OSError as error:
            path.unlink(missing_ok=True)
            print(f"rankcell run: {self._command[0]} cannot be started: {error.strerror}.", file=sys.stderr)
            return 127
        before = {
            n: signal.signal(n, lambda s, _: process.send_signal(s)) for n in (signal.SIGTERM, signal.SIGHUP)
        }
        before[signal.SIGINT] = signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # the terminal tells the command, too
        try:
            self._watch(process, alone=not name)
        finally:
            path.unlink(missing_ok=True)
            job.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        code = process.returncode
        if self._report and job.came and not self.verdicts:
            self._keep(verdict.finished(job.records()), job.records())
        if not job.came and code == 0:
            print(
                "rankcell run: no rank has reported. Ranks are found by RANK and WORLD_SIZE, or when they call "
                "init_process_group; a Python started with -E, -I or -S does not listen to us.",
                file=sys.stderr,
            )
        code = 128 - code if code < 0 else code
        return code or int(self._failed)

    def start(self, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        """Start the command. Raises OSError if there is none of that name."""
        return subprocess.Popen(self._command, env=environment)

    def _watch(self, process: "subprocess.Popen[bytes]", *, alone: bool) -> None:
        """Until the command has ended, and the ranks; `alone`: all ranks are the command's."""
        job, gone, over = self._job, None, None
        next_look = time.monotonic()
        while True:
            if process.poll() is not None and gone is None:
                gone = time.monotonic()
            done = gone is not None and (not job.living or (alone and time.monotonic() > gone + 5))
            if done and (job.restart in self._said or job._failed is None):
                return
            now = time.monotonic()
            job.pump(max(min(next_look - now, POLL), 0.0))
            now = time.monotonic()
            if job.restart not in self._said:
                if job._failed is not None or now >= next_look:
                    if job._failed is None or now >= next_look:
                        job.look()
                        next_look = time.monotonic() + POLL
                    found = job.conclude()
                    if found is not None:
                        self._said.add(job.restart)
                        self.late = time.monotonic() - job.since(found[0])
                        self.say(*found)
                        failed = found[0].kind in ("error", "lost", "mismatch") and job._failed is not None
                        job.release()
                        if not failed and self._end:
                            self._end_all(process)
                        over = (job.restart, time.monotonic() + GRACE)
                    elif note := job.slow():
                        print(f"rankcell: {note}", file=sys.stderr, flush=True)
                    if done and found is None and time.monotonic() > (gone or 0) + 5:
                        return
            elif now >= next_look:
                next_look = now + POLL
            if over is not None and over[0] == job.restart and now > over[1] and self._end and job.living:
                over = None
                self._end_all(process)

    def _end_all(self, process: "subprocess.Popen[bytes]") -> None:
        self._job.end()
        for end, patience in ((None, 3.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            if end is not None:
                process.send_signal(end)
            limit = time.monotonic() + patience
            while process.poll() is None and time.monotonic() < limit:
                self._job.pump(0.05)
            if process.poll() is not None:
                return

    def say(self, found: verdict.Verdict, reports: Sequence[Record]) -> None:
        """Print the verdict, and write it with what is known of every rank."""
        self._failed = True
        self.verdicts.append(found)
        where = self._keep(found, reports)
        print(f"\n{report_text(found, reports)}\n\n{where}\n", file=sys.stderr, flush=True)

    def _keep(self, found: verdict.Verdict, reports: Sequence[Record]) -> str:
        """Write all of it into the folder of the report; says where that is."""
        folder = Path(self._report or f"rankcell-report-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            records.write(folder, reports)
            (folder / "verdict.txt").write_text(f"{report_text(found, reports)}\n")
        except OSError as error:
            return f"It could not be written to {folder}: {error.strerror}."
        return f"All of this is in {folder}/: `rankcell explain {shlex.quote(str(folder))}` reads it."


def report_text(found: verdict.Verdict, reports: Sequence[Record]) -> str:
    """The verdict, and under it what each rank did."""
    more = verdict.details(reports, found)
    return f"rankcell: {found}" + (f"\n\n{more}" if more else "")


def main(options: Any) -> int:
    """Run the command as the options say; the number for the shell."""
    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not command:
        print(
            "rankcell run: there is no command. Write it behind --: rankcell run -- torchrun ...",
            file=sys.stderr,
        )
        return 2
    name = options.meet or _part_of_a_step()
    if name and not options.meet and os.environ["SLURM_PROCID"] != "0":
        _join(name, command)
    runner = Runner(command, limit=options.limit, end=options.on_hang == "end", report=options.report)
    try:
        return runner.run(name)
    except FileExistsError:
        _join(name, command)
        raise
