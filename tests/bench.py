"""`make bench`: what rank cells cost, as ratios within one run, beside a plain spawn per cell and
ipyparallel.

Not a test: this prints a table and fails nothing. Times on a shared machine are noisy; the medians and ratios
say more than any single number. `python tests/bench.py NAME ...` runs some of the sections only.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from jupyter_client.manager import start_new_kernel

import rankcell

ALL_REDUCE = "x = torch.ones(4)\ndist.all_reduce(x)\n"


def row(what: str, value: str, bar: str = "", note: str = "") -> None:
    """One line of the table."""
    print(f"  {what:<58} {value:>12}   {bar:<16} {note}".rstrip(), flush=True)


class Kernel:
    """A real notebook kernel, to time cells as a learner feels them: from sending the cell to the kernel
    being idle.
    """

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, source: str, timeout: float = 120.0) -> tuple[float, str]:
        """Seconds and all text that came back."""
        text: list[str] = []

        def take(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                text.append(content["text"])
            elif message["msg_type"] in ("execute_result", "display_data"):
                text.append(content["data"].get("text/plain", ""))
            elif message["msg_type"] == "error":
                text.append("\n".join(content["traceback"]))

        start = time.perf_counter()
        self.client.execute_interactive(source, timeout=timeout, output_hook=take)
        return time.perf_counter() - start, "\n".join(text)

    def median(self, source: str, times: int = 30) -> float:
        """Median seconds of a cell."""
        return statistics.median(self.run(source)[0] for _ in range(times))

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def fresh_python(source: str) -> float:
    """Seconds printed by a fresh interpreter that runs `source`."""
    out = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return float(out.stdout.split()[-1])


def bench_start() -> None:
    """From nothing to the first results."""
    print("start")
    timed_import = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
    imports = [fresh_python(timed_import) for _ in range(3)]
    import_torch = statistics.median(imports)
    row("one `import torch`", f"{import_torch:.2f} s")
    firsts, ddps = [], []
    for _ in range(3):
        kernel = Kernel()
        kernel.run("1")
        load = kernel.run("%load_ext rankcell")[0]
        firsts.append(load + kernel.run("%%ranks 4\n" + ALL_REDUCE + "x")[0])
        ddps.append(
            kernel.run(
                "%%ranks 4\nfrom torch.nn.parallel import DistributedDataParallel\n"
                "model = DistributedDataParallel(torch.nn.Linear(4, 4))"
            )[0]
        )
        kernel.close()
    first = statistics.median(firsts)
    row(
        "%load_ext to the first all-reduce result, 4 ranks",
        f"{first:.2f} s",
        f"{first / import_torch:.2f}x <= 2.5x",
    )
    row("then the first DistributedDataParallel", f"{statistics.median(ddps):.3f} s", "<= 0.5 s")


def bench_cells() -> None:
    """What a warm cell costs, beside its ordinary twin, ipyparallel and a spawn per cell."""
    print("warm cells, 4 ranks")
    kernel = Kernel()
    kernel.run("%load_ext rankcell")
    kernel.run("import torch")
    kernel.run("%%ranks 4\n" + ALL_REDUCE)
    plain, ranks = [], []
    for _ in range(40):  # interleaved: both feel the same noise
        plain.append(kernel.run("1 + 1")[0])
        ranks.append(kernel.run("%%ranks 4\n1 + 1")[0])
    added = statistics.median(ranks) - statistics.median(plain)
    row("a trivial cell adds to its ordinary twin", f"{1e3 * added:.1f} ms", "<= 5 ms")
    ours = kernel.median("%%ranks 4\n" + ALL_REDUCE)
    row("an all-reduce cell", f"{1e3 * ours:.1f} ms")
    theirs = _ipyparallel(kernel)
    if theirs is not None:
        row("the same with ipyparallel's %%px", f"{1e3 * theirs:.1f} ms", f"{theirs / ours:.1f}x >= 3x")
    spawn = statistics.median(_spawn_once() for _ in range(3))
    row("the same with torch.multiprocessing.spawn", f"{spawn:.2f} s", f"{spawn / ours:.0f}x")
    kernel.close()


def _start_ipyparallel(kernel: Kernel) -> bool:
    """Four engines with an initialised process group; False if ipyparallel is not installed."""
    setup = """
        import ipyparallel, os, tempfile
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        cluster = ipyparallel.Cluster(n=4, log_level=40)
        client = cluster.start_and_connect_sync()
        view = client[:]
        view.block = True
        view.activate()
        def join(rank, path):
            import torch, torch.distributed as dist
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=4)
            return dist.get_rank()
        client[:].execute("import torch, torch.distributed as dist")
        joined = client[:].map_async(join, range(4), [tempfile.mktemp()] * 4).get()
        print("joined", joined)
    """
    return "joined [0, 1, 2, 3]" in kernel.run(textwrap.dedent(setup))[1]


def _ipyparallel(kernel: Kernel) -> float | None:
    if not _start_ipyparallel(kernel):
        row("ipyparallel", "not installed", "", "`make bench` installs it")
        return None
    median = kernel.median("%%px\n" + ALL_REDUCE)
    shown = kernel.run("%%px\n" + ALL_REDUCE + "x.tolist()")[1]
    if "[4.0, 4.0, 4.0, 4.0]" not in shown:
        raise RuntimeError(f"the all-reduce of ipyparallel went wrong: {shown}")
    kernel.run("cluster.stop_cluster_sync()")
    return median


def _spawned(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    x = torch.ones(4)
    dist.all_reduce(x)


def _spawn_once() -> float:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        torch.multiprocessing.spawn(_spawned, args=(f"{folder}/store",), nprocs=4)
        return time.perf_counter() - start


def bench_worlds() -> None:
    """Further worlds: seconds until they answer, and memory."""
    print("a further world, and memory per idle rank (PSS)")
    with rankcell.Ranks(4) as ranks:
        ranks.run(ALL_REDUCE)
        _memory(ranks, "<= 40 MB")
        for size in (8, 16, 32, 64):
            start = time.perf_counter()
            with rankcell.Ranks(size) as more:
                more.run(ALL_REDUCE)
                row(
                    f"{size} ranks: start and first all-reduce",
                    f"{time.perf_counter() - start:.2f} s",
                    "<= 1.5 s",
                )
                if size == 32:
                    _memory(more, "<= 15 MB")


def _memory(ranks: rankcell.Ranks, bar: str) -> None:
    used = [m for m in ranks.memory() if m is not None]
    if used:
        row(
            f"memory of an idle rank of {ranks.world_size}",
            f"{max(used) / 1e6:.0f} MB",
            bar,
            f"mean {statistics.mean(used) / 1e6:.0f} MB",
        )


def bench_prints() -> None:
    """100,000 printed lines on every rank."""
    print("100,000 lines printed by each of 4 ranks")
    source = "for i in range(100_000): print('line', i)"
    begin, end = (
        "import time, sys; t = time.perf_counter()",
        "sys.stdout.flush(); print(time.perf_counter() - t)",
    )
    timed = f"{begin}\n{source}\n{end}"
    alone = statistics.median(fresh_python(timed) for _ in range(5))
    with rankcell.Ranks(4) as ranks:
        ranks.run("1")
        took = []
        for _ in range(5):
            start = time.perf_counter()
            ranks.run(source)
            took.append(time.perf_counter() - start)
    cell = statistics.median(took)
    row("one ordinary process", f"{alone:.3f} s")
    row("the rank cell", f"{cell:.3f} s", f"{cell / alone:.2f}x <= 3x")


RECORDED = """
import statistics, time
recorder = get_ipython().recorder
operation, key = torch.ops.c10d.allreduce_.default, torch._C.DispatchKey.BackendSelect
class Empty:  # stands where the recorder stands, and does nothing: what it costs, no record can undercut
    def install(self):
        self.library = torch.library.Library("c10d", "IMPL")
        def implementation(keyset, *args, **kwargs):
            return operation._handle.redispatch_boxed(keyset.remove(key), *args, **kwargs)
        self.library.impl("allreduce_", implementation, "BackendSelect", with_keyset=True)
    def uninstall(self): self.library._destroy()
