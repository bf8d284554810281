"""The ranks of a job under `rankcell run`, as the runner knows them: who has come, what each does, how it ended.

The ranks connect back and prove that they know a key, as the agents of `engine/nodes.py` do; they may be on any
node that reads the user's home directory. They are asked what they do; the program itself is never asked. What it
means is for `run` and `verdict`.
"""

import contextlib
import secrets
import selectors
import shutil
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..engine import channel, nodes, system
from ..engine.messages import Answer, Question
from . import inside, stacks
from .records import Look, RankArrived, RankRecord

ANSWER = 0.4  # seconds to wait for the answers
SILENT = (
    3.0  # seconds without an answer after which a rank is looked at from outside: it holds the interpreter
)
BUSY, MOVED = 0.02, 1 << 18  # of a core, and bytes per second: a rank that uses less stands still
WITHOUT_A_WORD, FINISHED = "ended without a word: it was killed, or called os._exit", "finished"


@dataclass
class WatchedRank:
    """One rank, as the runner knows it."""

    arrival: RankArrived
    channel: channel.Channel
    record: RankRecord  # by its last answer, or its last message
    asked: float | None = None  # when, if it has not answered
    answers: dict[int, Any] = field(default_factory=dict)
    called: float = field(default_factory=time.monotonic)  # when it was last seen to call something new
    moved: float = field(default_factory=time.monotonic)  # ... or to compute, read or write
    used: tuple[float, float, int] | None = None  # when, CPU seconds, bytes
    runs: int = 0  # looks in a row in which it had a core, or waited for one as on a busy machine


