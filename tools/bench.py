"""`make bench`: what a rank cell costs, beside the same cell with ipyparallel; and a soak: does anything grow?

    python tools/bench.py                # first cells, warm cells, failures
    python tools/bench.py soak 5000      # so many cells, every tenth of which fails

Not a test: it prints a table and fails nothing. Times on a shared machine are noisy: medians and ratios within one run
say more than a single number. Cells are timed in a real kernel, from sending the cell to the kernel being idle.
"""

import statistics
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

import rankcell

LIMIT = 60.0  # seconds after which a cell of ipyparallel is given up
PRINT, ALL_REDUCE = "print(rank)\n", "x = torch.ones(4)\ndist.all_reduce(x)\n"
FAILURES = {
    "exception on one rank": "if rank == 1: 1 / 0\ndist.all_reduce(torch.ones(4))",
    "missing send": "if rank == 0: dist.recv(torch.ones(4), src=1)",
    "send to each other": "x = torch.ones(4)\ndist.send(x, (rank + 1) % 4)\ndist.recv(x, (rank - 1) % 4)",
    "skipped collective": "if rank != 2: dist.all_reduce(torch.ones(4))",
    "different dtypes": "dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 2 else torch.float32))",
    "rank killed": "import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()",
    "uneven batches": "for step in range(4 if rank == 0 else 3): dist.all_reduce(torch.ones(4))",
}
# Four engines with an initialised process group, as a careful user of ipyparallel would set them up
ENGINES = textwrap.dedent("""
    import ipyparallel, os, tempfile, time
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
    view.execute("import torch, torch.distributed as dist")
    print("joined", view.map_async(join, range(4), [tempfile.mktemp()] * 4).get())
    view.execute("rank = dist.get_rank()")
""")


def row(what: str, ours: str, theirs: str = "", note: str = "") -> None:
    """One line of the table."""
    print(f"  {what:<44} {ours:>12} {theirs:>14}   {note}".rstrip(), flush=True)


class Kernel:
    """A kernel of a notebook, to time cells as a learner feels them."""

    def __init__(self, *cells: str) -> None:
        self.manager, self.client = start_new_kernel(
            kernel_name="python3",
            extra_arguments=["--IPKernelApp.log_level=40"],  # else it warns of its unencrypted sockets
        )
        for cell in cells:
            self.run(cell)

    def run(self, source: str, timeout: float = 300.0) -> tuple[float, str]:
        """Seconds, and all text that came back."""
        text: list[str] = []

        def take(message: dict[str, Any]) -> None:
            content = message["content"]
            text.append(content.get("text", "") or content.get("data", {}).get("text/plain", ""))
            text.extend(content.get("traceback", []))

        start = time.perf_counter()
        self.client.execute_interactive(source, timeout=timeout, output_hook=take)
        return time.perf_counter() - start, "\n".join(text)

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def with_engines() -> Kernel | None:
    """A kernel with four engines; None where ipyparallel is not installed."""
    kernel = Kernel()
    if "joined [0, 1, 2, 3]" in kernel.run(ENGINES)[1]:
        return kernel
    kernel.close()
    return None


def first_cells() -> None:
    """From a fresh kernel to the first result, with and without torch imported in the notebook before."""
    print("the first cell of a fresh kernel, 4 ranks: median of 3")
    for name, cell in (("print", PRINT), ("all-reduce", ALL_REDUCE)):
        for before in ("", "import torch"):
            times = []
            for _ in range(3):
                kernel = Kernel("1", before)
                times.append(kernel.run("%load_ext rankcell")[0] + kernel.run(f"%%ranks 4\n{cell}")[0])
                kernel.close()
            torch_is = "torch imported before" if before else "no torch in the notebook"
            row(f"{name}, {torch_is}", f"{statistics.median(times):.2f} s")