def calls(x, times=12):  # median seconds of a call, and mean seconds in which the calling thread computed
    found, busy = [], time.thread_time()
    for _ in range(times):
        start = time.perf_counter()
        dist.all_reduce(x)
        found.append(time.perf_counter() - start)
    return statistics.median(found), (time.thread_time() - busy) / times
def compute(times=60):
    w = torch.randn(64, 64)
    start = time.perf_counter()
    for _ in range(times): w = torch.tanh(w @ w)
    return time.perf_counter() - start
small, large = torch.ones(4), torch.ones(1 << 18)
def times():
    dist.barrier()
    calls(small, 3)
    (quick, busy), (slow, at_large) = calls(small), calls(large)
    return quick, slow, min(compute() for _ in range(3)), busy, at_large
def ratios(rows, others):
    return [statistics.median(a / b for a, b in zip(*column)) for column in zip(zip(*rows), zip(*others))]
empty, found = Empty(), {"on": [], "empty": [], "off": [], "again": []}
for turn in range(120):  # in turns, in the same processes: all feel the same noise
    found["on"].append(times())
    dist.barrier(); recorder.uninstall(); dist.barrier()
    found["off"].append(times())
    found["again"].append(times())
    dist.barrier(); empty.install(); dist.barrier()
    found["empty"].append(times())
    dist.barrier(); empty.uninstall(); recorder.install(); dist.barrier()
