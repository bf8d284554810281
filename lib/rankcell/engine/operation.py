"""Inside a rank: one communication from its call to its end, and who called it."""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..results import FROM, Call, Event, Values, Watched, call_text
from .messages import Wait

clock = time.monotonic  # one clock for all processes of a machine

MAX_VALUES = 64  # numbers kept per tensor with `--values`
OUTER = 6  # calls around that of an operation whose lines are kept
NONBLOCKING_GRACE = 1.0  # seconds in a call that should return at once, after which it counts as blocked
KEEP_WORK = {"isend", "irecv", "batch_isend_irecv"}  # calls whose Work the program has
_TORCH = f"{Path(torch.__file__).parent}/"
_OURS = ("engine", "observers", "compare", "jobs")
cell = {"runs": ""}  # the name of the one that runs, as of a file
_LIBRARY = (_TORCH, *(f"/rankcell/{part}/" for part in _OURS), "<frozen")


class Operation:
    """One communication of this rank, from call to end; its names are as in `Event` and `Wait` (`seq`: `nth`)."""

    # Most of these keep their default: writing thirty attributes for each call cost more than the rest.
    group: str = ""
    ranks: tuple[int, ...] = ()
    outer: tuple[tuple[str, int], ...] = ()
    seq = nth = nbytes = tag = line = thread = 0  # `seq` counts under `key`, `nth` does so within the cell
    key: Any = None
    shape: tuple[int, ...] = ()
    dtype = reduce_op = via = file = ""
    text = ""  # of a call that has no tensors, such as new_group
    peer: int | None = None
    splits: Any = None  # of an all_to_all of one tensor: rows from each rank, and to each
    is_async = False
    start: float | None = None
    issued: float | None = None
    wait_start: float | None = None
    wait_end: float | None = None
    done: float | None = None
    has_timeout = False  # its wait ends by itself: it cannot be part of a deadlock
    blocks = False  # the call itself waits for other ranks, as making a group does
    error: str | None = None
    work: Any = None
    inputs: Any = ()
    outputs: Any = ()
    before: Any = None
    before_out: Any = None
    after: Any = None
    watched: Watched | None = None
    polls = 0  # how often a program has asked whether it is over
    # in a world whose device enqueues calls: whether this one is enqueued, or the host's
    enqueued: bool | None = None
    passed: Callable[[], bool] | None = None  # of a call that only enqueues: is the device through with it?
    landing: Any = None  # a receive on a GPU over gloo: the tensor, and its buffer on the host
    batch: Sequence["Operation"] = ()  # operations that share its Work

    _over = False

    def __init__(self, op: str) -> None:
        self.op = op
        self.thread = threading.get_ident()

    def describe(self) -> str:
        """The call in a learner's words: "all_reduce(float32[4])"."""
        text = self.text or call_text(self.op, self.dtype, self.shape, self.reduce_op, self.peer, self.tag)
        return text if self._main_thread_answers() else f"{text} in another thread"

    def call(self) -> Call:
        return Call(self.describe(), self.line, self.nth, self.group, self.op, self._where())

    def place(self) -> str:
        """Its line and file as one text, for other ranks; of a long path the end."""
        return f"{self.line} {self._where()[-200:]}"

    def _where(self) -> str:
        """The file of its line, and where that is not the cell that runs, the line there that led to it."""
        led = next((n for file, n in self.outer if not file), 0) if self.file and cell["runs"] else 0
        return f"{self.file}{FROM}{led}" if led else self.file

    @property
    def waiting(self) -> bool:
        """Whether a thread of the rank stands in this operation now, as far as Python can see."""
        if self.error is not None or self.done is not None or self.has_timeout:
            return False
        if self.passed is not None:
            return self.awaited is not None and not self.finished
        if self.issued is None and not self.blocks:
            # posting a receive takes microseconds; on a busy machine others may have the core in the middle of it
            return self.start is not None and clock() - self.start > NONBLOCKING_GRACE
        return self.issued is None or (self.wait_start is not None and self.wait_end is None)

    @property
    def finished(self) -> bool:
        if self.error is not None or self.done is not None:
            return True
        if self.passed is not None:
            self._over = self._over or bool(self.passed())
            return self._over
        if self.wait_end is not None:
            return True
        return self.issued is not None and (self.work is None or bool(self.work.is_completed()))

    @property
    def awaited(self) -> float | None:
        """Of a call that only enqueues: since when what comes later on the device waits for it; None if nothing does.

        A call without a Work orders at once. What C++ waits for (DDP's reducer, FSDP) is ordered soon after its call.
        """
        if self.wait_start is not None:
            return self.wait_start
        kept = self.is_async and (not self.via or self.via in KEEP_WORK or self.via.startswith(self.op))
        return None if kept else self.issued

    @property
    def end(self) -> float:
        """When it was over: with the wait of Python, or, if only C++ waits, when it is done."""
        over = [at for at in (self.wait_end, self.done) if at is not None]
        return max(over) if over else clock() if self.issued is None else self.issued

    def wait(self, *, behind: bool = False) -> Wait:
        """This operation as the notebook is told of it while it is not over; `behind` others on the device."""
        thread = 0 if self._main_thread_answers() else self.thread
        shared = {name: getattr(self, name) for name in _OF_WAIT} | {"file": self._where()}
        waiting, called = self.waiting and not behind, called_by_torch(self.group)
        return Wait(text=self.describe(), waiting=waiting, thread=thread, called=called, **shared)

    def _main_thread_answers(self) -> bool:
        """Whether it called, or a thread of C++ such as autograd's on a GPU, which it waits for."""
        if self.thread == threading.main_thread().ident:
            return True
        return self.thread not in {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}

    def event(self, rank: int, began: float) -> Event:
        def since(at: float | None) -> Any:
            return None if at is None else at - began

        end = self.end
        values = None if self.before is None else Values(self.before, self.before_out or (), self.after or ())
        return Event(
            rank, start=since(self.start) or 0.0, end=since(end), done=since(self.done), seq=self.nth, values=values,
            issued=since(end if self.issued is None else self.issued), wait_start=since(self.wait_start),
            **{name: getattr(self, name) for name in _OF_EVENT},
        )  # fmt: skip


