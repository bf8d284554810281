"""What a GPU shows: recorded figures are shown with machine and date, and nothing is made up where there are none."""

import json

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
