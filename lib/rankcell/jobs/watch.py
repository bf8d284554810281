"""The ranks of a job under `rankcell run`, as the runner knows them: who has come, what each does, how it ended.

The ranks connect back and prove that they know a key, as the agents of `rankcell.nodes` do, from any node that reads
the user's home directory. Twice a second each says what it does. What that means is for `run` and `verdict`.
"""

import contextlib
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..engine import channel, stacks, system
from ..engine.messages import Answer, Question
from . import inside
from .records import RankArrived, RankRecord

ANSWER = 20.0  # seconds for a rank to answer a question: on a busy machine it waits for a core
SILENT = 3.0  # seconds after which a rank that says nothing is taken to compute: it holds the interpreter
CHANCE = 3  # looks in a row at which what polls, as each gloo group of a process does, may be seen to run
BUSY, MOVED = 0.02, 1 << 18  # of a core, and bytes per second: a rank that uses less stands still
WITHOUT_A_WORD, FINISHED = "ended without a word: it was killed, or called os._exit", "finished"


@dataclass
class WatchedRank:
    arrival: RankArrived
    channel: channel.Channel
    record: RankRecord  # what it said last
    answers: dict[int, Any] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    called: float = field(default_factory=time.monotonic)  # when it was last seen to call something new
    moved: float = field(default_factory=time.monotonic)  # ... or to compute, read or write
    used: tuple[float, float, int] | None = None  # when, CPU seconds, bytes
    runs: int = 0  # looks in a row at which it had a core, or waited for one as on a busy machine

    def take(self, record: RankRecord) -> None:
        self.heard = now = time.monotonic()
        if record.calls != self.record.calls:
            self.called = self.moved = now
        self.record = record
        self.runs = self.runs + 1 if record.runs else 0
        if self.runs > CHANCE:
            self.moved = now
        at, cpu, moved = self.used or (now - 1.0, record.cpu, record.moved)
        if now - at >= 1.0:
            if record.cpu - cpu > BUSY * (now - at) or record.moved - moved > MOVED * (now - at):
                self.moved = now
            self.used = now, record.cpu, record.moved