_OF_BOTH = ("op", "group", "ranks", "peer", "tag", "line", "file", "via")
_OF_WAIT = (*_OF_BOTH, "key", "seq", "nth")
_OF_EVENT = (*_OF_BOTH, "outer", "shape", "dtype", "nbytes", "reduce_op", "is_async", "watched")


def queued(pending: Iterable[Operation]) -> list[tuple[Operation, bool]]:
    """The operations of a rank that a device has not done yet, in the order of their calls, and which of them stand
    behind another one: in the queue of their group, or after one that the rank waits for.
    """
    found: list[tuple[Operation, bool]] = []
    heads: dict[str, Operation] = {}  # the first of each group
    since: float | None = None  # when the rank began to wait for one of those before
    for o in pending:
        if o.enqueued is False:
            found.append((o, False))
            continue
        head = heads.setdefault(o.group, o)
        waits_first = since is not None and o.start is not None and since <= o.start
        one_batch = head.via == o.via == "batch_isend_irecv" and head.line == o.line
        found.append((o, waits_first or not (head is o or one_batch)))
        if (awaited := o.awaited) is not None and (since is None or awaited < since):
            since = awaited
    return found


def flatten(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument of an operation: one, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) is list and all(isinstance(v, torch.Tensor) for v in value):
        return value
    return [t for v in value for t in flatten(v)] if isinstance(value, (list, tuple)) else []


