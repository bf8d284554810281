"""Inside a rank: sees every communication before it is sent, whoever issues it, and writes it down.

All of torch's distributed operations (calls of the user, DDP's reducer, FSDP2, DTensor, functional
collectives, pipelining) pass the dispatcher as `c10d::...`. We register at its BackendSelect key, which sits
right above the backends: nothing is overridden, one registration serves every backend and device, and the
real kernel is reached by redispatch. Measured against nine other ways to listen: the only one that saw
everything without deadlock and without a tax on computing.

Each operation is also put down where other ranks can read it (`match.py`): a rank whose call does not match its
peers' raises `MismatchError` before any data moves, where gloo would abort the process or return garbage. It does
not draw, and it decides nothing about hangs: `diagnose.py` does. Calls of the backend object itself
(`group._get_backend(device).allreduce(...)`) do not pass the dispatcher, and are not seen.
"""

import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..results import Call, Dropped, Event, Memory, Watched
from . import spans, streams
from .match import Board, Matcher, Signature, StoreBoard
from .messages import Wait
from .meter import Meter
from .operation import (
    ASKED_IN_VAIN,
    MAX_VALUES,
    Operation,
    caller,
    clock,
    dtype_name,
    flatten,
    numbers,
    part_of,
    queued,
    ranks_of,
)

MAX_EVENTS = 10_000  # operations, and spans, per rank and cell; of older ones only a summary is kept
MAX_WAITS = 64  # operations in a device's queues of which the notebook is told: the first ones say it all
MAX_NAMES = 200  # lines of that summary; spans may have any number of names


class Stage(Protocol):
    """What answers the operations of a rank that rehearses, see `rankcell.rehearsal`."""

    def issue(self, o: Operation, returns: int, filled: Any, inputs: list[Any], outputs: list[Any]) -> Any:
        """What the dispatcher gets for `o`: its Work, behind what it fills if it `returns` two; `o.done` is set."""
        ...

    def wait(self, o: Operation) -> None:
        """The program waits for `o`."""
        ...


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

POLLED = (
    "is_completed() of {} was asked 10,000 times. On gloo a send or receive is completed only by `wait()`: "
    "call `work.wait()` when you need its result."
)
TWICE = (
    "wait() of {} was called a second time. On gloo the second wait() of a send or receive never returns: call it once "
    "for each Work, for instance by emptying the list of Works that you have waited for."
)

# what the Python side of a call knows and the dispatcher does not: the reduce op
_here = threading.local()