class WatchedJob:
    """The ranks that have come. A job that torchrun starts anew begins anew here, too."""

    def __init__(self) -> None:
        self.ranks: dict[int, WatchedRank] = {}
        self.world_size = 0
        self.restart = 0
        self.came = 0  # ranks that have ever arrived
        self.failed: float | None = None  # when the first rank has failed
        self.released = False
        self._key, self._token = secrets.token_bytes(32), secrets.token_hex(8)
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._new: list[tuple[RankArrived, channel.Channel]] = []
        self._questions = 0
        self._host = inside.host()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def living(self) -> dict[int, WatchedRank]:
        """The ranks that have come and not ended."""
        return {rank: known for rank, known in self.ranks.items() if not known.record.over}

    def invite(self) -> Path:
        """The file by which the ranks find us. Raises OSError if the home directory cannot be written to."""
        return nodes.write_key(self._key, self._listener.getsockname()[1], token=self._token)

    def close(self) -> None:
        """Forget the ranks; those that run go on without us."""
        self._listener.close()
        for known in self.ranks.values():
            known.channel.close()
            if known.arrival.host == self._host:
                shutil.rmtree(known.arrival.folder, ignore_errors=True)
        Path(f"/dev/shm/rankcell-{self._token}").unlink(missing_ok=True)

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

    def _welcome(self, arrival: RankArrived, talk: channel.Channel) -> None:
        if arrival.restart > self.restart:  # torchrun has started all ranks anew
            for known in self.ranks.values():
                self._forget(known)
            self.ranks.clear()
            self.world_size, self.restart, self.failed, self.released = 0, arrival.restart, None, False
        if arrival.restart < self.restart or arrival.rank in self.ranks:
            talk.close()
            return
        record = RankRecord(
            arrival.rank, arrival.world_size, node=arrival.node, counts={}, origin=("rankcell",)
        )
        self.ranks[arrival.rank] = WatchedRank(arrival, talk, record)
        self.world_size = max(self.world_size, arrival.world_size)
        self.came += 1
        self._selector.register(talk, selectors.EVENT_READ, arrival.rank)
        if len(self.ranks) == self.world_size:
            for rank, known in self.ranks.items():
                near = [r for r, k in self.ranks.items() if k.arrival.host == known.arrival.host]
                self.tell(rank, "near", tuple(sorted(near)))

    def _forget(self, known: WatchedRank) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(known.channel)
        known.channel.close()

    def pump(self, timeout: float) -> None:
        """Take in what comes, for at most `timeout` seconds, or until something has come."""
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._woken.recv(4096)
                continue
            known = self.ranks[key.data]
            try:
                said = known.channel.poll()
            except (EOFError, OSError):
                self._forget(known)
                if not known.record.over:
                    known.record = self._loss(known)
                    if known.record.phase == "lost":
                        self.failed = self.failed or time.monotonic()
                continue
            for message in said:
                if isinstance(message, Answer):
                    known.asked = None
                    known.answers[message.number] = message.value
                elif isinstance(message, RankRecord):
                    known.record = replace(message, at=time.time())
                    if message.phase == "error":
                        self.failed = self.failed or time.monotonic()
                    if self.released:
                        self.tell(key.data, "release")
        while self._new:
            self._welcome(*self._new.pop(0))

    def _loss(self, known: WatchedRank) -> RankRecord:
        """A rank whose process has ended without a word."""
        record, how = known.record, ""
        if known.arrival.host == self._host:
            how = _how_it_ended(known.arrival.pid)
        if (
            how == FINISHED
        ):  # it may not have answered the last question, and has no thread any more that could
            return replace(record, phase="finished", waits=(), threads=False, at=time.time())
        words = self._from_its_node(known, "last words") or ""
        crash, _, text = words.partition("Fatal Python error: ")[2].partition("\n")
        threads = stacks.printed(text) if crash else ()
        stack = threads[0].frames if threads else ()
        file, line = stacks.place(stack)
        return replace(
            record, phase="lost", why=f"crashed: {crash}" if crash else how or WITHOUT_A_WORD, waits=(), threads=False,
            stack=stack, line=line or record.line, file=file or record.file, at=time.time(),
        )  # fmt: skip

    def release(self) -> None:
        """Let failed ranks end, now and later: what there is to say has been said."""
        self.released = True
        for rank, known in self.ranks.items():
            if known.record.over:
                self.tell(rank, "release")

    # --- questions

    def tell(self, rank: int, about: str, argument: Any = None) -> int:
        """Send a question; its number, under which its answer will come."""
        self._questions += 1
        with contextlib.suppress(OSError):
            self.ranks[rank].channel.send(Question(self._questions, about, argument))
        return self._questions

    def _ask(
        self, ranks: Sequence[int], about: str, argument: Any = None, wait: float = ANSWER
    ) -> dict[int, Any]:
        """The answers of those `ranks` that answer within `wait` seconds."""
        numbers = {}
        for rank in ranks:
            known = self.ranks[rank]
            if known.asked is not None and about == "look":
                continue  # it has not answered the last question: it reads no other
            known.asked = known.asked or time.monotonic()
            numbers[rank] = self.tell(rank, about, argument)
        end = time.monotonic() + wait
        while (left := end - time.monotonic()) > 0:
            living = self.living
            if all(n in living[r].answers for r, n in numbers.items() if r in living):
                break
            self.pump(left)
        here = {r: n for r, n in numbers.items() if r in self.ranks and n in self.ranks[r].answers}
        return {r: self.ranks[r].answers.pop(n) for r, n in here.items()}

    def _from_its_node(self, known: WatchedRank, about: str) -> Any:
        """The answer to a question about a rank that cannot answer it, from here or from another rank of its node."""
        arrival = known.arrival
        if arrival.host == self._host:
            return inside.ABOUT_ANOTHER[about](arrival.pid, arrival.folder)
        near = [
            rank
            for rank, other in self.living.items()
            if other.arrival.host == arrival.host and other is not known and other.asked is None
        ][:1]
        return next(iter(self._ask(near, about, (arrival.pid, arrival.folder), wait=2.0).values()), None)

    def look(self) -> None:
        """Find out what every rank does now."""
        found = self._ask(list(self.living), "look")
        now = time.monotonic()
        for rank, look in found.items():
            if isinstance(look, Look) and rank in self.living:
                self._take(self.ranks[rank], look, now)
        for known in list(self.living.values()):
            silent = known.asked is not None and now - known.asked > SILENT
            if silent and (known.used is None or now - known.used[0] >= SILENT):
                seen = self._from_its_node(known, "look from outside")
                if isinstance(seen, Look):
                    file, line = stacks.place(seen.stack)
                    known.record = replace(known.record, stack=seen.stack, file=file, line=line)
                    self._take(known, seen, now)

    def _take(self, known: WatchedRank, look: Look, now: float) -> None:
        if look.record is not None:
            if look.record.calls != known.record.calls:
                known.called = known.moved = now
            known.record = look.record
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

    def records(self) -> list[RankRecord]:
        """What is known of each rank at the last look; ranks that have not come are taken to be on the way."""
        found = {rank: RankRecord(rank, self.world_size, counts={}) for rank in range(self.world_size)}
        for rank, known in self.ranks.items():
            found[rank] = known.record
            if not known.record.over:
                threads = known.record.threads or known.asked is not None
                found[rank] = replace(known.record, threads=threads, idle=time.monotonic() - known.moved)
        return [record for _, record in sorted(found.items())]

    def reports(self) -> list[RankRecord]:
        """The same with stacks and last operations."""
        answers = self._ask(list(self.living), "report", wait=3.0)
        return [
            replace(report, blocked=record.blocked, idle=record.idle)
            if isinstance(report := answers.get(record.rank), RankRecord) and not record.over
            else record
            for record in self.records()
        ]


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
            return f"ended with exit code {code} and no exception" if code else FINISHED
        time.sleep(0.002)
    return ""
