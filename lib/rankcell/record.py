"""Inside a rank: sees every communication before it is sent, whoever issues it, and writes it down.

All of torch's distributed operations (calls of the user, DDP's reducer, FSDP2, DTensor, functional
collectives, pipelining) pass the dispatcher as `c10d::...`. We register at its BackendSelect key, which sits
right above the backends: nothing is overridden, one registration serves every backend and device, and the
real kernel is reached by redispatch. Measured against nine other ways to listen: the only one that saw
everything without deadlock and without a tax on computing.

Beside the record it keeps, where other ranks can read it (`boards.py`), a signature of each operation: a rank
whose call does not match its peers' raises `MismatchError` before any data moves, where gloo would abort the
process or return garbage. It does not draw, and it decides nothing about hangs: `diagnose.py` does.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from . import modules
from .boards import Board, StoreBoard
from .errors import MismatchError
from .meter import Meter
from .results import Call, Dropped, Event, Memory, Mismatch, Values, Watched, call_text

clock = time.monotonic  # one clock for all processes of a machine

MAX_EVENTS = 10_000  # operations, and spans, per rank and cell; of older ones only a summary is kept
MAX_NAMES = 200  # lines of that summary; spans may have any number of names
MAX_VALUES = 64  # numbers kept per tensor with `--values`

# Operation of the dispatcher -> its name in the course.
OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
_INPUTS = ("input_tensors", "input_tensor", "input", "inputs", "input_list", "tensors", "tensor")
_OUTPUTS = ("output_tensors", "output_tensor", "output", "outputs", "output_list", "tensors", "tensor")
_REDUCING = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)
_ASYNC = {"isend", "irecv", "batch_isend_irecv"}
_REDUCING_OPS = {"all_reduce", "reduce", "reduce_scatter"}

_LIBRARY = ("/torch/", "/rankcell/record.py", "/rankcell/worker.py", "<frozen")

_here = (
    threading.local()
)  # what the Python side of a call knows and the dispatcher does not: the reduce op, the caller


class Operation:
    """One communication of this rank, from its call to its end. Becomes an `Event` when the cell ends."""

    # Most of these keep their default: writing thirty attributes for each call cost more than the rest.
    group: str = ""
    ranks: tuple[int, ...] = ()
    seq = nth = nbytes = tag = line = thread = 0
    key: Any = None
    shape: tuple[int, ...] = ()
    dtype = reduce_op = via = ""
    peer: int | None = None
    is_async = False
    start: float | None = None
    issued: float | None = None
    wait_start: float | None = None
    wait_end: float | None = None
    done: float | None = None
    gives_up = False  # the wait has a time limit of its own: it cannot be part of a deadlock
    error: str | None = None
    work: Any = None
    inputs: Any = ()
    outputs: Any = ()
    before: Any = None
    before_out: Any = None
    after: Any = None
    watched: Watched | None = None

    def __init__(self, op: str) -> None:
        self.op = op

    def describe(self) -> str:
        """The call in a learner's words: "all_reduce(float32[4])"."""
        return call_text(self.op, self.dtype, self.shape, self.reduce_op, self.peer, self.tag)

    @property
    def waiting(self) -> bool:
        """Whether a thread of the rank stands in this operation now, as far as Python can see."""
        if self.error is not None or self.done is not None:
            return False
        if self.issued is None:
            return True
        return not self.gives_up and self.wait_start is not None and self.wait_end is None

    @property
    def finished(self) -> bool:
        """Whether the operation is over."""
        if self.error is not None or self.done is not None or self.wait_end is not None:
            return True
        if self.issued is not None and self.work is not None:
            return bool(self.work.is_completed())
        return self.issued is not None and self.work is None

    @property
    def end(self) -> float:
        """When it was over: a call that Python waits for, with the wait; one that C++ waits for, when it is
        done.
        """
        if self.wait_end is not None:
            return self.wait_end if self.done is None else max(self.wait_end, self.done)
        return self.done if self.done is not None else self.issued if self.issued is not None else clock()

    def event(self, rank: int, began: float) -> Event:
        """This operation as frozen data, with times since the cell `began`."""
        end = self.end
        values = None
        if self.before is not None:
            values = Values(self.before, self.before_out or (), self.after or ())
        return Event(
            rank=rank,
            op=self.op,
            start=self.start - began,
            end=end - began,
            group=self.group,
            ranks=self.ranks,
            done=None if self.done is None else self.done - began,
            seq=self.nth,
            shape=self.shape,
            dtype=self.dtype,
            nbytes=self.nbytes,
            peer=self.peer,
            tag=self.tag,
            reduce_op=self.reduce_op,
            is_async=self.is_async,
            issued=(self.issued if self.issued is not None else end) - began,
            wait_start=None if self.wait_start is None else self.wait_start - began,
            line=self.line,
            via=self.via,
            values=values,
            watched=self.watched,
        )