class WatchedJob:
    """The ranks that have come. One that comes again, because torchrun starts all anew, is not watched any more."""

    def __init__(self) -> None:
        self.ranks: dict[int, WatchedRank] = {}
        self.world_size = 0
        self.failed: float | None = None  # when the first rank has failed
        self._news = threading.Condition()  # guards all of it; each rank is heard in a thread of its own
        self._questions = 0
        self._key, self._token = secrets.token_bytes(32), secrets.token_hex(8)
        self._invitation: Path | None = None
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._host = inside.host()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def living(self) -> dict[int, WatchedRank]:
        return {rank: known for rank, known in list(self.ranks.items()) if not known.record.over}

    def invite(self) -> Path:
        """The file by which the ranks find us. Raises OSError if the home directory cannot be written to."""
        self._invitation = channel.write_key(self._key, self._listener.getsockname()[1], token=self._token)
        return self._invitation

    def close(self) -> None:
        """Forget the ranks; those that run go on without us."""
        self._listener.close()
        if self._invitation is not None:
            self._invitation.unlink(missing_ok=True)
        for known in list(self.ranks.values()):
            with contextlib.suppress(OSError):  # wakes the thread that hears it
                known.channel.socket.shutdown(socket.SHUT_RDWR)
            if known.arrival.host == self._host:
                Path(known.arrival.crash_file).unlink(missing_ok=True)
        Path(f"/dev/shm/rankcell-{self._token}").unlink(missing_ok=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._hear, args=(sock,), daemon=True).start()

    def _hear(self, sock: socket.socket) -> None:
        """All that one rank says, to its end."""
        with sock, contextlib.suppress(PermissionError, OSError, EOFError):  # not one of ours: it was not read
            channel.authenticate(sock, self._key, server=True)
            talk = channel.Channel(sock)
            arrival = talk.receive()
            system.keep_alive(sock, reads_always=True)
            with self._news:
                if arrival.rank in self.ranks:
                    return
                known = self._welcome(arrival, talk)
            with contextlib.suppress(EOFError, OSError):
                while True:
                    message = talk.receive()
                    with self._news:
                        self._take(known, message)
            with self._news:
                if not known.record.over:
                    known.record = self._loss(known)
                    if known.record.phase == "lost":
                        self.failed = self.failed or time.monotonic()

    def _welcome(self, arrival: RankArrived, talk: channel.Channel) -> WatchedRank:
        known = self.ranks[arrival.rank] = WatchedRank(arrival, talk, RankRecord(arrival.rank, arrival.world_size))
        self.world_size = max(self.world_size, arrival.world_size)
        if len(self.ranks) == self.world_size:
            for rank, one in self.ranks.items():
                near = [r for r, k in self.ranks.items() if k.arrival.host == one.arrival.host]
                self.tell([rank], "near", tuple(sorted(near)))
        return known

    def _take(self, known: WatchedRank, message: Any) -> None:
        if isinstance(message, Answer):
            known.answers[message.number] = message.value
            known.used = None  # what was read to answer is none of its program's
        elif message.over:  # its last one
            known.record = replace(message, at=time.time())
            if message.phase == "error":
                self.failed = self.failed or time.monotonic()
        elif not known.record.over:
            known.take(message)
            self.world_size = max(self.world_size, message.world_size)
        self._news.notify_all()

    def _loss(self, known: WatchedRank) -> RankRecord:
        """A rank whose process has ended without a word."""
        record, arrival, how = known.record, known.arrival, ""
        if arrival.host == self._host:
            how = _how_it_ended(arrival.pid)
            crash, stack = stacks.crash_in(arrival.crash_file)
        else:
            near = [r for r, k in self.living.items() if k.arrival.host == arrival.host and k is not known]
            crash, stack = next(iter(self.ask(near[:1], "crash", arrival.crash_file, wait=ANSWER).values()), ("", ()))
        if how == FINISHED:  # the last that it said was before its end
            return replace(record, phase="finished", waits=(), threads=False, at=time.time())
        file, line = stacks.place(stack)
        return replace(
            record, phase="lost", why=f"crashed: {crash}" if crash else how or WITHOUT_A_WORD, waits=(), threads=False,
            stack=stack, line=line or record.line, file=file or record.file, at=time.time(),
        )  # fmt: skip

    def tell(self, ranks: Iterable[int], about: str, argument: Any = None) -> int:
        """Send a question; its number, under which the answers will come."""
        with self._news:
            self._questions += 1
            for rank in ranks:
                with contextlib.suppress(OSError):
                    self.ranks[rank].channel.send(Question(self._questions, about, argument))
            return self._questions

    def ask(self, ranks: Iterable[int], about: str, argument: Any = None, *, wait: float) -> dict[int, Any]:
        """The answers of those `ranks` that answer within `wait` seconds."""
        asked = [self.ranks[rank] for rank in ranks]
        with self._news:
            number = self.tell([k.record.rank for k in asked], about, argument)
            self._news.wait_for(lambda: all(number in k.answers or k.record.over for k in asked), wait)
            return {k.record.rank: k.answers.pop(number) for k in asked if number in k.answers}

    def records(self) -> list[RankRecord]:
        """What is known of each rank; ranks that have not come are taken to be on the way."""
        with self._news:
            found = {rank: RankRecord(rank, self.world_size) for rank in range(self.world_size)}
            found |= {rank: known.record for rank, known in self.ranks.items()}
            for rank, known in self.living.items():
                now = time.monotonic()
                if silent := now - known.heard > SILENT:
                    known.moved = now
                found[rank] = replace(known.record, threads=known.record.threads or silent, idle=now - known.moved)
        return [record for _, record in sorted(found.items())]

    def reports(self) -> list[RankRecord]:
        """The same with stacks and last operations."""
        said = self.ask(list(self.living), "report", wait=ANSWER)
        known = {r.rank: r for r in self.records()}
        for rank, report in said.items():
            if not known[rank].over:
                known[rank] = replace(report, blocked=known[rank].blocked, idle=known[rank].idle)
        return [*known.values()]


def _how_it_ended(pid: int) -> str:
    """How a process of this machine has ended, as long as the kernel says it: until its parent has asked."""
    end = time.monotonic() + 0.08
    while time.monotonic() < end:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            return ""
        if words[0] == "Z":
            code, number = int(words[49]) >> 8, int(words[49]) & 0x7F
            if number:
                return f"was killed by {signal.Signals(number).name} (signal {number})"
            return f"ended with exit code {code}" if code else FINISHED
        time.sleep(0.002)
    return ""
