"""What a GPU shows: recorded figures are shown with machine and date, and nothing is made up where there are none."""

import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from rankcell import figures

ONE = {
    "gpu": "NVIDIA H200", "date": "2026-11-01", "torch": "2.13.0", "what": "a copy", "value": 1.5, "unit": "GB/s"
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "recorded").mkdir()
    return tmp_path / "recorded"


def test_without_a_gpu_and_without_a_record_nothing_is_shown(folder):
    said = repr(figures.of_a_gpu("02"))
    assert "no GPU is here, and no record from another machine exists" in said and "make gpu" in said
    assert all(len(line) <= 80 for line in said.splitlines())  # a page cuts longer ones
    assert not any(c.isdigit() for c in said)


def test_a_record_is_shown_by_lesson_with_machine_and_date(folder):
    both = [{**ONE, "lesson": "02"}, {**ONE, "lesson": "06", "what": "a product"}]
    (folder / "nvidia-h200.json").write_text(json.dumps({"figures": both}))
    (folder / "nvidia-l4.json").write_text(
        json.dumps({"figures": [{**ONE, "lesson": "02", "gpu": "NVIDIA L4", "value": 0.25}]})
    )
    assert repr(figures.of_a_gpu("02")).splitlines() == [
        "NVIDIA H200, torch 2.13.0, measured 2026-11-01",
        "        1.5 GB/s     a copy",
        "NVIDIA L4, torch 2.13.0, measured 2026-11-01",
        "       0.25 GB/s     a copy",
    ]
    assert "a product" in repr(figures.of_a_gpu("06")) and len(figures.recorded().figures) == 3


def test_where_there_is_a_gpu_it_is_measured(folder, monkeypatch, capsys):
    """Also where a record exists; a measurement that fails costs only its own figures."""

    def fails(note):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA T4")
    measures = (("02", lambda note: note("a copy", 3.14159265, "GB/s")), ("02", fails), ("06", fails))
    monkeypatch.setattr(figures, "_MEASURES", measures)
    (folder / "old.json").write_text(json.dumps({"figures": [{**ONE, "lesson": "02"}]}))
    (figure,) = figures.of_a_gpu("02").figures
    assert (figure.lesson, figure.gpu, figure.value) == ("02", "NVIDIA T4", 3.142)
    assert capsys.readouterr().err == "fails: RuntimeError: out of memory\n"


# What is measured, by hand, with a GPU that does nothing and takes half a second for it


@pytest.fixture
def idle(monkeypatch):
    monkeypatch.setattr(figures, "torch", MagicMock())
    monkeypatch.setattr(figures, "_seconds_of", lambda work: 0.5)


def noted(measure):
    found = {}
    measure(lambda what, value, unit: found.update({what: (value, unit)}))
    return found


def test_rates_are_work_over_time(idle):
    copies = noted(figures._memory)
    assert copies.pop("copy within the GPU, bytes read and written") == (2 * 2**28 / 0.5 / 1e9, "GB/s")
    assert len(copies) == 4 and set(copies.values()) == {(2**28 / 0.5 / 1e9, "GB/s")}
    products = noted(figures._products)
    assert products.pop("sum of two vectors of 2^26 in bf16") == (2**26 / 0.5 / 1e12, "TFLOP/s")
    assert products == {  # n^2 results, each of n multiplications and n additions
        f"product of {n} x {n} in bf16": (n * n * 2 * n / 0.5 / 1e12, "TFLOP/s")
        for n in (256, 1024, 4096, 8192)
    }
    assert set(noted(figures._overlap).values()) == {(500.0, "ms")}


def test_the_operations_of_training_are_counted_by_the_convention(idle, monkeypatch):
    gpt = SimpleNamespace(parameters=lambda: [torch.empty(900), torch.empty(10, 10)])
    monkeypatch.setattr(figures, "models", SimpleNamespace(GPT=lambda *sizes, **more: gpt))
    figures.torch.cuda.max_memory_allocated.return_value = 3e9
    found = {what.split(",")[0]: value for what, (value, unit) in noted(figures._training).items()}
    per_token = 6 * 1000 + 12 * 12 * 1024 * 1024  # parameters; layers, width and length
    assert found["model FLOP/s"] == pytest.approx(per_token * 8 * 1024 / 0.5 / 1e12)
    assert (found["tokens per second"], found["peak memory"]) == (8 * 1024 / 0.5, 3.0)


def test_the_bus_bandwidth_is_that_of_the_slowest_of_four_ranks(monkeypatch):
    ranks = MagicMock(device_note="one GPU")
    ranks.run.return_value.values = [0.25, 0.5, 0.125, 0.25]
    monkeypatch.setattr(figures, "Ranks", lambda n, device: MagicMock(__enter__=lambda _: ranks))
    assert noted(figures._all_reduce) == {  # 2 (n - 1) / n = 3 / 2 of the array's bytes
        f"bus bandwidth, 4 ranks, {size} KiB: one GPU": (1.5 * size * 1024 / 0.5 / 1e9, "GB/s")
        for size in (4, 1024, 65536)
    }


def test_the_first_three_times_do_not_count_and_of_the_others_the_median_does(monkeypatch):
    takes, took = iter([9000.0] * 3 + [1.0, 2.0, 3.0, 4.0, 700.0]), []  # ms
    event = MagicMock(elapsed_time=lambda end: took[-1])
    cuda = SimpleNamespace(Event=lambda enable_timing: event, synchronize=lambda: None)
    monkeypatch.setattr(figures, "torch", SimpleNamespace(cuda=cuda))
    assert figures._seconds_of(lambda: took.append(next(takes)), repeats=5) == 0.003
    assert next(takes, None) is None