def _flatten(value: Any) -> list[torch.Tensor]:
    if type(value) is list and all(isinstance(v, torch.Tensor) for v in value):
        return value
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _flatten(v)]
    return []


_dtype_names = {
    dtype: name
    for name, dtype in sorted(vars(torch).items(), reverse=True)
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
}


def _dtype(tensor: torch.Tensor) -> str:
    dtype = tensor.dtype
    return _dtype_names.get(dtype) or str(dtype).removeprefix("torch.")


def _numbers(tensors: list[torch.Tensor]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(t.detach().flatten()[:MAX_VALUES].tolist()) for t in tensors)


def _part_of(array: torch.Tensor, tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where in the flattened `array` a tensor lies, from and up to; None if it is no part of it."""
    size = array.element_size()
    begin = (tensor.data_ptr() - array.data_ptr()) // size
    inside = 0 <= begin and begin + tensor.numel() <= array.numel()
    same = tensor.untyped_storage().data_ptr() == array.untyped_storage().data_ptr()
    return (begin, begin + tensor.numel()) if same and inside else None


# What a frame with this code is: a line of the learner's (True), a function of torch by its public name, a
# constructor of torch (None: its class is asked), or nothing of interest ("").
_codes: dict[Any, bool | str | None] = {}


def _caller() -> tuple[int, str]:
    """The line of the cell that led here, and the public torch function it called, if any."""
    frame, via = sys._getframe(2), ""
    while frame is not None:
        code = frame.f_code
        kind = _codes.get(code, 0)
        if kind == 0:
            if len(_codes) > 10_000:  # every cell brings new code
                _codes.clear()
            kind = _codes[code] = _kind_of(code)
        if kind is True:
            return frame.f_lineno, via
        if kind is None:
            via = type(frame.f_locals.get("self")).__name__
        elif kind:
            via = kind
        frame = frame.f_back
    return 0, via


def _kind_of(code: Any) -> bool | str | None:
    filename, name = code.co_filename, code.co_name
    if filename.startswith("<cell"):
        return True
    if not any(part in filename for part in _LIBRARY):
        return True if _here_line(filename) else ""
    if "/torch/" not in filename:
        return ""
    # how a learner calls the torch function: "all_reduce", "DistributedDataParallel", "backward"
    if name == "__init__":
        return None
    return "" if name.startswith("_") or "<locals>" in code.co_qualname else name


def _here_line(filename: str) -> bool:
    """Whether a function that does not come from a rank cell is the learner's own: a notebook function or a
    script.
    """
    return "ipykernel_" in filename or ("site-packages" not in filename and "/lib/python" not in filename)


class Recorder:
    """Writes down every communication of this rank while a cell runs. One per rank, installed for good.

    Between cells it costs one dictionary look-up per operation. `state` for the watchdog thread is read
    without a lock: lists and dictionaries of CPython are safe to read while the main thread appends.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.board: Board | None = None
        self.far_board: StoreBoard | None = None  # for groups with ranks on other nodes
        self.near: frozenset[int] = frozenset()  # the ranks of this node, where there are others
        self.cell = ""
        self.generation = 0
        self.broken = (
            False  # a wait failed in this cell: gloo has closed the connection, whoever caught the error
        )
        self.failed_call: Call | None = None  # the last operation of this cell that raised
        self.failures: dict[Any, int] = {}  # calls that raised, as `counts` counts those that did not
        self._before: dict[Any, int] = {}  # the counts when the cell began
        self.began = clock()
        self.keep_values = False
        self.line_offset = 0
        self.operations: deque[Operation] = deque()
        self._dropped: dict[tuple[str, str], list[float]] = {}  # kind, op: how many, bytes, seconds
        self._main = threading.get_ident()
        self.total = 0
        self.counts: dict[Any, int] = {}
        self.open: dict[int, Operation] = {}  # issued and not known to be finished
        self.threads: set[int] = (
            set()
        )  # Python threads other than the main one that communicated in this cell
        self._spans: deque[Event] = deque()
        self.memory: tuple[Memory, ...] = ()  # what was measured in this cell
        self._meters: list[Meter] = []  # those that measure now
        self._array: torch.Tensor | None = None  # that `watch` looks at
        self._watching: Operation | None = None  # the last operation seen by it
        self._by_work: dict[int, Operation] = {}
        self._lock = threading.Lock()
        self._libraries: list[torch.library.Library] = []
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Register at the dispatcher and wrap the Python methods that know what it does not."""
        key = torch._C.DispatchKey.BackendSelect
        library = torch.library.Library("c10d", "IMPL")
        for name in torch._C._dispatch_get_all_op_names():
            short = name.removeprefix("c10d::")
            if name.startswith("c10d::") and short in OPERATIONS:
                op = getattr(torch.ops.c10d, short).default
                library.impl(short, self._implementation(short, op, key), "BackendSelect", with_keyset=True)
        self._libraries.append(library)
        original_wait = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            operation = self._by_work.pop(id(work), None)
            if operation is None:
                return original_wait(work, *args, **kwargs)
            operation.wait_start = clock()
            operation.gives_up = bool(args or kwargs)
            try:
                return original_wait(work, *args, **kwargs)
            except BaseException as error:
                self._fail(operation, error)
                self.broken = True
                raise
            finally:
                operation.wait_end = clock()
                self._close(operation)

        dist.Work.wait = wait
        self._originals = [(dist.Work, "wait", original_wait)]
        for name in _REDUCING:
            method = dist.ProcessGroup.__dict__.get(name)
            if method is not None:
                self._originals.append((dist.ProcessGroup, name, method))
                setattr(dist.ProcessGroup, name, _remember_reduce_op(method))

    def uninstall(self) -> None:
        """Take everything back that `install` did: nothing is recorded, compared or diagnosed any more."""
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()

    def reach(self, store: Any, near: Iterable[int]) -> None:
        """From now on there are ranks on other nodes than `near`'s, which are met in `store`."""
        self.far_board, self.near = StoreBoard(store, self.rank), frozenset(near)

    def belong(self, rank: int, board: Board) -> None:
        """From now on this is the recorder of `rank`: it was installed before the ranks were forked."""
        self.rank, self.board = rank, board

    def begin(self, cell: str, *, began: float, values: bool) -> None:
        """Forget the last cell and record the one called `cell`, with times since `began`, the same moment of
        the machine's clock for all ranks.
        """
        with self._lock:
            self.cell, self.keep_values, self.began = cell, values, began
            self._sweep()
            self.operations.clear()
            self._before = dict(self.counts)
            self._dropped, self._spans = {}, deque()
            self._main = threading.main_thread().ident or 0
            self.threads, self.total, self.failed_call = set(), 0, None
            self.broken = False
            self.memory, self._meters = (), []
            self._array = self._watching = None

    def join(self, generation: int) -> None:
        """Count from 1 again: the process groups are new, and nothing is open any more."""
        with self._lock:
            self.generation = generation
            self.counts, self._before, self.failures = {}, {}, {}
            self.open.clear()
            self._by_work.clear()

    def events(self) -> tuple[list[Event], tuple[Dropped, ...]]:
        """What was recorded since `begin`, and a summary of the older events that were dropped."""
        events = [o.event(self.rank, self.began) for o in self.operations if o.start is not None]
        dropped = [
            Dropped(op, int(count), int(nbytes), seconds, kind)
            for (kind, op), (count, nbytes, seconds) in self._dropped.items()
        ]
        return events + list(self._spans), tuple(dropped)

    def _forget(self, old: Operation | Event) -> None:
        """Add the oldest event to the summary that is kept of it."""
        kind, nbytes = ("comm", old.nbytes) if isinstance(old, Operation) else (old.kind, 0)
        key = (kind, old.op)
        if key not in self._dropped and len(self._dropped) >= MAX_NAMES:
            key = (kind, "others")
        sums = self._dropped.setdefault(key, [0, 0, 0.0])
        sums[0] += 1
        sums[1] += nbytes
        sums[2] += old.end - old.start if old.start is not None else 0.0

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the time spent inside as a compute span called `name`."""
        start = clock()
        outside = [(meter, meter.phase) for meter in self._meters]
        for meter, _ in outside:
            meter.phase = name
        try:
            yield
        finally:
            now = clock()
            for meter, phase in outside:
                meter.phase = phase
            self._note_span(name, start, now, _caller()[0])

    def _note_span(self, name: str, start: float, end: float, line: int = 0) -> None:
        if len(self._spans) >= MAX_EVENTS:
            self._forget(self._spans.popleft())
        span = Event(self.rank, name, start - self.began, end - self.began, kind="compute", line=line)
        self._spans.append(span)

    def spans(self, model: torch.nn.Module, *names: str) -> AbstractContextManager[None]:
        """Record forward and backward of the model's modules as compute spans while the block runs."""
        return modules.watched(modules.chosen(model, names), self._note_span)

    @contextlib.contextmanager
    def measure(self, *owners: Any) -> Iterator[Meter]:
        """Measure the memory that the block inside holds; its samples go with the cell's result."""
        meter = Meter(*owners, began=self.began)
        self._meters.append(meter)
        try:
            with meter:
                yield meter
        finally:
            if meter in self._meters:
                self._meters.remove(meter)
            self.memory += meter.samples

    @contextlib.contextmanager
    def watch(self, array: torch.Tensor) -> Iterator[None]:
        """Record with every operation of this rank what `array` holds, while the block runs."""
        if array.numel() > MAX_VALUES:
            raise ValueError(
                f"an array of {array.numel()} numbers is too long to watch: {MAX_VALUES} at most."
            )
        self._array, self._watching = array, None
        try:
            yield
        finally:
            self._watch(None, None)
            self._array = None

    def _watch(self, o: Operation | None, tensor: torch.Tensor | None) -> None:
        """Note what the watched array holds now: after the last operation, before `o`."""
        array, last = self._array, self._watching
        (now,) = _numbers([array])
        if last is not None:
            last.watched = replace(last.watched, after=now)
        self._watching = o
        if o is not None:
            o.watched = Watched(now, now, None if tensor is None else _part_of(array, tensor))

    def _implementation(self, name: str, op: Any, key: Any) -> Callable[..., Any]:
        arguments = [a.name for a in op._schema.arguments]
        at_group = arguments.index("process_group")
        at_async = arguments.index("async_op") if "async_op" in arguments else None
        at_peer = next((arguments.index(k) for k in ("root_rank", "dst", "src") if k in arguments), None)
        at_tag = arguments.index("tag") if "tag" in arguments else None
        at_in = next((i for i, k in enumerate(arguments) if k in _INPUTS), 0)
        at_out = next((i for i, k in enumerate(arguments) if k in _OUTPUTS), 0)
        at_splits = (
            (arguments.index("output_split_sizes"), arguments.index("input_split_sizes"))
            if "output_split_sizes" in arguments
            else None
        )
        course_name = OPERATIONS[name]
        unbox_work, unbox_group = dist.Work.unbox, dist.ProcessGroup.unbox
        get_ident, redispatch = threading.get_ident, op._handle.redispatch_boxed
        is_barrier, reduces = course_name == "barrier", course_name in _REDUCING_OPS
        compared = course_name != "monitored_barrier"
        public_wait = name not in ("send", "recv_", "recv_any_source_")

        def implementation(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            o = Operation(course_name)
            group = unbox_group(args[at_group])
            o.group = group.group_name
            o.ranks = _group_ranks.get(o.group) or _ranks_of(group)
            inputs = _flatten(args[at_in])
            outputs = inputs if at_in == at_out else _flatten(args[at_out])
            first = inputs[0] if inputs else outputs[0] if outputs else None
            if first is not None:
                o.shape, o.dtype = tuple(first.shape), _dtype(first)
            if not is_barrier:
                for tensor in inputs:
                    o.nbytes += tensor.numel() * tensor.element_size()
            if at_async is not None and (len(args) <= at_async or args[at_async] is not False):
                o.is_async = True
            if at_peer is not None:
                o.peer = o.ranks[args[at_peer]]
            if at_tag is not None:
                o.tag = args[at_tag]
            if reduces:
                o.reduce_op = getattr(_here, "reduce_op", "")
            o.line, o.via = _caller()
            if o.via in _ASYNC:
                o.is_async = True
            o.thread = get_ident()
            if self._array is not None:
                self._watch(o, first)
            if self.keep_values:
                o.inputs, o.outputs = inputs, outputs
                o.before, o.before_out = _numbers(inputs), _numbers(outputs)
            with self._lock:
                self._number(o)
                if len(self.open) > 256:
                    self._sweep()
                if len(self.operations) >= MAX_EVENTS:
                    self._forget(self.operations.popleft())
                self.operations.append(o)
                self.total += 1
                self.open[id(o)] = o
                if o.thread != self._main and o.thread in threading._active:
                    self.threads.add(o.thread)
            o.start = clock()
            try:
                if self.board is not None and len(o.ranks) > 1 and compared:
                    splits = None if at_splits is None else (args[at_splits[0]], args[at_splits[1]])
                    self._check(o, inputs, outputs, splits)
                result = redispatch(keyset.remove(key), *args, **kwargs)
            except BaseException as error:
                self._fail(o, error)
                self._close(o)
                raise
            o.issued = clock()
            boxed = result[-1] if isinstance(result, tuple) else result
            if boxed is None:
                o.done = o.issued
                self._close(o)
                return result
            work = unbox_work(boxed)
            o.work = work
            self._by_work[id(work)] = o
            if public_wait and o.is_async:
                try:
                    work.get_future().add_done_callback(lambda _: self._mark_done(o))
                except RuntimeError:  # gloo's reduce-scatter has no future: its end is the end of the wait
                    pass
            return result

        return implementation

    def _number(self, o: Operation) -> None:
        if o.op == "send":
            key = (o.group, "p2p", self.rank, o.peer, o.tag, "send")
        elif o.op == "recv":
            key = (o.group, "p2p", o.peer, self.rank, o.tag, "recv")
        else:
            key = (o.group, o.ranks)
        o.key = key
        o.seq = self.counts[key] = self.counts.get(key, 0) + 1
        o.nth = o.seq - self._before.get(key, 0)

    def _fail(self, o: Operation, error: BaseException) -> None:
        """An operation that failed counts as never called: whoever waits for it waits in vain."""
        o.error = repr(error)
        self.failed_call = Call(o.describe(), o.line, o.nth, o.group)
        with self._lock:
            if self.counts.get(o.key) == o.seq:
                self.counts[o.key] -= 1
                # its signature stays on the board: the next call must not be compared with it
                self.failures[o.key[:-1]] = self.failures.get(o.key[:-1], 0) + 1

    def _mark_done(self, o: Operation) -> None:
        o.done = clock()
        if o.wait_end is None and o.wait_start is None and self._by_work.get(id(o.work)) is o:
            del self._by_work[id(o.work)]
        self._close(o)

    def _close(self, o: Operation) -> None:
        if o.outputs:
            if o.error is None:
                o.after = _numbers(o.outputs)
            o.inputs = o.outputs = ()
        o.work = None  # a Work holds its tensors: keeping it would keep the learner's memory
        self.open.pop(id(o), None)

    def _sweep(self) -> None:
        """Drop operations that nobody waited for and that are over."""
        for o in list(self.open.values()):
            if o.issued is not None and o.finished:
                if o.work is not None:
                    self._by_work.pop(id(o.work), None)
                self._close(o)

    def _check(self, o: Operation, inputs: list[Any], outputs: list[Any], splits: Any) -> None:
        """Put down what this rank calls, and raise if a peer's call under the same number does not match."""
        name = f"{self.generation}|{o.group}|{o.seq}"
        if self.failures and self.failures.get(o.key[:-1]):
            name += f"|{self.failures[o.key[:-1]]}"
        if o.op in ("send", "recv"):
            if o.peer is None:
                return
            name += f"|{self.rank}>{o.peer}|{o.tag}" if o.op == "send" else f"|{o.peer}>{self.rank}|{o.tag}"
            tensor = inputs[0] if inputs else outputs[0]
            signature = f"{o.describe()}\n{tensor.numel()} {_dtype(tensor)}".encode()
            peers: tuple[int, ...] = (o.peer,)
        else:
            signature = _collective_signature(o, inputs, outputs, splits)
            peers = o.ranks
        if self.far_board is None or self.near.issuperset(peers):
            board: Any = self.board
            number = board.write(name, signature, o.line)
        else:
            board = self.far_board
            number = board.write(name, signature, o.line, stream=o.key, ranks=max(len(peers), 2))
        for peer in peers:
            if peer == self.rank:
                continue
            other = board.read(number, peer)
            if other is None or (other[0] == signature and o.op != "all_to_all"):
                continue
            mine, theirs = (text.decode(errors="replace").split("\n") for text in (signature, other[0]))
            problem = _difference(o, self.rank, peer, mine, theirs)
            if problem:
                raise MismatchError(
                    Mismatch(
                        problem,
                        {
                            self.rank: Call(mine[0], o.line, o.nth, o.group),
                            peer: Call(theirs[0], other[1], o.nth, o.group),
                        },
                    )
                )


_signatures: dict[Any, bytes] = {}  # of collectives on one tensor: a program repeats a few of them


def _collective_signature(o: Operation, inputs: list[Any], outputs: list[Any], splits: Any) -> bytes:
    """The call in words, what must be equal on all ranks, and for `all_to_all` its pieces; one per line."""
    if o.op == "all_to_all" or len(inputs) > 1 or len(outputs) > 1:
        text = f"{o.describe()}\n{_equal_on_all(o, inputs, outputs)}"
        return (f"{text}\n{_pieces(o, inputs, outputs, splits)}" if o.op == "all_to_all" else text).encode()
    tensors = outputs if o.op == "scatter" else inputs
    key = (o.op, o.shape, o.dtype, o.reduce_op, o.peer, tensors[0].shape if tensors else None)
    found = _signatures.get(key)
    if found is None:
        if len(_signatures) > 1000:
            _signatures.clear()
        found = _signatures[key] = f"{o.describe()}\n{_equal_on_all(o, inputs, outputs)}".encode()
    return found


def _equal_on_all(o: Operation, inputs: list[Any], outputs: list[Any]) -> str:
    """What must be equal on all ranks of a collective, apart from `all_to_all`'s pieces."""
    if o.op == "barrier":
        return "barrier"
    tensors = outputs if o.op == "scatter" else inputs
    shapes = ";".join(f"{_dtype(t)}{list(t.shape)}" for t in tensors[:4])
    if o.op == "all_to_all":
        shapes = _dtype(tensors[0]) if tensors else ""
    return f"{o.op}|{shapes}|{o.reduce_op}|{'' if o.peer is None else o.peer}"


def _pieces(o: Operation, inputs: list[Any], outputs: list[Any], splits: Any) -> str:
    """Rows sent to each rank of the group and rows expected from each, as text."""
    n = len(o.ranks)
    if splits is None:
        sent, expected = [t.numel() for t in inputs], [t.numel() for t in outputs]
    else:
        out_splits, in_splits = splits
        rows_in, rows_out = inputs[0].shape[0], outputs[0].shape[0]
        sent = list(in_splits) or [rows_in // n] * n
        expected = list(out_splits) or [rows_out // n] * n
    return ",".join(map(str, sent)) + "|" + ",".join(map(str, expected))


def _difference(o: Operation, rank: int, peer: int, mine: list[str], theirs: list[str]) -> str:
    """What does not match between this rank's call and a peer's, in words; "" if they match."""
    if o.op in ("send", "recv"):
        return "" if mine[1] == theirs[1] else _unequal_p2p(mine[1], theirs[1])
    if mine[1] != theirs[1]:
        a, b = mine[1].split("|"), theirs[1].split("|")
        if a[0] != b[0]:
            return "different operations"
        if a[1] != b[1]:
            dtypes = [[s.split("[")[0] for s in side[1].split(";")] for side in (a, b)]
            return "different dtypes" if dtypes[0] != dtypes[1] else "different shapes"
        if a[3] != b[3]:
            return "different roots"
        # an empty reduce op was issued from C++, where it is not known: it is DDP's reducer, which sums
        return "different reduce operations" if a[2] and b[2] else ""
    if len(mine) > 2 and len(theirs) > 2:
        sent, expected = ([int(x) for x in part.split(",") if x] for part in mine[2].split("|"))
        peer_sent, peer_expected = ([int(x) for x in part.split(",") if x] for part in theirs[2].split("|"))
        i, j = o.ranks.index(rank), o.ranks.index(peer)
        try:
            if sent[j] != peer_expected[i]:
                return f"rank {rank} sends {sent[j]} to rank {peer}, which expects {peer_expected[i]}"
            if peer_sent[i] != expected[j]:
                return f"rank {peer} sends {peer_sent[i]} to rank {rank}, which expects {expected[j]}"
        except IndexError:
            return "different numbers of splits"
    return ""


def _unequal_p2p(mine: str, theirs: str) -> str:
    return "different dtypes" if mine.split()[1] != theirs.split()[1] else "different sizes"


_group_ranks: dict[str, tuple[int, ...]] = {}


def _ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group, by name: asking torch each time costs more than the rest of the
    record.
    """
    name = group.group_name
    ranks = _group_ranks.get(name)
    if ranks is None:
        try:
            ranks = tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):  # while the default group is being set up
            return tuple(range(group.size()))
        _group_ranks[name] = ranks
    return ranks


def forget_groups() -> None:
    """Call when process groups were destroyed: their names will be given out again."""
    _group_ranks.clear()


def _remember_reduce_op(method: Any) -> Any:
    """Wrap a reducing method of ProcessGroup: its options name the reduce op, which the dispatcher hides."""

    def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
        _here.reduce_op = _reduce_op(args, kwargs)
        try:
            return method(group, *args, **kwargs)
        finally:
            _here.reduce_op = ""

    return wrapper


def _reduce_op(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is list or kind is torch.Tensor:
            continue
        value = getattr(value, "reduceOp", value)
        kind = type(value)
        if kind is _ReduceOp:
            return _reduce_names[value.op]
        if kind is _RedOpType:
            return _reduce_names[value]
    return "SUM"


_ReduceOp, _RedOpType = dist.ReduceOp, dist.ReduceOp.RedOpType
_reduce_names = {kind: name for name, kind in _RedOpType.__members__.items()}