busy = {kind: [statistics.median(c) for c in list(zip(*rows))[3:]] for kind, rows in found.items()}
{kind: ratios(found[kind], found["off"])[:3] for kind in ("on", "empty", "again")}, busy
"""


def bench_recording() -> None:
    """What recording every communication costs, against the same processes with the recorder taken out."""
    print(
        "recording on against off, 2 ranks, medians of 120 turns, beside what is no fault of the record:\n"
        "a listener that does nothing, and the noise, off against off"
    )
    with rankcell.Ranks(2) as ranks:
        found, busy = ranks.run(RECORDED).values[0]
    bars = ("<= 1.35x", "< 1.03x", "1.00x")
    names = ("an all-reduce of 4 floats", "an all-reduce of 1 MiB", "computing")
    for i, (name, bar) in enumerate(zip(names, bars, strict=True)):
        on, empty, again = (found[kind][i] for kind in ("on", "empty", "again"))
        row(name, f"{on:.2f}x", f"{bar}; empty {empty:.2f}x, noise {again:.2f}x")
    for i, size in enumerate(("4 floats", "1 MiB")):
        on, empty, off = (1e6 * busy[kind][i] for kind in ("on", "empty", "off"))
        row(f"the calling thread computes, {size}", f"{on:.0f} us", f"empty {empty:.0f} us, off {off:.0f} us")


STEPS = """
import time
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from rankcell import models
from rankcell.parallel.ddp import DDP
from rankcell.parallel.fsdp import FSDP

tokens = models.encode(models.text())

def gpt():
    return models.GPT(49, d_model=128, n_layers=4)

def sharded():
    model = gpt()
    for block in model.blocks: fully_shard(block)
    return fully_shard(model)

kinds = {
    "our DDP": lambda: DDP(gpt()),
    "torch DDP": lambda: DistributedDataParallel(gpt()),
    "our FSDP": lambda: FSDP(gpt()),
    "torch fully_shard": sharded,
}
runs = {}
for kind, make in kinds.items():
    model = make()
    runs[kind] = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
times = {kind: [] for kind in kinds}
for step in range(14):  # in turns, in the same processes: all feel the same noise
    x, y = models.batch(tokens, step, size=8, length=32, rank=rank, world_size=world_size)
    for kind, (model, optimizer) in runs.items():
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        models.cross_entropy(model(x), y).backward()
        if hasattr(model, "finish_gradient_synchronization"): model.finish_gradient_synchronization()
        optimizer.step()
        dist.barrier()
        times[kind].append(time.perf_counter() - start)
{kind: sorted(found[2:])[6] for kind, found in times.items()}
"""


def bench_parallel() -> None:
    """A training step of a small GPT with our classes and with torch's, in the same run."""
    print("a training step, GPT of 4 layers, width 128, batch 8 x 32 per rank")
    for size in (2, 4):
        with rankcell.Ranks(size) as ranks:
            found = ranks.run(STEPS).values[0]
        for ours, theirs, bar in (
            ("our DDP", "torch DDP", "<= 1.15x"),
            ("our FSDP", "torch fully_shard", "<= 1.25x"),
        ):
            ratio = f"{found[ours] / found[theirs]:.2f}x {bar}"
            row(f"{ours} beside {theirs}, {size} ranks", f"{1e3 * found[ours]:.0f} ms", ratio)