@lru_cache  # `str` of a dtype takes a microsecond
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numbers(tensors: list[torch.Tensor]) -> tuple[tuple[float, ...], ...]:
    """The first numbers of each tensor; none of a sparse one."""
    lists = (t.detach().flatten()[:MAX_VALUES].tolist() if t.layout is torch.strided else () for t in tensors)
    return tuple(map(tuple, lists))


def part_of(array: torch.Tensor, tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where in the flattened `array` a tensor lies, from and up to; None if it is no part of it."""
    begin = (tensor.data_ptr() - array.data_ptr()) // array.element_size()
    inside = 0 <= begin and begin + tensor.numel() <= array.numel()
    same = tensor.untyped_storage().data_ptr() == array.untyped_storage().data_ptr()
    return (begin, begin + tensor.numel()) if same and inside else None


def caller(depth: int = 1) -> tuple[int, str, str, tuple[tuple[str, int], ...]]:
    """The line of the cell or script that led here, the public torch function it called, if any, the file of the line
    ("" for a rank cell), and file and line of each call around it, as far as OUTER.

    It is looked for from so many frames above the one that asks. On a GPU the backward runs in threads of C++, which
    have no frame of the learner's: then the line is the one where the main thread stands.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    main = threading.main_thread().ident or 0
    above = sys._current_frames().get(main) if threading.get_ident() != main else None
    via, last = "", frame
    while True:
        if frame is None:
            of_python = last is not None and last.f_code.co_name == "_bootstrap"  # the thread is Python's
            if above is None or of_python:
                return 0, via, "", ()
            frame, above = above, None
        code = frame.f_code
        kind = kind_of(code)
        if kind is True:
            around = traceback.walk_stack(frame.f_back) if frame.f_back else ()
            outer = ((file_of(f.f_code), n) for f, n in around if kind_of(f.f_code) is True)
            return frame.f_lineno, via, file_of(code), tuple(islice(outer, OUTER))
        if kind is None:
            via = type(frame.f_locals.get("self")).__name__
        elif kind:
            via = kind
        last, frame = frame, frame.f_back


def file_of(code: Any) -> str:
    """The file that a line of the learner's stands in, or "cell 2"; "" for the cell that runs, which has none."""
    name: str = code.co_filename
    if name.startswith("<cell ") and name != cell["runs"]:
        return name.strip("<>")
    return "" if name.startswith("<") or "ipykernel_" in name else name


@lru_cache(10_000)  # every cell brings new code
def kind_of(code: Any) -> bool | str | None:
    """What a frame with this code is: a line of the learner's (True), a function of torch by its public name, a
    constructor of torch (None: its class is asked), or nothing of interest ("").
    """
    filename, name = code.co_filename, code.co_name
    if filename.startswith("<cell"):
        return True
    if not any(part in filename for part in _LIBRARY):  # a notebook function or a script, or another library
        library = "site-packages" in filename or "/lib/python" in filename
        return "ipykernel_" in filename or not library or ""
    if _TORCH not in filename:
        return ""
    # how a learner calls the torch function: "all_reduce", "DistributedDataParallel", "backward"
    if name == "__init__":
        return None
    return "" if name.startswith("_") or "<locals>" in code.co_qualname else name


_group_ranks: dict[str, tuple[int, ...]] = {}


def ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group, by name: asking torch each time costs more than the rest of the record."""
    if (ranks := _group_ranks.get(group.group_name)) is None:
        try:
            ranks = _group_ranks[group.group_name] = tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):  # while the default group is being set up
            return tuple(range(group.size()))
    return ranks


def called_by_torch(name: Any) -> str:
    """What the program calls the group of this name in torch: its `group_desc` where it gave one, else the name."""
    with contextlib.suppress(RuntimeError):
        described = dist.distributed_c10d._resolve_process_group(name).group_desc
        return str(name[:12] if described in ("", "undefined") else described)  # a name may be a hash
    return ""


def forget_groups() -> None:
    """Call when process groups were destroyed: their names will be given out again."""
    _group_ranks.clear()
