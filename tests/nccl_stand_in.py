"""A backend for tests that behaves as nccl does, on the CPU: what the engine does on nccl can be tried without a GPU.

As nccl: a call returns when it is enqueued, a call without `async_op` gives no Work; `wait()` orders and does not block
the host; the work is done later, by a thread that plays the stream of its group, after all that the current stream
waits for; futures are complete at once; a hang shows where the host waits for the device (`synchronize`, `tolist`,
anything that touches a tensor's numbers) or never, and no signal gets the host out of it; the first call of a pair
waits on the host for the other side; a stream holds 64 calls that are not done, and the next one waits on the host;
`destroy_process_group` waits on the host until all ranks of the group come to it; a watchdog ends the process of a
group whose time is over; after `abort` the stream goes on, and every later call on that group raises.

Not as nccl: arithmetic on tensors waits on the host for the stream, so a race with it is not seen; what DDP's C++ reads
is read too early, so that its sums are wrong (only how it hangs is tried).

How it gets into the ranks: torch imports every `torch.backends` entry point of the environment, and `install` writes
one. The folder is called torch, as the engine knows torch's own frames by that name.
"""

import atexit
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import time
import uuid
from pathlib import Path

POLL = 0.002  # seconds
FULL = 64  # calls that are not done
NAME = "stand_in"


def install(folder):
    """Put this module where torch finds it when it is imported; returns the folder for `sys.path`."""
    # what stands in such a folder is no code of the learner's, whose threads could still answer
    place = Path(folder) / "torch" / "rankcell" / "engine"
    about = place / "stand_in-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nstand_in = stand_in:register\n")
    shutil.copy(__file__, place / "stand_in.py")
    return str(place)


class Item:
    """One piece of work in the queue of a stream."""

    def __init__(self, do, after, deadline):
        self.do, self.after, self.deadline = do, after, deadline
        self.done = threading.Event()


class Stream:
    """The stream of one group: does its items in order, each after those that the current stream waited for."""

    def __init__(self, comm):
        self.comm, self.items, self.busy = comm, queue.SimpleQueue(), False
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def _run(self):
        while True:
            item = self.items.get()
            self.busy = True
            try:
                for before in item.after:
                    self.comm.wait_until(before.done.is_set)
                if not self.comm.aborted:
                    item.do()
            except Aborted:
                pass
            item.done.set()
            self.busy = False


class Aborted(Exception):
    """The communicator was aborted while its stream waited for another rank."""


class Comm:
    """The communicator of one group: ranks meet in a folder that all of them see."""

    def __init__(self, store, rank, size, timeout):
        self.rank, self.size, self.timeout = rank, size, timeout.total_seconds()
        self.aborted, self.calls, self.pairs, self.waiting = False, {}, set(), 0
        self.batch = None  # sends and receives that are launched together
        # as the exchange of nccl's unique id: everybody waits for rank 0
        if rank == 0:
            store.set("token", uuid.uuid4().hex)
        token = store.get("token").decode()
        self.folder = Path(os.environ["RANKCELL_STAND_IN"]) / token
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stream = Stream(self)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        self.pending = []

    def put(self, key, value):
        path = self.folder / key
        path.with_suffix(".part").write_bytes(pickle.dumps(value))
        path.with_suffix(".part").rename(path)

    def get(self, key):
        path = self.folder / key
        self.wait_until(path.exists)
        return pickle.loads(path.read_bytes())

    def wait_until(self, there):
        self.waiting += 1
        try:
            while not there():
                if self.aborted:
                    raise Aborted
                time.sleep(POLL)
        finally:
            self.waiting -= 1

    def number(self, what):
        """Which call of its kind it is: all ranks count alike."""
        self.calls[what] = self.calls.get(what, 0) + 1
        return self.calls[what]

    def exchange(self, value):
        """What every rank has put down for this collective, by rank; a function for the stream."""
        name = f"c{self.number('collective')}"

        def do():
            self.put(f"{name}-{self.rank}", value() if callable(value) else value)
            return [self.get(f"{name}-{r}") for r in range(self.size)]

        return do

    def meet(self, *peers):
        """The first call of a pair connects it: the host waits for the other side."""
        new = set(peers) - self.pairs
        if not new:
            return
        for peer in new:
            self.put(f"pair-{self.rank}-{peer}", None)
        before = mask()
        try:
            for peer in new:
                self.get(f"pair-{peer}-{self.rank}")
        except Aborted:
            raise RuntimeError("the communicator was aborted while a pair was being connected") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pairs |= new

    def finalize(self):
        """Wait on the host until the stream is empty and all ranks come here."""
        self.put(f"end-{self.rank}", None)
        before = mask()
        try:
            while any(not i.done.is_set() for i in self.pending) and not self.aborted:
                time.sleep(POLL)
            for rank in range(self.size):
                self.get(f"end-{rank}")
        except Aborted:
            pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def abort(self):
        self.aborted = True

    def _watch(self):
        while not self.aborted:
            time.sleep(0.1)
            late = [i for i in list(self.pending) if not i.done.is_set() and i.deadline < time.monotonic()]
            if late:
                print(
                    "stand-in watchdog: an operation has run into its time limit", file=sys.stderr, flush=True
                )
                os.kill(os.getpid(), signal.SIGABRT)
            self.pending = [i for i in list(self.pending) if not i.done.is_set()]