TENSOR_STEPS = """
import time
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, loss_parallel, parallelize_module)
from rankcell import models
from rankcell.parallel.transformer import tensor_parallel

tokens = models.encode(models.text())

def gpt():
    return models.GPT(49, d_model=128, n_layers=4)

def theirs():
    model, ready = gpt(), dict(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention": PrepareModuleInput(**ready),  # one gradient for query, key and value together
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, init_device_mesh("cpu", (world_size,)), plan)
    model.head.weight = model.token_embedding.weight
    return model

def step_theirs(model, x, y):
    with loss_parallel():
        models.cross_entropy(model(x), y).backward()

kinds = {
    "ours": (tensor_parallel(gpt()), lambda model, x, y: model(x, y).backward()),
    "theirs": (theirs(), step_theirs),
}
optimizers = {kind: torch.optim.AdamW(model.parameters(), lr=1e-3) for kind, (model, _) in kinds.items()}
times = {kind: [] for kind in kinds}
for step in range(14):  # in turns, in the same processes: both feel the same noise
    x, y = models.batch(tokens, step, size=8, length=32)
    for kind, (model, backward) in kinds.items():
        dist.barrier()
        start = time.perf_counter()
        optimizers[kind].zero_grad()
        backward(model, x, y)
        optimizers[kind].step()
        dist.barrier()
        times[kind].append(time.perf_counter() - start)
{kind: sorted(found[2:])[6] for kind, found in times.items()}
"""


def bench_tensor() -> None:
    """A tensor-parallel training step of a small GPT, ours and DTensor's, in the same run."""
    print("a tensor-parallel training step, GPT of 4 layers, width 128, batch 8 x 32")
    for size in (2, 4):
        with rankcell.Ranks(size) as ranks:
            found = ranks.run(TENSOR_STEPS).values[0]
        ratio = f"{found['ours'] / found['theirs']:.2f}x <= 1.10x"
        row(f"ours beside parallelize_module, {size} ranks", f"{1e3 * found['ours']:.0f} ms", ratio)


PIPELINE_STEPS = """
import time
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from rankcell import models, schedules
from rankcell.parallel.pipeline import Pipeline, split_gpt

tokens = models.encode(models.text())
m, length, width = 2 * world_size, 32, 128
plan = schedules.one_f_one_b(world_size, m)

def part():
    return split_gpt(models.GPT(49, d_model=width, n_layers=4, tied=False), world_size)[rank]

ours = Pipeline({rank: part()}, plan, models.cross_entropy, between=(length, width))
module = part()
theirs = Schedule1F1B(
    PipelineStage(module, rank, world_size, torch.device("cpu")), m, loss_fn=models.cross_entropy
)

def step_ours(x, y):
    loss = ours.step(x, y)
    return None if loss is None else loss.item()

def step_theirs(x, y):
    losses = []
    if rank == 0: theirs.step(x)
    elif rank == world_size - 1: theirs.step(target=y, losses=losses)
    else: theirs.step()
    return sum(map(float, losses)) / m if losses else None

kinds = {
    "our 1F1B": (step_ours, torch.optim.AdamW(ours.parameters(), lr=1e-3)),
    "torch Schedule1F1B": (step_theirs, torch.optim.AdamW(module.parameters(), lr=1e-3)),
}
times, losses = {kind: [] for kind in kinds}, {kind: [] for kind in kinds}
for i in range(22):
    x, y = models.batch(tokens, i, size=4 * m, length=length)
    for kind, (step, optimizer) in kinds.items():  # in turns, in the same processes: both feel the same noise
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        losses[kind].append(step(x, y))
        optimizer.step()
        dist.barrier()
        times[kind].append(time.perf_counter() - start)
if rank == world_size - 1:
    one, other = losses.values()
    assert max(abs(a - b) for a, b in zip(one, other)) < 1e-4, losses
{kind: sorted(found[2:])[10] for kind, found in times.items()}
"""


def bench_pipeline() -> None:
    """A 1F1B step of a small GPT with our engine and with torch's, on the same stages in the same run."""
    print("a 1F1B step, GPT of 4 layers, width 128, 2 micro-batches of 4 x 32 per rank")
    for size in (2, 4):
        with rankcell.Ranks(size) as ranks:
            found = ranks.run(PIPELINE_STEPS).values[0]
        ours, theirs = found["our 1F1B"], found["torch Schedule1F1B"]
        row(
            f"our 1F1B beside torch's, {size} ranks", f"{1e3 * ours:.0f} ms", f"{ours / theirs:.2f}x <= 1.10x"
        )


FAILURES = {
    "exception on one rank": "if rank == 1: 1 / 0\ndist.all_reduce(torch.ones(4))",
    "missing send": "if rank == 0: dist.recv(torch.ones(4), src=1)",
    "send / send": "x = torch.ones(4)\ndist.send(x, (rank + 1) % 4)\ndist.recv(x, (rank - 1) % 4)",
    "skipped collective": "if rank != 2: dist.all_reduce(torch.ones(4))",
    "different order": "x = torch.ones(4)\nif rank == 0:\n    dist.broadcast(x, 0); "
    "dist.all_reduce(x)\nelse:\n"
    "    dist.all_reduce(x); dist.broadcast(x, 0)",
    "different dtypes": "dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 2 else torch.float32))",
    "rank killed": "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
    "uneven batches": "for step in range(4 if rank == 0 else 3): dist.all_reduce(torch.ones(4))",
}