def warm_cells() -> None:
    """A print and an all-reduce on ranks that are there, in turns with the same cell on engines."""
    print("warm cells, 4 ranks: median of 40               rankcell    ipyparallel")
    ours, theirs = Kernel("%load_ext rankcell", f"%%ranks 4\n{ALL_REDUCE}"), with_engines()
    for name, cell in (("1 + 1 without ranks", ""), ("print", PRINT), ("all-reduce", ALL_REDUCE)):
        times: dict[str, list[float]] = {"%%ranks 4": [], "%%px": []}
        for _ in range(40):  # in turns: both feel the same noise
            for magic, kernel in (("%%ranks 4", ours), ("%%px", theirs)):
                if kernel is not None:
                    times[magic].append(kernel.run(f"{magic}\n{cell}" if cell else "1 + 1")[0])
        shown = [
            f"{1e3 * statistics.median(found):.1f} ms" if found else "not there" for found in times.values()
        ]
        row(name, *shown)
    ours.close()
    if theirs is not None:
        theirs.run("cluster.stop_cluster_sync()")
        theirs.close()


def failures() -> None:
    """From a failing cell to its message, and whether the next cell works."""
    print("from a failing cell to its message, 4 ranks     rankcell    ipyparallel")
    for name, source in FAILURES.items():
        with rankcell.Ranks(4, device="cpu") as ranks:
            ranks.run(ALL_REDUCE)
            start, message = time.perf_counter(), "NO MESSAGE"
            try:
                ranks.run(source)
            except RuntimeError as error:
                message = str(error).splitlines()[0]
            took = time.perf_counter() - start
            ranks.run(ALL_REDUCE)  # raises if the world does not live on
        row(name, f"{took:.2f} s", failing_on_engines(source), message[:90])


def failing_on_engines(source: str) -> str:
    """The seconds until the same cell ends on new engines; with a ! where the next cell does not work."""
    kernel = with_engines()
    if kernel is None:
        return "not there"
    # the cell runs in the background, to time a hang without losing the kernel
    asked = f"asked = client[:].execute({source!r}, block=False)"
    kernel.run(f"began = time.time()\n{asked}\nasked.wait({LIMIT})\ntook = time.time() - began")
    ended, took = kernel.run("print(asked.ready(), took)")[1].split()[:2]
    kernel.run(f"again = client[:].execute({ALL_REDUCE!r}, block=False)\nagain.wait(10)")
    works = "True" in kernel.run("print(again.ready() and again.successful())")[1]
    kernel.run("cluster.stop_cluster_sync()")
    kernel.close()
    return (f"{float(took):.1f} s" if ended == "True" else f"> {LIMIT:.0f} s") + ("" if works else " !")


def of_process(pid: int | str) -> tuple[int, int, int]:
    """Resident memory in MB, open files, and threads of a process (Linux)."""
    folder = Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return pages * 4096 // 10**6, len([*(folder / "fd").iterdir()]), len([*(folder / "task").iterdir()])


def soak(cells: int) -> None:
    """Many cells on one world, of which every tenth fails in one of the ways above; what grows, would be seen."""
    print(f"{cells} cells on 4 ranks, every tenth fails: MB, open files, threads")
    kinds = list(FAILURES.values())
    with rankcell.Ranks(4, device="cpu") as ranks:
        for k in range(cells + 1):
            if k % max(1, cells // 10) == 0:
                ranks.run(ALL_REDUCE)
                each = [of_process(pid) for pid in ranks.pids]
                most = ", ".join(str(max(numbers)) for numbers in zip(*each, strict=True))
                row(
                    f"after {k} cells",
                    "",
                    "",
                    f"this process {of_process('self')}, the largest rank ({most})",
                )
            try:
                ranks.run(kinds[k // 10 % len(kinds)] if k % 10 == 9 else PRINT + ALL_REDUCE)
            except RuntimeError:
                continue


if __name__ == "__main__":
    if sys.argv[1:2] == ["soak"]:
        soak(int(sys.argv[2]) if sys.argv[2:] else 1000)
    else:
        first_cells()
        warm_cells()
        failures()
