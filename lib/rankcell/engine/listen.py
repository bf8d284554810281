"""Inside a rank: sees every communication before it is sent, whoever issues it, and tells the recorder.

All of torch's distributed operations (of the user, DDP's reducer, FSDP2, DTensor, functional collectives) pass the
dispatcher as `c10d::...`. We register at its BackendSelect key, right above the backends: nothing is overridden, one
registration serves every backend, and the real kernel is reached by redispatch. Measured against nine other ways to
listen: the only one that saw everything without deadlock and without a tax on computing. Calls of the backend object
itself (`group._get_backend(device).allreduce(...)`) do not pass the dispatcher, and are not seen.

gloo's calls are over when they return. A backend such as nccl only enqueues: the host goes on, and a hang shows where
the host waits for the device, or never. Then an operation is over when the device says so (`mark`, `done`).
"""

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .match import Signature
from .operation import KEEP_WORK, Operation, caller, clock, dtype_name, flatten, ranks_of
from .record import Recorder

# Name in the course -> operations of the dispatcher, and the other way round.
_NAMES = {
    "all_reduce": "allreduce_ allreduce_coalesced_",
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
    "all_to_all": "alltoall_ alltoall_base_",
    "recv": "recv_ recv_any_source_",
    **{name: f"{name}_" for name in ("broadcast", "reduce", "gather", "scatter", "monitored_barrier")},
    **{name: name for name in ("barrier", "send")},
}
OPERATIONS = {operation: name for name, of in _NAMES.items() for operation in of.split()}
_INPUTS = ("input_tensors", "input_tensor", "input", "inputs", "input_list", "tensors", "tensor")
_OUTPUTS = ("output_tensors", "output_tensor", "output", "outputs", "output_list", "tensors", "tensor")
_ROOTS = ("root_rank", "dst", "src")
_REDUCE_OPS = {kind.value: name for name, kind in dist.ReduceOp.RedOpType.__members__.items()}
_KEY = torch._C.DispatchKey.BackendSelect
ENQUEUE = {"nccl", "nccl2", "nccl-legacy"}  # backends of torch that only do so, by name: "nccl" is one of the others

MAX_POLLS = 10_000  # after which a program that polls is told that it will never see the end
POLLED = (
    "is_completed() of {} was asked 10,000 times. On gloo a send or receive is completed only by `wait()`: "
    "call `work.wait()` when you need its result."
)
TWICE = (
    "wait() of {} was called a second time. On gloo the second wait() of a send or receive never returns: call it once "
    "for each Work, for instance by emptying the list of Works that you have waited for."
)


def install(recorder: Recorder) -> None:
    """From now on `recorder` is told of every communication of this process."""
    library = recorder.listening = torch.library.Library("c10d", "IMPL")
    batches = Batches(recorder)
    for name in OPERATIONS:
        if hasattr(torch.ops.c10d, name):
            library.impl(name, Listener(recorder, batches, name).call, "BackendSelect", with_keyset=True)
    _watch_works(recorder)


