"""Where the ranks of one process meet: whoever comes last to an operation does it for all.

The ranks are threads that take turns (`turns.py`). Their communication passes torch's dispatcher as on ranks that are
processes, is recorded there, and is answered here instead of by a backend (`answers.py`). A rank that waits gives its
turn away. What is waited for in C++ (DDP's reducer, functional collectives), where no turn can be given away, is waited
for when it is called.
"""

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from ..errors import GroupError
from . import answers
from .turns import Seat, Turns

_PATIENT = "/distributed/distributed_c10d.py"  # torch's Python functions: they wait by `Work.wait`


class _Here(threading.local):
    reduce_op = ""  # of the functional collective that is being called: C++ does not tell


_here = _Here()


class RankSeat(Seat):
    """The seat of one rank."""

    def __init__(
        self, rank: int, recorder: Any, leave: Callable[[], None], enter: Callable[[], None]
    ) -> None:
        super().__init__(leave, enter)
        self.rank, self.recorder = rank, recorder
        self.unseen: list[Any] = []  # operations for which C++ has waited
        self.source = 0  # the place in its group of who sent what the last receive from anyone got
        self.late = False  # it waits with a time limit, and nobody can go on


class Meeting:
    """Answers the operations of all ranks. See `record.Stage`, which it is for each of them.

    Args:
        turns: the ranks' threads.
        clock: seconds.
        is_learners: whether a frame's code is the learner's.
    """

    def __init__(self, turns: Turns, clock: Callable[[], float], is_learners: Callable[[Any], bool]) -> None:
        self.turns, self.clock, self.is_learners = turns, clock, is_learners
        # by name and group -> global rank -> the operation of that rank
        self._calls: dict[Any, dict[int, Any]] = {}
        self._sends: dict[Any, list[Any]] = {}  # by group and receiver: not received yet
        self._receives: dict[Any, list[Any]] = {}
        self.seats: list[RankSeat] = []  # by rank
        turns.stuck = self._give_up
        self._replace_what_waits()
        self._library = _remember_reduce_ops()

    def issue(self, o: Any, returns: int, filled: Any, inputs: list[Any], outputs: list[Any]) -> Any:
        """Take part in the operation `o`; its Work is over when all others have come to it."""
        seat = self._seat(o)
        o.seat, o.rank, o.source = seat, seat.rank, 0
        o.given = answers.Given(inputs, outputs, o.splits)
        answers.check(o.op, o.given, len(o.ranks))
        o.future = torch.futures.Future()
        o.filled = list(outputs)
        work = _create_work_from_future(o.future).boxed()
        self._come(o, o.ranks)
        if not self._waits_in_python(sys._getframe(1)):
            self.wait(o)
            seat.unseen.append(o)
        if returns < 2:
            return work if returns else None
        return filled, work

    def meet(self, o: Any, ranks: tuple[int, ...]) -> None:
        """Wait until all of `ranks` have come to `o`: one that has no tensors, such as making a group."""
        o.seat = seat = self._seat(o)
        o.rank, o.source, o.given, o.future = seat.rank, 0, answers.Given((), ()), None
        self._come(o, ranks)
        self.wait(o)

    def wait(self, o: Any) -> None:
        """Let the other ranks run until `o` is over."""
        seat = self._seat(o)
        seat.wants = o
        try:
            while o.done is None:
                if seat.late:
                    raise RuntimeError(f"Timed out: no other rank can go on, and {o.op} has a time limit.")
                self.turns.park(seat)
            seat.source = o.source
        finally:
            seat.wants, seat.late = None, False

    def clear(self) -> None:
        """Call off whatever has been called and is not over."""
        for kept in (self._calls, self._sends, self._receives):
            kept.clear()

    def _seat(self, o: Any) -> Any:
        """The seat of the rank that runs and has called `o`."""
        seat: Any = self.turns.holder
        if seat is None or seat.thread != threading.get_ident():
            raise GroupError(
                f"{o.op} in a thread of its own: the ranks of `--local` are threads that take turns, and only the main "
                f"thread of a rank can communicate. Run the cell on ranks that are processes: leave `--local` away."
            )
        # what C++ waited for is over: its Work would keep tensors
        for old in seat.unseen:
            seat.recorder.finish(old)
        seat.unseen.clear()
        return seat

    def _come(self, o: Any, ranks: tuple[int, ...]) -> None:
        """Put `o` down, and do it if none of `ranks` is missing any more."""
        if o.op in ("send", "recv"):
            self._come_to_a_pair(o)
            return
        key = (o.seat.recorder.name_of(o), ranks)
        calls = self._calls.setdefault(key, {})
        calls[o.rank] = o
        if len(calls) < len(ranks):
            return
        del self._calls[key]
        everybody = [calls[r] for r in ranks]
        root = 0 if o.peer is None else o.ranks.index(o.peer)
        op = o.reduce_op or _here.reduce_op
        answers.fill(o.op, [call.given for call in everybody], reduce_op=op, root=root)
        for call in everybody:
            self._over(call)

    def _come_to_a_pair(self, o: Any) -> None:
        mine, others = (self._sends, self._receives) if o.op == "send" else (self._receives, self._sends)
        key = (o.group, o.peer if o.op == "send" else o.rank)
        for other in others.get(key, ()):
            send, receive = (o, other) if o.op == "send" else (other, o)
            if send.tag == receive.tag and receive.peer in (None, send.rank):
                others[key].remove(other)
                self._deliver(send, receive)
                return
        mine.setdefault(key, []).append(o)

    def _deliver(self, send: Any, receive: Any) -> None:
        (source,), (target,) = send.given.inputs, receive.given.outputs
        if (
            source.numel() != target.numel() or source.dtype != target.dtype
        ):  # one that is not for anyone matches
            raise RuntimeError(
                f"rank {send.rank} sends {source.numel()} numbers of {source.dtype}, and rank {receive.rank} receives "
                f"{target.numel()} of {target.dtype} from anyone."
            )
        answers.copy(source, target)
        receive.source, receive.peer = receive.ranks.index(send.rank), send.rank
        self._over(send)
        self._over(receive)

    def _over(self, o: Any) -> None:
        o.done = self.clock()
        if o.future is not None:
            o.future.set_result(o.filled)
        o.given = o.filled = o.future = None  # these hold tensors
        if o.seat.wants is o:
            self.turns.wake(o.seat)

    def _waits_in_python(self, frame: FrameType | None) -> bool:
        """Whether the caller of an operation waits for it by `Work.wait`, or not at all."""
        while frame is not None and frame.f_code.co_filename.endswith("/engine/record.py"):
            frame = frame.f_back
        if frame is None:
            return False
        return frame.f_code.co_filename.endswith(_PATIENT) or self.is_learners(frame.f_code)

    def _give_up(self) -> None:
        """Nobody can go on: whoever waits with a time limit of its own has waited long enough."""
        for seat in self.seats:
            if seat.wants is not None and seat.wants.gives_up and not seat.late:
                seat.late = True
                self.turns.wake(seat)
                return

    def _replace_what_waits(self) -> None:
        """Have a rank that sleeps, polls or asks for a future give its turn away."""
        is_completed, get_future, sleep = dist.Work.is_completed, dist.Work.get_future, time.sleep

        def here() -> RankSeat | None:
            seat = self.turns.holder
            return seat if seat is not None and seat.thread == threading.get_ident() else None  # type: ignore

        def pending(work: Any) -> Any:
            o = None if (seat := here()) is None else seat.recorder.operation_of(work)
            return None if o is None or o.done is not None else o

        def poll(work: Any) -> bool:
            if pending(work) is not None and (seat := here()) is not None:
                self.turns.pass_on(seat)
            return bool(is_completed(work))

        def future(work: Any) -> Any:
            if (o := pending(work)) is not None:
                self.wait(o)  # C++ may wait for it, or what is to follow would run in another rank's thread
            return get_future(work)

        def rest(seconds: float) -> None:
            if (seat := here()) is None:
                sleep(seconds)
            else:
                self.turns.sleep(seat, seconds)

        dist.Work.is_completed = poll
        dist.Work.get_future = future
        dist.Work._source_rank = lambda work: None if (seat := here()) is None else seat.source
        time.sleep = rest


def _remember_reduce_ops() -> torch.library.Library:
    """Note the reduce operation of each functional collective before C++ issues it as one that does not show it."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        space, _, short = name.partition("::")
        if space == "_c10d_functional" and "." not in short:
            op = getattr(torch.ops._c10d_functional, short).default
            names = [a.name for a in op._schema.arguments]
            if "reduce_op" in names:
                library.impl(short, _noting(op, names.index("reduce_op")), "CPU")
    return library


def _noting(op: Any, at: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _here.reduce_op = str(args[at] if len(args) > at else kwargs["reduce_op"]).upper()
        try:
            return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        finally:
            _here.reduce_op = ""

    return call
