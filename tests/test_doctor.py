"""`rankcell doctor`: each finding on a machine that has just this, and the command on the one that runs the tests."""

import subprocess

import pytest

from rankcell import command, doctor

GIB = 1 << 30
CPU = {"torch": "2.13.0", "cuda": "13.0", "gpus": []}
H100 = {**CPU, "gpus": ["H100"], "choice": "nccl 2.28.9, a GPU each", "better": ""}

# what was looked at, the kind of finding, words in it
# fmt: off
CASES = [
    (doctor.of_torch, (CPU,), "works", "torch 2.13.0 on Python 3"),
    (doctor.of_torch, ({**CPU, "torch": "2.17.0"},), "note", "2.17.0 is none of those|2.11 to 2.15"),
    (doctor.of_torch, ({"problem": "`import torch` fails"},), "problem", "`import torch` fails"),
    (doctor.of_room, (8, 512, ""), "works", "four ranks on the CPU over gloo, on 8 cores."),
    (doctor.of_room, (2, 4, ""), "note", "2 cores|--cpus-per-task=8"),
    (doctor.of_room, (8, 2, "It has room for 2 ranks."), "problem", "room for 2 ranks|--mem"),
    (doctor.of_gpus, (CPU, None, False), "works", "no GPU"),
    (doctor.of_gpus, (CPU, "", False), "note", "hides every GPU|unset"),
    (doctor.of_gpus, ({**CPU, "cuda": ""}, None, True), "problem", "2.13.0, is built for the CPU|pip install"),
    (doctor.of_gpus, (CPU, None, True), "problem", "(CUDA 13.0) sees none|update the driver"),
    (doctor.of_gpus, (H100, None, True), "works", "1 x H100; CUDA 13.0. `%%ranks 4 --device cuda`: nccl 2.28.9, a GPU"),
    (doctor.of_gpus, ({**H100, "better": "CUDA MPS lets ranks compute at once"}, "0", True), "note", "CUDA MPS"),
    (doctor.of_gpus, ({**H100, "gpu_problem": "no kernel image"}, None, True), "problem", "no kernel image"),
    (doctor.of_shared_memory, (64 << 20,), "note", "64 MiB|--shm-size"),
]
# fmt: on


@pytest.mark.parametrize(("look", "seen", "kind", "words"), CASES, ids=[case[3] for case in CASES])
def test_a_finding(look, seen, kind, words):
    found = list(look(*seen))
    said = [f"{f.text} {f.do}" for f in found if f.kind == kind]
    assert any(all(word in text for word in words.split("|")) for text in said), found
    assert max(map(len, doctor.report(found).splitlines())) <= 120


def test_what_is_well_is_not_said():
    assert [*doctor.of_shared_memory(None), *doctor.of_shared_memory(GIB)] == []
    assert list(doctor.of_gpus({"problem": "no torch"}, None, True)) == []


def test_a_torch_that_fails_is_a_finding(monkeypatch):
    def fails(*command, **options):
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nImportError: libcudart.so.13")

    def is_silent(*command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    for run, says in (
        (fails, "`import torch` fails in this environment: ImportError: libcudart.so.13"),
        (is_silent, "torch did not answer within 60 s: a slow file system, or a GPU that does not answer."),
    ):
        monkeypatch.setattr(doctor.subprocess, "run", run)
        assert doctor._ask_torch() == {"problem": says}


def test_on_this_machine(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PROBE", 600.0)  # torch may be slow to answer on a busy machine
    found = list(doctor.findings())
    kinds = [f.kind for f in found]
    assert kinds == sorted(kinds, key=["problem", "note", "works"].index)
    monkeypatch.setattr(doctor, "findings", lambda: found)
    status = command.main(["doctor"])
    shown = capsys.readouterr()
    assert status in (0, 1) and shown.err == ""
    assert shown.out.startswith("rankcell doctor on ") and "torch 2." in shown.out