def bench_failures() -> None:
    """Seconds from the cell to its message, beside a plain spawn with a limit of 60 s."""
    print("seconds from a failing cell to its message, 4 ranks")
    for name, source in FAILURES.items():
        with rankcell.Ranks(4) as ranks:
            ranks.run(ALL_REDUCE)
            start = time.perf_counter()
            try:
                ranks.run(source)
                message = "NO MESSAGE"
            except RuntimeError as error:
                message = str(error).splitlines()[0]
            took = time.perf_counter() - start
            start = time.perf_counter()
            ranks.run(ALL_REDUCE)
            again = time.perf_counter() - start
        row(name, f"{took:.2f} s", f"next {1e3 * again:.0f} ms", message[:90])


INTERRUPTED = {
    "an endless Python loop": "while True: pass",
    "an endless C loop": "import re; re.match('(a*)*b', 'a' * 60)",
    "a sleep": "import time; time.sleep(1e9)",
}


def bench_ends() -> None:
    """Seconds from an interrupt to the cell's end, and from the death of a kernel to that of its ranks."""
    print("seconds to the end")
    with rankcell.Ranks(4) as ranks:
        for name, source in INTERRUPTED.items():
            ranks.run(ALL_REDUCE)
            asked: list[float] = []

            def interrupt(asked: list[float] = asked) -> None:
                asked.append(time.perf_counter())
                os.kill(os.getpid(), signal.SIGINT)

            threading.Timer(0.5, interrupt).start()
            try:
                ranks.run(source)
            except KeyboardInterrupt:
                row(f"{name}: interrupt to message", f"{time.perf_counter() - asked[0]:.2f} s", "<= 2 s")
    kernel = Kernel()
    kernel.run("%load_ext rankcell")
    pids = eval(kernel.run("%%ranks 4 -o run\nimport os; os.getpid()\n")[1] and kernel.run("run.values")[1])
    start = time.perf_counter()
    os.killpg(kernel.manager.provisioner.pid, signal.SIGKILL)
    while any(_alive(pid) for pid in pids) and time.perf_counter() - start < 60:
        time.sleep(0.01)
    row("kernel killed: until no rank is left", f"{time.perf_counter() - start:.2f} s", "<= 2 s")
    kernel.client.stop_channels()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def bench_peers() -> None:
    """The same failures with a plain spawn and with ipyparallel: seconds to a message, up to LIMIT."""
    print(f"the same failures elsewhere, given up after {LIMIT:.0f} s (RANKCELL_BENCH_LIMIT)")
    for name, source in FAILURES.items():
        took = _failing_spawn(source)
        row(f"{name}: spawn", f"> {LIMIT:.0f} s" if took is None else f"{took:.1f} s")
    kernel = Kernel()
    for name, source in FAILURES.items():
        took, again = _failing_ipyparallel(kernel, source)
        if took is None and not again:
            row("ipyparallel", "not installed", "", "`make bench` installs it")
            break
        row(f"{name}: ipyparallel", f"> {LIMIT:.0f} s" if took is None else f"{took:.1f} s", "", again)
    kernel.close()


def _failing(rank: int, path: str, source: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    exec(source, {"rank": rank, "torch": torch, "dist": dist})


def _failing_spawn(source: str) -> float | None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        context = torch.multiprocessing.spawn(
            _failing, args=(f"{folder}/store", source), nprocs=4, join=False
        )
        try:
            while time.perf_counter() - start < LIMIT:
                if context.join(timeout=1):
                    return time.perf_counter() - start
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException):
            return time.perf_counter() - start
        finally:
            for process in context.processes:
                process.kill()
    return None


def _failing_ipyparallel(kernel: Kernel, source: str) -> tuple[float | None, str]:
    """Seconds until the cell ended (None: it did not), and whether the same engines could work on."""
    if not _start_ipyparallel(kernel):
        return None, ""
    cell = f"rank = dist.get_rank()\n{source}\n"
    # the cell runs in the background, to time a hang without losing the kernel
    kernel.run(
        f"import time\nbegan = time.time()\nasked = client[:].execute({cell!r}, block=False)\n"
        f"asked.wait({LIMIT})\ntook = time.time() - began",
        timeout=LIMIT + 30,
    )
    took = float(kernel.run("print(took)")[1].split()[0])
    ended = "True" in kernel.run("print(asked.ready())")[1]
    probe = "x = torch.ones(4); dist.all_reduce(x)"
    kernel.run(f"again = client[:].execute({probe!r}, block=False)\nagain.wait(10)", timeout=30)
    works = "True" in kernel.run("print(again.ready() and again.successful())")[1]
    kernel.run("cluster.stop_cluster_sync()", timeout=60)
    return (took if ended else None), "next cell works" if works else "next cell does not work"