class Recorder:
    """Writes down every communication of this rank while a cell runs. One per rank, installed for good.

    What the control thread asks for is read without a lock: lists and dictionaries of CPython are safe to
    read while the main thread appends.
    """

    def __init__(self) -> None:
        self.rank = 0
        # kinds of device whose calls return when they are enqueued: they are over when the device says so
        self.enqueues: frozenset[str] = frozenset()
        # calls that the backend launches together, when all are there
        self._batch: list[Operation] | None = None
        self.no_work: Any = None  # a Work that is over, for calls that have none
        self.matcher = Matcher()
        self.cell = ""
        self.generation = ""
        # a wait failed in this cell: gloo has closed the connection, whoever caught the error
        self.broken = False
        self.failed_call: Call | None = None  # the last operation of this cell that raised
        self.failed_wait: Wait | None = None  # the same, as others are told of it
        self.failures: dict[Any, int] = {}  # calls that raised, as `counts` counts those that did not
        self.impatient: set[str] = (
            set()
        )  # groups with a time limit of their own: their waits end by themselves
        self._before: dict[Any, int] = {}  # the counts when the cell began
        self.clock = clock  # a rehearsal has one of its own
        self.stage: Stage | None = None  # ... and answers instead of the backend
        self.began = clock()
        self.keep_values = False
        self.operations: deque[Operation] = deque()
        self._dropped: dict[tuple[str, str], list[float]] = {}  # kind, op: how many, bytes, seconds
        self.total = 0
        self.counts: dict[Any, int] = {}
        self.open: dict[int, Operation] = {}  # issued and not known to be finished
        self._spans: deque[Event] = deque()
        self.memory: tuple[Memory, ...] = ()  # what was measured in this cell
        self._meters: list[Meter] = []  # those that measure now
        self.trace: tuple[Any, ...] = ()  # what observers of models add in this cell: it goes with the result
        self._array: torch.Tensor | None = None  # that `watch` looks at
        self._watching: Operation | None = None  # the last operation seen by it
        self._by_work: dict[int, Operation] = {}
        # sends and receives of gloo that were waited for, and what they were: see TWICE
        self._waited: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
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
                library.impl(short, _listener(self, short, op, key), "BackendSelect", with_keyset=True)
        self._libraries.append(library)
        original_wait = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            operation = self._by_work.pop(id(work), None)
            if operation is None:
                if work in self._waited:
                    raise RuntimeError(TWICE.format(self._waited[work]))
                return original_wait(work, *args, **kwargs)
            operation.wait_start = self.clock()
            for other in operation.batch:
                other.wait_start = other.wait_end = operation.wait_start
            operation.gives_up = operation.gives_up or bool(args or kwargs)
            try:
                if self.stage is not None:
                    self.stage.wait(operation)
                return original_wait(work, *args, **kwargs)
            except BaseException as error:
                self.fail(operation, error)
                self.broken = True
                raise
            finally:
                operation.wait_end = self.clock()
                if operation.error is None:
                    if operation.op == "recv" and operation.peer is None:
                        operation.peer = operation.ranks[work._source_rank()]
                    if operation.op in ("send", "recv") and operation.passed is None and self.stage is None:
                        self._waited[work] = operation.describe()
                    if operation.landing is not None:
                        tensor, buffer = operation.landing
                        tensor.copy_(buffer)
                if operation.passed is None or operation.error is not None:
                    self._close(operation)
                elif operation.before is not None:
                    operation.after = numbers(operation.outputs)

        original_is_completed = dist.Work.is_completed

        def is_completed(work: Any) -> bool:
            operation = self._by_work.get(id(work))
            if operation is not None and operation.op in ("send", "recv"):
                operation.asked += 1
                if operation.asked == ASKED_IN_VAIN:
                    print(POLLED.format(operation.describe()), file=sys.stderr, flush=True)
            return bool(original_is_completed(work))

        start_together, launch = dist.ProcessGroup._start_coalescing, dist.ProcessGroup._end_coalescing

        def _start_coalescing(group: Any, *args: Any) -> None:
            self._batch = []
            start_together(group, *args)

        def _end_coalescing(group: Any, *args: Any) -> Any:
            batch, self._batch = self._batch or [], None
            for o in batch:
                o.wait_start = self.clock()  # a new pair is connected now: the host waits for the other side
            work = launch(group, *args)
            for o in batch:  # they have one Work together
                o.wait_start = None
                o.passed, o.work_id = work.is_completed if work is not None else _is_over, id(work)
            if batch and work is not None:
                first, *first.batch = batch
                self._by_work[id(work)] = first
            return work

        for owner, name, replacement in (
            (dist.Work, "wait", wait),
            (dist.Work, "is_completed", is_completed),
            (dist.ProcessGroup, "_start_coalescing", _start_coalescing),
            (dist.ProcessGroup, "_end_coalescing", _end_coalescing),
        ):
            self._originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, replacement)
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
        self.matcher.far, self.matcher.near = StoreBoard(store, self.rank), frozenset(near)

    def belong(self, rank: int, board: Board | None, *, enqueues: frozenset[str]) -> None:
        """From now on this is the recorder of `rank`: it was installed before the ranks were forked."""
        self.rank = self.matcher.rank = rank
        self.enqueues = enqueues
        self.matcher.board = board

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
            self.total, self.failed_call, self.failed_wait = 0, None, None
            self.broken = False
            self.matcher.begin()
            self.memory, self._meters, self.trace = (), [], ()
            self._array = self._watching = None

    def join(self, generation: str) -> None:
        """Count from 1 again: the process groups are new, and nothing is open any more."""
        with self._lock:
            self.generation = generation
            self.counts, self._before, self.failures = {}, {}, {}
            self.impatient.clear()
            self.open.clear()
            self._by_work.clear()

    def forget_counts(self) -> None:
        """Count from 1 again, under a new name: a program may use any number of tags and groups."""
        impatient = set(self.impatient)
        base, _, epoch = self.generation.partition("'")
        self.join(f"{base}'{int(epoch or 0) + 1}")
        self.impatient = impatient

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
        start = self.clock()
        outside = [(meter, meter.phase) for meter in self._meters]
        for meter, _ in outside:
            meter.phase = name
        try:
            yield
        finally:
            now = self.clock()
            for meter, phase in outside:
                meter.phase = phase
            self._note_span(name, start, now, caller()[0])

    def _note_span(self, name: str, start: float, end: float, line: int = 0) -> None:
        if len(self._spans) >= MAX_EVENTS:
            self._forget(self._spans.popleft())
        span = Event(self.rank, name, start - self.began, end - self.began, kind="compute", line=line)
        self._spans.append(span)

    def spans(self, model: torch.nn.Module, *names: str) -> AbstractContextManager[None]:
        """Record forward and backward of the model's modules as compute spans while the block runs."""
        return spans.watched(spans.chosen(model, names), self._note_span, self.clock)

    @contextlib.contextmanager
    def measure(self, *owners: Any) -> Iterator[Meter]:
        """Measure the memory that the block inside holds; its samples go with the cell's result."""
        meter = Meter(*owners, began=self.began, clock=self.clock)
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
        if array is None:
            return
        (now,) = numbers([array])
        if last is not None and last.watched is not None:
            last.watched = replace(last.watched, after=now)
        self._watching = o
        if o is not None:
            o.watched = Watched(now, now, None if tensor is None else part_of(array, tensor))

    def open_by_hand(self, o: Operation, *, blocks: bool = True) -> None:
        """From now on this rank is in an operation that passes no dispatcher: making a group, or leaving one."""
        o.blocks = blocks
        with self._lock:
            self.number(o)
            self.open[id(o)] = o
        o.start = self.clock()

    def number(self, o: Operation) -> None:
        """Count an operation: which one it is of its group, or of its pair of ranks."""
        key: tuple[Any, ...]
        if o.enqueued:
            o.tag = 0  # nccl passes tags over
        if o.op == "send":
            key = (o.group, "p2p", self.rank, o.peer, o.tag, "send")
        elif o.op == "recv":
            key = (o.group, "p2p", o.peer, self.rank, o.tag, "recv")
        else:
            key = (o.group, o.ranks)
        o.key = key
        o.seq = self.counts[key] = self.counts.get(key, 0) + 1
        o.nth = o.seq - self._before.get(key, 0)

    def fail(self, o: Operation, error: BaseException) -> None:
        """An operation that failed counts as never called: whoever waits for it waits in vain."""
        self.failed_call, self.failed_wait = o.call(), replace(o.wait(), waiting=True)
        o.error = repr(error)
        with self._lock:
            if self.counts.get(o.key) == o.seq:
                self.counts[o.key] -= 1
                # its signature stays on the board: the next call must not be compared with it
                self.failures[o.key[:-1]] = self.failures.get(o.key[:-1], 0) + 1

    def _mark_done(self, o: Operation) -> None:
        o.done = self.clock()
        if o.wait_end is None and o.wait_start is None and self._by_work.get(id(o.work)) is o:
            del self._by_work[id(o.work)]
        self._close(o)

    def finish(self, o: Operation) -> None:
        """In a rehearsal: something uses what `o` gives, so that it is over."""
        if self._by_work.get(id(o.work)) is o:
            del self._by_work[id(o.work)]
        self._close(o)

    def _close(self, o: Operation) -> None:
        if o.outputs:
            if o.error is None and o.after is None:
                o.after = numbers(o.outputs)
            o.inputs = o.outputs = ()
        o.work = o.landing = None  # these hold tensors: keeping them would keep the learner's memory
        if o.passed is not None:
            self._by_work.pop(o.work_id, None)
            o.passed = _is_over
        self.open.pop(id(o), None)

    def pending(self) -> list[Operation]:
        """Operations that are not over, in the order of their calls."""
        return [o for o in list(self.open.values()) if not o.finished]

    def status(self) -> tuple[tuple[Wait, ...], dict[Any, int]]:
        """What this rank waits for, and how often it has come to each operation: the device, where calls
        only enqueue.
        """
        pending, reached = self.pending(), dict(self.counts)
        if not self.enqueues:
            return tuple(o.wait() for o in pending), reached
        order = queued(pending)
        for o, behind in order:
            if behind and o.key in reached:
                reached[o.key] -= 1
        return tuple(o.wait(behind=behind) for o, behind in order[:MAX_WAITS]), reached

    def settled(self) -> bool:
        """Whether the device is through with every operation that the rank waits for."""
        # a call that blocks its thread is over when the cell is, or a thread that serves others stands in it
        return not any(o.passed is not None and o.waiting for o in list(self.open.values()))

    def _let_go(self) -> None:
        """Forget the oldest operations that the device is through with."""
        while self.open:
            oldest = next(iter(self.open.values()))
            if oldest.passed is None or oldest.issued is None or not oldest.finished:
                return
            self._close(oldest)

    def _sweep(self) -> None:
        """Drop operations that nobody waited for and that are over."""
        for o in list(self.open.values()):
            if o.issued is not None and o.finished:
                if o.work is not None:
                    self._by_work.pop(id(o.work), None)
                self._close(o)

    def name_of(self, o: Operation) -> str:
        """What all ranks call this operation, and nothing else is ever called."""
        name = f"{self.generation}|{o.group}|{o.seq}"
        if self.failures and self.failures.get(o.key[:-1]):
            name += f"|{self.failures[o.key[:-1]]}"
        return name

    def _compare(self, o: Operation, inputs: list[Any], outputs: list[Any]) -> None:
        """Put down what this rank calls, and raise if a peer's call under the same name does not match."""
        name = self.name_of(o)
        ranks = o.ranks
        if o.op in ("send", "recv"):
            if o.peer is None:
                return
            name += f"|{self.rank}>{o.peer}|{o.tag}" if o.op == "send" else f"|{o.peer}>{self.rank}|{o.tag}"
            ranks = (o.peer,)
        self.matcher.check(
            name,
            _signature(o, inputs, outputs),
            o.call,
            ranks,
            stream=o.key,
            group=o.group,
            line=o.line,
            fits_itself=o.op != "all_to_all",  # its pieces may be equal and not fit each other
        )


