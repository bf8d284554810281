"""What `make gpu` measures for the lessons on the first GPU of a machine; `rankcell.figures` shows the record."""

import datetime
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from rankcell import models
from rankcell.engine.world import Ranks
from rankcell.figures import Measurement


def measured() -> list[Measurement]:
    """Measure on the first GPU of this machine what the lessons show of one.

    What cannot be measured is told on stderr and left out: the other figures are still worth having.
    """
    found: list[Measurement] = []
    gpu, today = torch.cuda.get_device_name(0), datetime.date.today().isoformat()
    for number, measure in _MEASURES:

        def note(what: str, value: float, unit: str, number: str = number) -> None:
            found.append(
                Measurement(number, gpu, today, torch.__version__, what, float(f"{value:.4g}"), unit)
            )

        try:
            measure(note)
        except Exception as error:  # noqa: BLE001 - see above
            print(f"{measure.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()
    return found


Note = Callable[[str, float, str], None]


def _seconds_of(work: Callable[[], Any], repeats: int = 10, *, queued: int = 1, ahead: Any = None) -> float:
    """Seconds of one call by the GPU's own clock: the median of `repeats`, after three that do not count.

    Around one short call on an idle GPU two events measure the host, which launches the second event later than the
    call is done. So `queued` calls wait behind a long one, `ahead`, and the GPU does them one after the other.
    """
    times = []
    for i in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if ahead is not None:
            ahead()
        start.record()
        for _ in range(queued):
            work()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) / 1000 / queued)
    return statistics.median(times)


def _memory(note: Note) -> None:
    """Copies within the GPU and between it and the host."""
    n = 2**28  # bytes
    a, b = (torch.empty(n, dtype=torch.uint8, device="cuda") for _ in range(2))
    note(
        "copy within the GPU, bytes read and written",
        2 * n / _seconds_of(lambda: b.copy_(a)) / 1e9,
        "GB/s",
    )
    for pinned in (True, False):
        host = torch.empty(n, dtype=torch.uint8, pin_memory=pinned)
        how = "pinned" if pinned else "pageable"
        to = _seconds_of(lambda host=host: a.copy_(host, non_blocking=True))
        back = _seconds_of(lambda host=host: host.copy_(a, non_blocking=True))
        note(f"host to GPU, {how}", n / to / 1e9, "GB/s")
        note(f"GPU to host, {how}", n / back / 1e9, "GB/s")


def _products(note: Note) -> None:
    """Matrix products of growing size, and a sum: points of the roofline."""
    long = torch.randn(8192, 8192, device="cuda")  # a product in float32: 20 ms on an H100

    def ahead() -> None:
        long @ long

    for size in (256, 1024, 4096, 8192):
        x, y = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out, queued = torch.empty_like(x), 200 if size <= 1024 else 10
        seconds = _seconds_of(lambda x=x, y=y, out=out: torch.mm(x, y, out=out), queued=queued, ahead=ahead)
        rate = 2 * size**3 / seconds / 1e12
        note(f"product of {size} x {size} in bf16", rate, "TFLOP/s")
    x, y = (torch.randn(2**26, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    note("sum of two vectors of 2^26 in bf16", 2**26 / _seconds_of(lambda: x + y) / 1e12, "TFLOP/s")


def _overlap(note: Note) -> None:
    """A copy from the host beside a product, as in lesson 07."""
    x = torch.randn(8192, 8192, device="cuda")
    target = torch.empty(2**27, device="cuda")
    compute, copies = torch.cuda.Stream(), torch.cuda.Stream()
    for pinned in (True, False):
        host = torch.randn(2**27, pin_memory=pinned)

        def both(host: Any = host, pinned: bool = pinned) -> None:
            current = torch.cuda.current_stream()
            for stream in (compute, copies):
                stream.wait_stream(current)
            with torch.cuda.stream(compute):
                (x @ x).record_stream(compute)
            with torch.cuda.stream(copies):
                target.copy_(host, non_blocking=pinned)
            for stream in (compute, copies):
                current.wait_stream(stream)

        how = "pinned" if pinned else "pageable"
        alone = _seconds_of(lambda host=host, pinned=pinned: target.copy_(host, non_blocking=pinned))
        note(f"copy of 512 MiB alone, {how}", alone * 1000, "ms")
        note(f"copy of 512 MiB beside a product, {how}", _seconds_of(both) * 1000, "ms")
    note("product of 8192 x 8192 in float32 alone", _seconds_of(lambda: x @ x) * 1000, "ms")


def _all_reduce(note: Note) -> None:
    """An all-reduce over four ranks on the GPUs of this machine."""
    source = """
import statistics, time
x = torch.ones({numbers}, device=device)
times = []
for i in range(13):
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if i >= 3: times.append(time.perf_counter() - start)
statistics.median(times)
"""
    with Ranks(4, device="cuda") as ranks:
        for numbers in (2**10, 2**18, 2**24):
            slowest = max(ranks.run(source.format(numbers=numbers), timeout=60).values)
            bus = 1.5 * 4 * numbers / slowest / 1e9
            # without why, and what would be better
            over = ranks.device_note.partition(". ")[0].partition(":")[0]
            note(f"bus bandwidth, 4 ranks, {4 * numbers >> 10} KiB: {over}", bus, "GB/s")


def _training(note: Note) -> None:
    """One process trains a small GPT in bf16: model FLOP/s, and the memory at its peak."""
    vocab, width, layers, length, batch = 32_000, 1024, 12, 1024, 8
    torch.cuda.reset_peak_memory_stats()
    model = models.GPT(
        vocab, width, n_heads=16, n_layers=layers, context=length, device="cuda", dtype=torch.bfloat16
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(vocab, (batch, length + 1), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        models.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()

    seconds = _seconds_of(step)
    parameters = sum(p.numel() for p in model.parameters())
    # 6 operations per parameter and token, and 12 * layers * width * length for attention: the convention of PaLM,
    # https://arxiv.org/abs/2204.02311, appendix B
    per_token = 6 * parameters + 12 * layers * width * length
    size = f"{parameters / 1e6:.0f} million parameters, bf16, batch {batch} x {length}"
    note(f"model FLOP/s, {size}", per_token * batch * length / seconds / 1e12, "TFLOP/s")
    note(f"tokens per second, {size}", batch * length / seconds, "1/s")
    note(f"peak memory, {size}", torch.cuda.max_memory_allocated() / 1e9, "GB")


_MEASURES: tuple[tuple[str, Callable[[Note], None]], ...] = (
    ("02", _memory),
    ("02", _products),
    ("05", _all_reduce),
    ("07", _overlap),
    ("08", _training),
)