class Listener:
    """One operation of the dispatcher: the recorder is told of each call, and then the backend gets it."""

    def __init__(self, recorder: Recorder, batches: "Batches", name: str) -> None:
        self.recorder, self.batches, self.name, self.op = recorder, batches, name, OPERATIONS[name]
        operation = getattr(torch.ops.c10d, name).default
        arguments = [a.name for a in operation._schema.arguments]

        def place(*names: str) -> int | None:
            return next((i for i, argument in enumerate(arguments) if argument in names), None)

        self._redispatch = operation._handle.redispatch_boxed
        self._gives_work = any("Work" in str(r.type) for r in operation._schema.returns)
        self._unbox_group, self._unbox_work = dist.ProcessGroup.unbox, dist.Work.unbox
        self._at_group = arguments.index("process_group")
        self._at_in, self._at_out = place(*_INPUTS) or 0, place(*_OUTPUTS) or 0
        self._at_async, self._at_root, self._at_tag = place("async_op"), place(*_ROOTS), place("tag")
        self._at_reduce_op = place("reduce_op")
        self._at_splits = place("output_split_sizes"), place("input_split_sizes")
        self._is_barrier = self.op == "barrier"
        self._is_message = self.op in ("send", "recv")
        self._matches = self.op != "monitored_barrier"  # it has a time limit, and tells itself who is missing

    def call(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """What the dispatcher calls in the place of the backend."""
        recorder = self.recorder
        inputs = flatten(args[self._at_in])
        outputs = inputs if self._at_in == self._at_out else flatten(args[self._at_out])
        o = self._operation(args, inputs, outputs)
        recorder.call(o, inputs, outputs)
        try:
            if self._matches and len(o.ranks) > 1:
                self._compare(o, inputs, outputs)
            result = self._send(o, keyset.remove(_KEY), args, kwargs, inputs, outputs)
        except BaseException as error:
            # a barrier that gave up closes its connections
            recorder.broken = recorder.broken or not self._matches
            recorder.fail(o, error)
            recorder.close(o)
            raise
        o.issued = clock()
        return self._answered(o, result, inputs or outputs)

    def _send(self, o: Operation, keyset: Any, args: Any, kwargs: Any, inputs: list[Any], outputs: list[Any]) -> Any:
        """Hand the call on to the backend; what gloo cannot do with tensors of a GPU, with copies on the host."""
        first = inputs[0] if inputs else outputs[0] if outputs else None
        if first is None or not first.is_cuda or o.enqueued:
            return self._redispatch(keyset, *args, **kwargs)
        if self._is_message:
            buffer = first.detach().cpu() if o.op == "send" else torch.empty_like(first, device="cpu")
            if o.op == "recv":
                o.landing = (first, buffer)
            args = (*args[: self._at_in], [buffer], *args[self._at_in + 1 :])
        elif self.name == "allgather_into_tensor_coalesced_":
            # it ends the process: https://github.com/pytorch/pytorch/issues/152645
            buffers = [torch.empty_like(t, device="cpu") for t in outputs]
            on_host = list(args)
            on_host[self._at_out], on_host[self._at_in] = buffers, [t.detach().cpu() for t in inputs]
            result = self._redispatch(keyset, *on_host, **kwargs)
            self._unbox_work(result).wait()  # here, as nobody in Python waits for it who could copy then
            for tensor, buffer in zip(outputs, buffers, strict=True):
                tensor.copy_(buffer)
            return result
        return self._redispatch(keyset, *args, **kwargs)

    def _operation(self, args: tuple[Any, ...], inputs: list[Any], outputs: list[Any]) -> Operation:
        o = Operation(self.op)
        group = self._unbox_group(args[self._at_group])
        o.group, o.ranks = group.group_name, ranks_of(group)
        if (first := inputs[0] if inputs else outputs[0] if outputs else None) is not None and self._matches:
            o.shape, o.dtype = tuple(first.shape), dtype_name(first.dtype)
        if self.recorder.enqueues:
            o.enqueued = first is None or first.device.type in self.recorder.enqueues
        if not self._is_barrier:
            for tensor in inputs:
                o.nbytes += tensor.numel() * tensor.element_size()
        if self._at_root is not None:
            if not 0 <= (root := args[self._at_root]) < len(o.ranks):
                raise ValueError(f"{o.op} names rank {root}, and this group has the ranks {list(o.ranks)}.")
            o.peer = o.ranks[root]
            if self._is_message and o.peer == self.recorder.rank and not o.enqueued:
                how = "where sender and receiver are the same rank, copy the tensor, `received.copy_(sent)`."
                raise ValueError(f"{o.op} names this rank itself. Gloo connects a rank with others only: {how}")
        if self._at_tag is not None and not o.enqueued:  # nccl passes tags over
            o.tag = args[self._at_tag]
        if self._at_reduce_op is not None:
            o.reduce_op = _REDUCE_OPS[args[self._at_reduce_op].op()]
        if self._at_splits[0] is not None:
            o.splits = [args[at] for at in self._at_splits if at is not None]
        if o.enqueued is False:
            o.text = f"{o.describe().removesuffix(' in another thread')} on the CPU"  # of a world of GPUs
        o.line, o.via, o.file, o.outer = caller()
        at = self._at_async
        o.is_async = o.via in KEEP_WORK or (at is not None and (len(args) <= at or args[at] is not False))
        o.has_timeout = not self._matches
        return o

    def _compare(self, o: Operation, inputs: list[Any], outputs: list[Any]) -> None:
        """Publish what this rank calls, and raise if a peer's call under the same name does not match."""
        if self._is_message and self.recorder.is_uncertain(o):
            return
        ranks = (o.peer,) if self._is_message and o.peer is not None else o.ranks
        symmetric = o.op != "all_to_all"  # its pieces may be equal and not fit each other
        signature = signature_of(o, inputs, outputs)
        self.recorder.matcher.check(self.recorder.name_of(o), signature, o, ranks, symmetric=symmetric)

    def _answered(self, o: Operation, result: Any, tensors: list[Any]) -> Any:
        """Note what tells when the call is over; returns what the dispatcher gets."""
        recorder = self.recorder
        boxed = result[-1] if isinstance(result, tuple) else result
        work = None if boxed is None else self._unbox_work(boxed)
        # a call of a batch has no Work, or (nccl of torch 2.15) one that is over before the batch is launched
        batched = bool(o.enqueued) and self.batches.add(o)
        if work is None or batched:  # nccl's box is empty where a call does not ask for a Work
            # a barrier returns when the device is through with it
            if not batched and o.enqueued and not self._is_barrier:
                o.passed = mark(tensors[0] if tensors else None)
                recorder.note_result(o)
            elif not batched:
                o.done = o.issued
                recorder.close(o)
            if not self._gives_work or work is not None:
                return result
            # a kernel in Python must return one
            return (*result[:-1], _no_work()) if isinstance(result, tuple) else _no_work()
        o.work = recorder.latest = work
        recorder.by_work[work] = o
        if o.enqueued:  # its future is done when the work is enqueued: the work itself is asked
            o.passed = done(work)
        elif o.is_async and not self._is_message:
            # gloo's reduce-scatter has no future: its end is the end of the wait
            with contextlib.suppress(RuntimeError):
                work.get_future().add_done_callback(lambda _: recorder.mark_done(o))
        return result


def mark(tensor: torch.Tensor | None) -> Callable[[], bool]:
    """A function that tells whether the device of `tensor` has done all that its current stream holds now."""
    device = torch.cuda.current_device() if tensor is None or not tensor.is_cuda else tensor.device
    if torch.cuda.is_current_stream_capturing():  # into a graph: nothing runs now, and no event may be asked
        return lambda: True
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def done(work: dist.Work) -> Callable[[], bool]:
    """A function that tells whether `work` is over; true while a graph is recorded: its events may not be asked."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return (lambda: True) if capturing else work.is_completed


def _no_work() -> Any:
    """A Work that is over, for calls that have none."""
    nothing: torch.futures.Future[Any] = torch.futures.Future()
    nothing.set_result([])
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(nothing).boxed()


def _watch_works(recorder: Recorder) -> None:
    """Tell `recorder` when the program waits for a Work, and keep it from what gloo never answers."""
    original_wait, original_is_completed = dist.Work.wait, dist.Work.is_completed
    # sends and receives of gloo that were waited for, and what they were
    messages: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        if (o := recorder.by_work.pop(work, None)) is None:
            if work in messages:
                raise RuntimeError(TWICE.format(messages[work]))
            return original_wait(work, *args, **kwargs)
        o.wait_start = clock()
        for other in o.batch:
            other.wait_start = other.wait_end = o.wait_start
        o.has_timeout = o.has_timeout or bool(args or kwargs)
        try:
            return original_wait(work, *args, **kwargs)
        except BaseException as error:
            recorder.fail(o, error)
            recorder.broken = True
            raise
        finally:
            if o.error is None and o.op in ("send", "recv"):
                if o.op == "recv" and o.peer is None:
                    recorder.came_from(o, o.ranks[work._source_rank()])
                if o.passed is None:
                    messages[work] = o.describe()
            recorder.waited(o)

    def is_completed(work: Any) -> bool:
        if (o := recorder.by_work.get(work)) is not None and o.op in ("send", "recv"):
            o.polls += 1
            if o.polls == MAX_POLLS:
                print(POLLED.format(o.describe()), file=sys.stderr, flush=True)
        return bool(original_is_completed(work))

    dist.Work.wait, dist.Work.is_completed = wait, is_completed  # type: ignore[method-assign,assignment]


class Batches:
    """Calls that a backend launches together when all are there, as `batch_isend_irecv` does on nccl."""

    def __init__(self, recorder: Recorder) -> None:
        self._calls: list[Operation] | None = None
        start, end = dist.ProcessGroup._start_coalescing, dist.ProcessGroup._end_coalescing

        def _start_coalescing(group: Any, *args: Any) -> None:
            self._calls = []
            start(group, *args)

        def _end_coalescing(group: Any, *args: Any) -> Any:
            batch, self._calls = self._calls or [], None
            for o in batch:
                o.wait_start = clock()  # a new pair is connected now: the host waits for the other side
            work = end(group, *args)
            for o in batch:  # they have one Work together
                o.wait_start = None
                o.passed = done(work) if work is not None else lambda: True
            if batch and work is not None:
                first, *first.batch = batch
                recorder.by_work[work] = first
            return work

        dist.ProcessGroup._start_coalescing = _start_coalescing  # type: ignore[method-assign,assignment]
        dist.ProcessGroup._end_coalescing = _end_coalescing  # type: ignore[method-assign,assignment]

    def add(self, o: Operation) -> bool:
        """Whether `o` is called within a batch, which will be launched."""
        if self._calls is None:
            return False
        o.passed = lambda: False
        self._calls.append(o)
        return True


_signatures: dict[Any, bytes] = {}  # of calls on one tensor: a program repeats a few of them


def signature_of(o: Operation, inputs: list[Any], outputs: list[Any]) -> bytes:
    """What must be equal on all ranks that take part, packed."""
    device = "cpu" if o.enqueued is False else ""
    tensors = outputs if o.op == "scatter" else inputs
    if o.op in ("send", "recv"):
        kind, tensors = "send to recv", inputs or outputs
        return Signature(o.describe(), kind, _counts(tensors[:1]), device=device).packed()
    if o.op == "all_gather" and len({t.numel() for t in outputs}) > 1:
        tensors = outputs  # nccl gathers pieces of different sizes: all must expect the same ones
    if o.op == "all_to_all":
        sends, expects = _pieces(o, inputs, outputs)
        dtypes = ((dtype_name(tensors[0].dtype), 0),) if tensors else ()
        return Signature(o.describe(), o.op, dtypes, sends=sends, expects=expects, device=device).packed()
    single = len(inputs) <= 1 and len(outputs) <= 1
    key = (o.op, o.shape, o.dtype, o.reduce_op, o.peer, tensors[0].shape if tensors else None, device, o.thread)
    if (found := _signatures.get(key) if single else None) is None:
        counts = () if o.op == "barrier" else _counts(tensors)
        found = Signature(o.describe(), o.op, counts, o.reduce_op, o.peer, device=device).packed()
        if single:
            if len(_signatures) > 1000:
                _signatures.clear()
            _signatures[key] = found
    return found


def _counts(tensors: list[Any]) -> tuple[tuple[str, int], ...]:
    return tuple((dtype_name(t.dtype), t.numel()) for t in tensors)


def _pieces(o: Operation, inputs: list[Any], outputs: list[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows sent to each rank of the group, and rows expected from each."""
    n = len(o.ranks)
    if o.splits is None:
        return tuple(t.numel() for t in inputs), tuple(t.numel() for t in outputs)
    out_splits, in_splits = o.splits
    rows_in, rows_out = inputs[0].shape[0], outputs[0].shape[0]
    return tuple(in_splits) or (rows_in // n,) * n, tuple(out_splits) or (rows_out // n,) * n
