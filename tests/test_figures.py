"""What only a GPU shows: recorded figures with machine and date, how `make gpu` measures them, and what it runs."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import nbformat
import pytest
import torch

import gpu
import gpu_figures
from rankcell import figures

ROOT = Path(__file__).parent.parent
ONE = {
    "gpu": "NVIDIA H200",
    "date": "2026-11-01",
    "torch": "2.13.0",
    "what": "a copy",
    "value": 1.5,
    "unit": "GB/s",
}


def test_without_a_record_nothing_is_shown(tmp_path):
    said = repr(figures.of_a_gpu("02", tmp_path))
    assert said == "No GPU has been measured yet: `make gpu` on a machine with one writes a record."


def test_a_record_shows_machine_and_date(tmp_path):
    both = [{**ONE, "lesson": "02"}, {**ONE, "lesson": "06", "what": "a product"}]
    other = [{**ONE, "lesson": "02", "gpu": "NVIDIA L4", "value": 0.25}]
    (tmp_path / "nvidia-h200.json").write_text(json.dumps({"figures": both}))
    (tmp_path / "nvidia-l4.json").write_text(json.dumps({"figures": other}))
    assert repr(figures.of_a_gpu("02", tmp_path)).splitlines() == [
        "NVIDIA H200, torch 2.13.0, measured 2026-11-01",
        "        1.5 GB/s     a copy",
        "NVIDIA L4, torch 2.13.0, measured 2026-11-01",
        "       0.25 GB/s     a copy",
    ]
    assert "a product" in repr(figures.of_a_gpu("06", tmp_path))
    assert len(figures.of_a_gpu(folder=tmp_path).figures) == 3


def test_a_measurement_that_fails_costs_only_its_own(monkeypatch, capsys):
    def fails(note):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA T4")
    measures = (("02", lambda note: note("a copy", 3.14159265, "GB/s")), ("02", fails), ("06", fails))
    monkeypatch.setattr(gpu_figures, "_MEASURES", measures)
    (figure,) = gpu_figures.measured()
    assert (figure.lesson, figure.gpu, figure.value) == ("02", "NVIDIA T4", 3.142)
    assert capsys.readouterr().err == "fails: RuntimeError: out of memory\n" * 2


# What is measured, by hand, with a GPU that does nothing and takes half a second for it


@pytest.fixture
def idle(monkeypatch):
    monkeypatch.setattr(gpu_figures, "torch", MagicMock())
    monkeypatch.setattr(gpu_figures, "_seconds_of", lambda work, **_: 0.5)


def noted(measure):
    found = {}
    measure(lambda what, value, unit: found.update({what: (value, unit)}))
    return found


def test_rates_are_work_over_time(idle):
    copies = noted(gpu_figures._memory)
    assert copies.pop("copy within the GPU, bytes read and written") == (2 * 2**28 / 0.5 / 1e9, "GB/s")
    assert len(copies) == 4 and set(copies.values()) == {(2**28 / 0.5 / 1e9, "GB/s")}
    products = noted(gpu_figures._products)
    assert products.pop("sum of two vectors of 2^26 in bf16") == (2**26 / 0.5 / 1e12, "TFLOP/s")
    rates = {
        n: (n * n * 2 * n / 0.5 / 1e12, "TFLOP/s") for n in (256, 1024, 4096, 8192)
    }  # 2n operations each
    assert products == {f"product of {n} x {n} in bf16": rate for n, rate in rates.items()}
    assert set(noted(gpu_figures._overlap).values()) == {(500.0, "ms")}


def test_bus_bandwidth_is_that_of_the_slowest_rank(monkeypatch):
    ranks = MagicMock(device_note="one GPU")
    ranks.run.return_value.values = [0.25, 0.5, 0.125, 0.25]
    monkeypatch.setattr(gpu_figures, "Ranks", lambda n, device: MagicMock(__enter__=lambda _: ranks))
    assert noted(gpu_figures._all_reduce) == {  # 2 (n - 1) / n = 3 / 2 of the array's bytes
        f"bus bandwidth, 4 ranks, {size} KiB: one GPU": (1.5 * size * 1024 / 0.5 / 1e9, "GB/s")
        for size in (4, 1024, 65536)
    }


# make gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_make_gpu_ends_with_1(capsys):
    before = list((ROOT / "notebooks").rglob("*.json"))
    assert gpu.main([]) == 1
    out = capsys.readouterr().out
    assert "make gpu needs a GPU" in out and "no record was written" in out
    assert list((ROOT / "notebooks").rglob("*.json")) == before


@pytest.mark.parametrize(
    ("cell", "runs"),
    [
        ("%%ranks 4 -o run\nx = 1", "%%ranks 4 -o run --device cuda\nx = 1"),
        ("%%ranks 2", "%%ranks 2 --device cuda"),
        ("%%ranks 2 --device cpu\nx", ""),
        ("%%ranks 4 --nodes 2\nx", ""),
        ("x = '%%ranks 4'\n%ranks stop", ""),
    ],
)
def test_rank_cells_go_to_the_gpu(cell, runs):
    assert gpu.on_cuda(cell) == (runs or cell)


@pytest.mark.parametrize(
    ("cells", "code", "result"),
    [
        ([("x = 1",), ("1 / 0", "raises-exception"), ("assert x == 1",)], 0, (3, "")),
        ([("x",), ("1 / 0",)], 1, (1, "cell 1 of 2 (x): NameError: name 'x' is not defined")),
        ([("x = 1", "raises-exception")], 1, (1, "no error came")),
    ],
)
def test_a_lesson_says_where_it_stopped(tmp_path, cells, code, result):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source, metadata={"tags": tags}) for source, *tags in cells]
    path, out = tmp_path / "lesson.ipynb", tmp_path / "result.json"
    nbformat.write(notebook, path)
    command = [sys.executable, str(ROOT / "tools" / "gpu.py"), "--part", "lesson", str(path), str(out)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == code
    said = json.loads(out.read_text())
    assert (said["cells"], said["of"]) == (result[0], len(cells)) and result[1] in said["stopped"]
    assert bool(said["stopped"]) == bool(result[1])