def _listener(recorder: Recorder, name: str, op: Any, key: Any) -> Callable[..., Any]:
    """What the dispatcher calls for one operation: `recorder` sees it, and then the backend gets it."""
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
    redispatch = op._handle.redispatch_boxed
    returns = len(op._schema.returns)
    is_barrier, reduces = course_name == "barrier", course_name in _REDUCING_OPS
    compared = course_name != "monitored_barrier"
    gives_work = any("Work" in str(given.type) for given in op._schema.returns)
    public_wait = name not in ("send", "recv_", "recv_any_source_")

    def implementation(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        o = Operation(course_name)
        group = unbox_group(args[at_group])
        o.group = group.group_name
        o.ranks = ranks_of(group)
        inputs = flatten(args[at_in])
        outputs = inputs if at_in == at_out else flatten(args[at_out])
        first = inputs[0] if inputs else outputs[0] if outputs else None
        if first is not None and compared:
            o.shape, o.dtype = tuple(first.shape), dtype_name(first)
        if recorder.enqueues:
            o.enqueued = first is None or first.device.type in recorder.enqueues
        if not is_barrier:
            for tensor in inputs:
                o.nbytes += tensor.numel() * tensor.element_size()
        if at_async is not None and (len(args) <= at_async or args[at_async] is not False):
            o.is_async = True
        if at_peer is not None:
            if not 0 <= args[at_peer] < len(o.ranks):
                raise ValueError(
                    f"{course_name} names rank {args[at_peer]}, and this group has the ranks {list(o.ranks)}."
                )
            o.peer = o.ranks[args[at_peer]]
        if at_tag is not None:
            o.tag = args[at_tag]
        if reduces:
            o.reduce_op = getattr(_here, "reduce_op", "")
        if o.enqueued is False:
            o.text = f"{o.describe()} on the CPU"  # in a world of GPUs this goes another way
        o.line, o.via, o.file = caller()
        if o.via in _ASYNC:
            o.is_async = True
        o.gives_up = not compared or o.group in recorder.impatient
        if recorder._array is not None:
            recorder._watch(o, first)
        if recorder.keep_values:
            o.inputs, o.outputs = inputs, outputs
            o.before, o.before_out = numbers(inputs), numbers(outputs)
        with recorder._lock:
            recorder.number(o)
            if recorder.enqueues:
                recorder._let_go()
            if len(recorder.open) > 256:
                recorder._sweep()
            if len(recorder.operations) >= MAX_EVENTS:
                recorder._forget(recorder.operations.popleft())
            recorder.operations.append(o)
            recorder.total += 1
            recorder.open[id(o)] = o
        o.start = recorder.clock()
        stage = recorder.stage
        try:
            if at_splits is not None:
                o.splits = (args[at_splits[0]], args[at_splits[1]])
            if compared and len(o.ranks) > 1:
                recorder._compare(o, inputs, outputs)
            if stage is not None:
                result = stage.issue(o, returns, args[at_out], inputs, outputs)
            else:
                if not public_wait and first is not None and first.is_cuda and not o.enqueued:
                    args = _through_host(o, args, at_in, first)
                if first is not None and not o.enqueued and _crashes(name, first):
                    buffers = [torch.empty_like(t, device="cpu") for t in outputs]
                    on_host = list(args)
                    on_host[at_out], on_host[at_in] = buffers, [t.detach().cpu() for t in inputs]
                    result = redispatch(keyset.remove(key), *on_host, **kwargs)
                    unbox_work(result).wait()  # here, as nobody in Python waits for it who could copy then
                    for tensor, buffer in zip(outputs, buffers, strict=True):
                        tensor.copy_(buffer)
                else:
                    result = redispatch(keyset.remove(key), *args, **kwargs)
        except BaseException as error:
            recorder.broken = (
                recorder.broken or not compared
            )  # a barrier that gave up has closed its connections
            recorder.fail(o, error)
            recorder._close(o)
            raise
        o.issued = recorder.clock()
        boxed = result[-1] if isinstance(result, tuple) else result
        work = None if boxed is None else unbox_work(boxed)
        if work is None:  # nccl's box is empty where a call does not ask for a Work
            if o.enqueued and recorder._batch is not None:
                o.passed = _is_not_over
                recorder._batch.append(o)
            elif o.enqueued and not is_barrier:  # a barrier returns when the device is through with it
                o.passed = streams.mark(first)
                if o.before is not None:
                    o.after = numbers(o.outputs)
            else:
                o.done = o.issued if stage is None else o.done
                recorder._close(o)
            if stage is not None or not gives_work:
                return result
            if recorder.no_work is None:  # a kernel in Python must return one
                nothing: torch.futures.Future[Any] = torch.futures.Future()
                nothing.set_result([])
                c10d: Any = torch._C._distributed_c10d
                recorder.no_work = c10d._create_work_from_future(nothing).boxed()
            return (*result[:-1], recorder.no_work) if isinstance(result, tuple) else recorder.no_work
        o.work = work
        recorder._by_work[id(work)] = o
        if o.enqueued:  # its future is done when the work is enqueued: the work itself is asked
            o.passed, o.work_id = work.is_completed, id(work)
        elif stage is None and public_wait and o.is_async:
            try:
                work.get_future().add_done_callback(lambda _: recorder._mark_done(o))
            except RuntimeError:  # gloo's reduce-scatter has no future: its end is the end of the wait
                pass
        return result

    return implementation


def _is_over() -> bool:
    return True


def _is_not_over() -> bool:
    return False


def _crashes(name: str, tensor: torch.Tensor) -> bool:
    """Whether torch's gloo ends the process in this operation: https://github.com/pytorch/pytorch/issues/152645."""
    return name == "allgather_into_tensor_coalesced_" and tensor.is_cuda


def _through_host(o: Operation, args: tuple[Any, ...], at: int, tensor: torch.Tensor) -> tuple[Any, ...]:
    """The arguments of a send or receive over gloo, which torch does not let it do on a GPU: by a copy on the host."""
    if o.op == "send":
        buffer = tensor.detach().cpu()  # gloo's Work keeps it until it is sent
    else:
        buffer = torch.empty_like(tensor, device="cpu")
        o.landing = (tensor, buffer)
    return (*args[:at], [buffer], *args[at + 1 :])


_signatures: dict[Any, bytes] = {}  # of calls on one tensor: a program repeats a few of them


def _signature(o: Operation, inputs: list[Any], outputs: list[Any]) -> Signature | bytes:
    """What must be equal on all ranks that take part."""
    device = "cpu" if o.enqueued is False else ""
    if o.op in ("send", "recv"):
        tensor = inputs[0] if inputs else outputs[0]
        return Signature(o.describe(), "send to recv", ((dtype_name(tensor), tensor.numel()),), device=device)
    tensors = outputs if o.op == "scatter" else inputs
    if o.op == "all_gather" and len(outputs) > 1 and len({t.numel() for t in outputs}) > 1:
        tensors = outputs  # nccl gathers pieces of different sizes: all must expect the same ones
    if o.op == "all_to_all":
        sends, expects = _pieces(o, inputs, outputs)
        dtypes = ((dtype_name(tensors[0]), 0),) if tensors else ()
        return Signature(o.describe(), o.op, dtypes, sends=sends, expects=expects, device=device)
    if len(inputs) > 1 or len(outputs) > 1:
        return _plain_signature(o, tensors, device).packed()
    key = (o.op, o.shape, o.dtype, o.reduce_op, o.peer, tensors[0].shape if tensors else None, device)
    found = _signatures.get(key)
    if found is None:
        if len(_signatures) > 1000:
            _signatures.clear()
        found = _signatures[key] = _plain_signature(o, tensors, device).packed()
    return found


def _plain_signature(o: Operation, tensors: list[Any], device: str) -> Signature:
    counts = () if o.op == "barrier" else tuple((dtype_name(t), t.numel()) for t in tensors)
    return Signature(o.describe(), o.op, counts, o.reduce_op, o.peer, device=device)


def _pieces(o: Operation, inputs: list[Any], outputs: list[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows sent to each rank of the group, and rows expected from each."""
    n = len(o.ranks)
    if o.splits is None:
        return tuple(t.numel() for t in inputs), tuple(t.numel() for t in outputs)
    out_splits, in_splits = o.splits
    rows_in, rows_out = inputs[0].shape[0], outputs[0].shape[0]
    return tuple(in_splits) or (rows_in // n,) * n, tuple(out_splits) or (rows_out // n,) * n


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