comms = {}  # by the name of the group
current = []  # items that the current stream waits for
works = {}  # by id: C++ holds a Work, and Python must, too


def leave():
    """At the end of the process no stream may be inside of torch: a thread that Python ends there ends the process.

    What is in the queues is begun before; what then waits for other ranks is given up.
    """
    for comm in list(comms.values()):
        while not comm.waiting and any(not item.done.is_set() for item in list(comm.pending)):
            time.sleep(POLL)
        comm.aborted = True
        while comm.stream.busy:
            time.sleep(POLL)


def mask():
    """No signal gets the host out of a call of CUDA."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def enqueue(comm, do):
    """Put work in the stream of `comm`, after all that the current stream waits for now."""
    if comm.aborted:
        raise RuntimeError("the communicator was aborted: it cannot be used any more")
    before = mask()
    try:
        while sum(not i.done.is_set() for i in comm.pending) >= FULL and not comm.aborted:
            time.sleep(POLL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    item = Item(do, [i for i in current if not i.done.is_set()], time.monotonic() + comm.timeout)
    comm.pending.append(item)
    comm.stream.items.put(item)
    return item


def synchronize(items=None):
    """Wait on the host until the device has come so far."""
    wanted = current if items is None else items
    if threading.current_thread() is not threading.main_thread():
        return
    before = mask()
    try:
        while not all(i.done.is_set() for i in wanted):
            time.sleep(POLL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    current[:] = [i for i in current if not i.done.is_set()]


def mark(_):
    """What `rankcell.engine.listen.mark` is on a GPU."""
    items = list(current)
    return lambda: all(i.done.is_set() for i in items)


def register():
    """torch calls this when it has been imported, before anybody else uses it."""
    import torch
    import torch.distributed as dist
    from torch.overrides import TorchFunctionMode

    if not dist.is_available() or "RANKCELL_STAND_IN" not in os.environ:
        return
    boxes = {}

    class Work(dist.Work):
        def __init__(self, item, result):
            super().__init__()
            self.item = item
            self._result = result
            boxes[id(self)] = self

        def get_future(self):
            future = torch.futures.Future()
            future.set_result(self._result)
            return future

    # before the recorder puts its own there: C++ and Python both come by these
    cpp_wait, cpp_completed = dist.Work.wait, dist.Work.is_completed

    def wait(work, *args, **kwargs):
        if not isinstance(work, Work):
            return cpp_wait(work, *args, **kwargs)
        current.append(work.item)
        if sys._getframe(2).f_code.co_name == "_verify_param_shape_across_processes":
            synchronize()  # its C++ reads the numbers, for which it would wait on a GPU
        return True

    def is_completed(work):
        return work.item.done.is_set() if isinstance(work, Work) else cpp_completed(work)

    dist.Work.wait, dist.Work.is_completed = wait, is_completed
    dist.ProcessGroup.abort = lambda group: comms[group.group_name].abort()
    destroy_process_group = dist.destroy_process_group

    def destroy(group=None):
        groups = list(dist.distributed_c10d._world.pg_map) if group is None else [group]
        for each in groups:
            if (comm := comms.pop(getattr(each, "group_name", ""), None)) is not None:
                comm.finalize()
        destroy_process_group(group)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy
    torch.cpu.synchronize = lambda *_: synchronize([i for c in comms.values() for i in c.pending])

    class Device(TorchFunctionMode):
        """Whoever touches a tensor's numbers waits for the stream that may still write them."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if current and not str(getattr(func, "__module__", "")).startswith("torch.distributed"):
                synchronize()
            return func(*args, **(kwargs or {}))

    device = Device()
    started = []

    def create(about, _):
        from rankcell.engine import listen, record

        rank, size = about.group_rank, about.group_size

        if not started:
            started.append(device.__enter__())
            atexit.register(leave)
            listen.mark = mark
            listen.ENQUEUE.add(NAME)
            numbers = record.numbers
            record.numbers = lambda tensors: (synchronize(), numbers(tensors))[1]
        comms[about.group_id] = Comm(about.store, rank, size, about.timeout)
        backend = torch._C._distributed_c10d.FakeProcessGroup
        return (
            backend._create_internal(rank, size)
            if hasattr(backend, "_create_internal")
            else backend(rank, size)
        )

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])

    def comm_of(group):
        return comms[dist.ProcessGroup.unbox(group).group_name]

    def give(comm, do, result, is_async):
        item = enqueue(comm, do)
        work = Work(item, result)
        if not is_async:
            current.append(item)
            without_work.add(id(work))
        return work.boxed()

    def reduced(parts, op):
        stack = torch.stack(parts)
        name = str(op).rpartition(".")[2].upper()
        if "MAX" in name:
            return stack.amax(0)
        if "PROD" in name:
            return stack.prod(0)
        return stack.sum(0) / (len(parts) if "AVG" in name else 1)

    def all_reduce(tensors, group, op, sparse=None, async_op=True, timeout=-1):
        comm, kind = comm_of(group), dist.ReduceOp.unbox(op) if hasattr(dist.ReduceOp, "unbox") else "SUM"
        meet = comm.exchange(lambda: [t.detach().clone() for t in tensors])

        def do():
            everybody = meet()
            for i, t in enumerate(tensors):
                t.detach().copy_(reduced([theirs[i] for theirs in everybody], kind))

        return tensors, give(comm, do, list(tensors), async_op)

    def broadcast(tensors, group, root, root_tensor, async_op=True, timeout=-1):
        comm = comm_of(group)
        meet = comm.exchange(lambda: [t.detach().clone() for t in tensors])

        def do():
            for mine, theirs in zip(tensors, meet()[root], strict=True):
                mine.detach().copy_(theirs)

        return tensors, give(comm, do, list(tensors), async_op)

    def all_gather(outputs, inputs, group, async_op=True, timeout=-1):
        comm = comm_of(group)
        meet = comm.exchange(lambda: inputs[0].detach().clone())

        def do():
            for mine, theirs in zip(outputs[0], meet(), strict=True):
                mine.detach().copy_(theirs)

        return outputs, give(comm, do, outputs, async_op)

    def all_gather_single(output, part, group, async_op=True, timeout=-1):
        comm = comm_of(group)
        meet = comm.exchange(lambda: part.detach().clone())

        def do():
            output.detach().copy_(torch.cat([p.flatten() for p in meet()]).view_as(output))

        return output, give(comm, do, [output], async_op)

    def reduce_scatter_single(output, whole, group, op, async_op=True, timeout=-1):
        comm = comm_of(group)
        meet = comm.exchange(lambda: whole.detach().clone())

        def do():
            total = reduced(meet(), "SUM")
            output.detach().copy_(total.flatten().chunk(comm.size)[comm.rank].view_as(output))

        return output, give(comm, do, [output], async_op)

    def barrier(tensor, group, device_ids, async_op=True, timeout=-1):
        comm = comm_of(group)
        work = give(comm, comm.exchange(None), [], async_op)
        if not async_op:
            synchronize()  # a barrier of nccl waits on the host
            if comm.aborted:
                raise RuntimeError("the communicator was aborted in a barrier")
        return work

    def point_to_point(tensors, group, peer, begin, end):
        """A send or receive, in two halves: all first halves of a batch come before all second ones."""
        comm = comm_of(group)
        if comm.aborted:
            raise RuntimeError("the communicator was aborted: it cannot be used any more")
        if comm.batch is not None:
            comm.batch.append((peer, begin, end))
            over = Item(None, [], 0)
            over.done.set()
            work = Work(over, list(tensors))
            if (
                "RANKCELL_STAND_IN_2" not in os.environ
            ):  # nccl gives none; that of torch 2.15 one that is over
                without_work.add(id(work))
            return work.boxed()
        comm.meet(peer)
        return Work(enqueue(comm, lambda: (begin(), end())), list(tensors)).boxed()

    def send(tensors, group, peer, tag):
        comm = comm_of(group)
        name = f"p{comm.number(('send', peer))}-{comm.rank}-{peer}"
        # over when the other side has taken it
        return point_to_point(
            tensors,
            group,
            peer,
            lambda: comm.put(name, tensors[0].detach().clone()),
            lambda: comm.get(f"{name}-taken"),
        )

    def recv(tensors, group, peer, tag):
        comm = comm_of(group)
        name = f"p{comm.number(('recv', peer))}-{peer}-{comm.rank}"

        def take():
            tensors[0].detach().copy_(comm.get(name))
            comm.put(f"{name}-taken", None)

        return point_to_point(tensors, group, peer, take, lambda: None)

    def start_coalescing(group, _):
        comms[group.group_name].batch = []

    def end_coalescing(group, _):
        comm = comms[group.group_name]
        batch, comm.batch = comm.batch, None
        comm.meet(*(peer for peer, _, _ in batch))
        # what is sent is put down before anybody waits for what is received
        first = sorted(batch, key=lambda entry: entry[1].__name__ == "take")
        return Work(enqueue(comm, lambda: [half() for i in (1, 2) for half in [e[i] for e in first]]), [])

    dist.ProcessGroup._start_coalescing = start_coalescing
    dist.ProcessGroup._end_coalescing = end_coalescing
    torch._C._distributed_c10d.FakeProcessGroup.supports_coalescing = True
    without_work = set()  # of calls without async_op, and in a batch

    nothing, unbox = object(), dist.Work.unbox  # nccl's box without a Work in it
    dist.Work.unbox = staticmethod(lambda boxed: None if boxed is nothing else unbox(boxed))

    class Handle:
        """Of one operation: gives an empty box where nccl gives no Work. A kernel in Python cannot."""

        def __init__(self, handle):
            self.handle = handle

        def __getattr__(self, name):
            return getattr(self.handle, name)

        def redispatch_boxed(self, *args, **kwargs):
            result = self.handle.redispatch_boxed(*args, **kwargs)
            work = unbox(result[-1] if isinstance(result, tuple) else result)
            if id(work) not in without_work:
                return result
            return (*result[:-1], nothing) if isinstance(result, tuple) else nothing

    library = torch.library.Library("c10d", "IMPL")
    for name, kernel in {
        "allreduce_": all_reduce,
        "broadcast_": broadcast,
        "allgather_": all_gather,
        "_allgather_base_": all_gather_single,
        "_reduce_scatter_base_": reduce_scatter_single,
        "barrier": barrier,
        "send": send,
        "recv_": recv,
    }.items():
        library.impl(name, kernel, "CPU")
        overload = getattr(torch.ops.c10d, name).default
        overload._handle = Handle(overload._handle)
    works["library"] = library