NODES = """
import json, os, signal, statistics, time, rankcell

source = "x = torch.ones(4)\\ndist.all_reduce(x)"
with rankcell.Ranks(4) as here, rankcell.Ranks(4, nodes=2) as there:
    times = {"here": [], "there": []}
    for _ in range(60):  # in turns: both feel the same noise
        for name, ranks in (("here", here), ("there", there)):
            start = time.perf_counter()
            ranks.run(source)
            times[name].append(time.perf_counter() - start)
    print(json.dumps({name: statistics.median(found[10:]) for name, found in times.items()}), flush=True)
    start = time.perf_counter()
    try:
        there.run("import os\\nif rank == 3: os.kill(os.getpid(), 9)\\ndist.barrier()")
    except rankcell.RankLost as error:
        print(json.dumps([time.perf_counter() - start, str(error).splitlines()[0]]), flush=True)
    try:
        there.run("import time\\nfor i in range(600): time.sleep(0.1); dist.barrier()")
    except rankcell.RankLost as error:
        print(json.dumps([time.time(), str(error).splitlines()[0]]), flush=True)
"""


def bench_nodes() -> None:
    """A cell on two nodes of a throw-away Slurm beside the same cell on one machine, and lost ranks."""
    import json

    from mini_slurm import MiniSlurm
    from rankcell.cluster.slurm import NoSlurm

    print("2 nodes x 2 ranks beside 4 ranks on one machine")
    try:
        cluster = MiniSlurm()
    except NoSlurm as reason:
        print(f"  skipped: {reason}")
        return
    with cluster:
        command = ["salloc", "--no-kill", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-c", NODES]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **cluster.environment},
        ) as process:
            medians = json.loads(process.stdout.readline())
            more = medians["there"] - medians["here"]
            row("a warm all-reduce cell on 2 nodes x 2 ranks", f"{1e3 * medians['there']:.1f} ms")
            row("... more than on one machine", f"{1e3 * more:.1f} ms", "<= 10 ms")
            took, message = json.loads(process.stdout.readline())
            row("a killed rank on another node", f"{took:.2f} s", "<= 5 s", message[:60])
            time.sleep(1.0)
            began = time.time()
            cluster.kill_node("node2")
            ended, message = json.loads(process.stdout.readline())
            row("a node without power", f"{ended - began:.2f} s", "<= 5 s", message[:80])


STEPS_OF_A_SCRIPT = """
import json, statistics, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from rankcell import models
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
here = sys.modules.get("rankcell.jobs.inside") if "turns" in sys.argv else None
inside = here._state["inside"] if here is not None else None
tokens = models.encode(models.text())
model = DistributedDataParallel(models.GPT(49, d_model=192, n_layers=6))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses, steps, bursts, calls = [], [], [], 0
for step in range(int(sys.argv[1])):
    x, y = models.batch(tokens, step, size=16 * size, length=32, rank=rank, world_size=size)
    begin, busy = time.perf_counter(), time.process_time()
    optimizer.zero_grad()
    loss = models.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
    steps.append((time.perf_counter() - begin, time.process_time() - busy))
    losses.append(repr(loss.item()))
weights = sum(p.detach().double().sum() for p in model.parameters()).item()
if inside is not None:
    recorder, many = inside.recording.recorder, torch.ones(2_600_000)  # as many numbers as the model has
    calls = recorder.total / len(steps)
    for turn in range(40):  # in turns, in the same processes: all feel the same noise
        recorder.uninstall() if turn % 2 else recorder.install() if turn else None
        dist.barrier()
        dist.all_reduce(many)  # the first call finds a new dispatcher
        busy = time.process_time()
        for _ in range(8):
            dist.all_reduce(many)
        bursts.append((time.process_time() - busy) / 8)
if rank == 0:
    told = {"steps": steps[2:], "losses": losses, "weights": repr(weights), "bursts": bursts, "calls": calls}
    print(json.dumps(told))
dist.barrier()
dist.destroy_process_group()
"""


def _script(folder: str, *words: str, run: bool) -> dict[str, Any]:
    """What the script of DDP steps has printed, plain or under `rankcell run`, with the CPU seconds of all processes
    of the job, from the launcher's start to its end, and the seconds that it took.
    """
    import json
    import resource

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    before = ["-m", "rankcell.command", "run", "--"] if run else []
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "steps.py", *words]
    command = [sys.executable, *before, *([sys.executable] if run else []), *torchrun]
    start, busy = time.perf_counter(), used()
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"cpu": used() - busy, "seconds": time.perf_counter() - start}


def bench_run() -> None:
    """What `rankcell run` costs a script, in seconds and in CPU seconds: whole jobs in turns, with it, plain, and plain
    once more for the noise; and as that is loud, calls recorded beside calls that are not, in the same processes.
    """
    import tempfile

    turns, n = int(os.environ.get("RANKCELL_BENCH_TURNS", "5")), 30
    print(f"{turns} turns of a script of {n} DDP steps on 2 ranks, a GPT of 6 layers; {os.cpu_count()} cores, load "
          f"{os.getloadavg()[0]:.1f}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "steps.py").write_text(STEPS_OF_A_SCRIPT)
        jobs: dict[str, list[dict[str, Any]]] = {"with": [], "plain": [], "again": []}
        for turn in range(turns):
            for kind in sorted(
                jobs, reverse=turn % 2 == 1
            ):  # who is first finds another machine than who is last
                jobs[kind].append(_script(folder, str(n), run=kind == "with"))
        inside = _script(folder, "12", "turns", run=True)

    def step(job: dict[str, Any], which: int) -> float:
        return statistics.median(s[which] for s in job["steps"])

    def ratio(kind: str, of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(of(a) / of(b) for a, b in zip(jobs[kind], jobs["plain"], strict=True))

    for name, of in (
        ("seconds of a step", lambda job: step(job, 0)),
        ("CPU seconds of a rank in a step, all its threads", lambda job: step(job, 1)),
        ("CPU seconds of the whole job, with runner and start", lambda job: float(job["cpu"])),
    ):
        median = statistics.median(map(of, jobs["plain"]))
        shown = f"{1e3 * median:.0f} ms" if median < 1 else f"{median:.1f} s"
        row(
            name,
            f"{ratio('with', of):.3f}x",
            "<= 1.03x",
            f"noise {ratio('again', of):.3f}x, plain {shown}",
        )
    more = [a["cpu"] - b["cpu"] for a, b in zip(jobs["with"], jobs["plain"], strict=True)]
    late = [a["seconds"] - b["seconds"] for a, b in zip(jobs["with"], jobs["plain"], strict=True)]
    row(
        "the whole job takes more",
        f"{statistics.median(late):+.2f} s",
        "",
        f"CPU {statistics.median(more):+.2f} s",
    )
    on, off = inside["bursts"][::2], inside["bursts"][1::2]
    added = statistics.median(a - b for a, b in zip(on, off, strict=True))
    row(
        "the recorder adds to an all-reduce of 10 MB, CPU",
        f"{1e6 * added:.0f} us",
        "",
        f"to {1e3 * statistics.median(off):.1f} ms, in the same processes",
    )
    row(
        f"... and so to a step, of {inside['calls']:.0f} calls",
        f"{inside['calls'] * added / step(inside, 1):.2%}",
        "<= 3 %",
    )
    told = {(tuple(job["losses"]), job["weights"]) for each in jobs.values() for job in each}
    row("all losses and the weights are the same, bit by bit", "yes" if len(told) == 1 else "NO")


def bench_jobs() -> None:
    """A hundred generated jobs, beside torch's own analyser on the same dumps."""
    import collections
    import json
    import tempfile

    import hanging_jobs

    print("100 generated jobs under the runner of `rankcell run`, 2 to 16 ranks, one and two nodes")
    with tempfile.TemporaryDirectory() as kept:
        command = [sys.executable, str(Path(__file__).with_name("hanging_jobs.py")), "0", "100", kept]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        theirs = {r["number"]: hanging_jobs.by_dumps(Path(kept) / str(r["number"])) for r in rows}
    kinds = collections.defaultdict(list)
    for found in rows:
        kinds[found["name"].partition(":")[0]].append(found)
    for kind, each in [*kinds.items(), ("all", rows)]:
        ours = f"rank {sum(r['rank'] for r in each)}, line {sum(r['line'] for r in each)} of {len(each)}"
        dumped = [theirs[r["number"]] for r in each if theirs[r["number"]] is not None and r["wanted"]]
        ok = sum(
            set(r["wanted"]) == set((theirs[r["number"]] or {}).get("ours", ())) for r in each if r["wanted"]
        )
        said = collections.Counter(d["theirs"] for d in dumped)
        words = "; ".join(f"{n} x {what}" for what, n in said.most_common(2))
        row(f"{kind}: rankcell run", ours, ">= 95 %" if kind == "all" else "")
        if dumped:
            row(
                f"{kind}: the dumps alone, rankcell explain",
                f"rank {ok} of {len(dumped)}",
                "",
                f"torchfrtrace: {words}",
            )
    proved = [r["late"] for r in rows if r["wanted"]]
    row("from the first sign, or the limit, to the verdict", f"{max(proved):.1f} s", "<= 5 s", "the longest")


HARM = {
    "hang": "while True:\n    pass",
    "bomb": "import os\nwhile True:\n    os.fork()",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
}
FLOOD = "for i in range(200_000):\n    print('x' * 100)\n"


def bench_grade() -> None:
    """`rankcell grade` on a class of a hundred: solutions, stubs, wrong answers of `answers/`, and harm."""
    import csv
    import tempfile

    import nbformat

    from rankcell import command, exercises

    sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
    import notebooks
    import test_exercises

    course = Path(__file__).parent.parent / "notebooks"
    lesson = exercises.Lesson(next(course.glob("04_*.ipynb")))
    written = Path(__file__).parent / "answers" / f"{lesson.name}.md"
    wrong = test_exercises.read_answers(written.read_text("utf-8"))
    kinds = (
        ["solution"] * 40 + ["stub"] * 15 + ["wrong"] * 25 + [k for k in (*HARM, "flood") for _ in range(5)]
    )
    kinds = kinds[:: 100 // int(os.environ.get("RANKCELL_BENCH_CLASS", "100"))]
    wanted = {"solution": "passed", "flood": "passed", "stub": "not begun"}

    def answer(kind: str, which: exercises.Exercise, number: int) -> str:
        head, _, body = (
            which.solution.partition("\n") if which.solution.startswith("%%") else ("", "", which.solution)
        )
        if kind == "solution":
            return which.solution
        if kind == "wrong":
            of_this = next(a for h, a in wrong.items() if f"{which.text}:".startswith(f"{h}:"))
            return str(of_this[number % len(of_this)].source)
        return f"{head}\n{HARM[kind] if kind in HARM else FLOOD + body}".lstrip("\n")

    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(kinds):
            copy = notebooks.student_copy(notebooks.read(course / f"{lesson.name}.ipynb"), lesson.name)
            cells = [cell for cell in copy.cells if "exercise" in exercises.tags(cell)]
            for cell, which in zip(cells, lesson.exercises, strict=True):
                if kind != "stub":
                    cell.source = answer(kind, which, number)
            student = Path(folder, "class", f"{number:03}-{kind}")
            student.mkdir(parents=True)
            nbformat.write(copy, student / f"{lesson.name}.ipynb")
        table, start = Path(folder, "grades.csv"), time.perf_counter()
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            command.main(["grade", str(Path(folder, "class")), "--course", str(course), "--csv", str(table)])
        seconds = time.perf_counter() - start
        with table.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    right = [r["status"] == wanted.get(r["student"].partition("-")[2], "failed") for r in rows]
    left = subprocess.run(["pgrep", "-cf", "rankcell.grade"], capture_output=True, text=True).stdout.strip()
    row(
        f"a class of {len(kinds)}, of lesson 04",
        f"{seconds / 60:.1f} min",
        "100: <= 10 min",
        f"{len(rows)} answers",
    )
    row("judged right", f"{sum(right)}", f"{len(kinds) * len(lesson.exercises)}")
    for r, is_right in zip(rows, right, strict=True):
        if not is_right:
            print(f"    {r['student']}, {r['exercise']}: {r['status']}, {r['feedback'][:120]}")
    row("processes left", left, "0")


LIMIT = float(os.environ.get("RANKCELL_BENCH_LIMIT", "60"))
SECTIONS: dict[str, Callable[[], None]] = {
    "start": bench_start,
    "cells": bench_cells,
    "worlds": bench_worlds,
    "prints": bench_prints,
    "recording": bench_recording,
    "parallel": bench_parallel,
    "tensor": bench_tensor,
    "pipeline": bench_pipeline,
    "failures": bench_failures,
    "ends": bench_ends,
    "nodes": bench_nodes,
    "run": bench_run,
    "jobs": bench_jobs,
    "grade": bench_grade,
    "peers": bench_peers,
}

if __name__ == "__main__":
    for chosen in sys.argv[1:] or SECTIONS:
        SECTIONS[chosen]()
