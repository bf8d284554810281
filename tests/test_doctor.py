"""`rankcell doctor`: each finding on a machine that has just this, and the command on the one that runs the tests."""

import subprocess
import sys
from dataclasses import replace

import pytest

from rankcell import doctor
from rankcell.doctor import Facts

GOOD = Facts(host="good", cores=8, memory=32 << 30, python="3.12.3", torch="2.13.0", cuda="13.0")
H100 = {"gpus": ("H100",), "choice": "nccl 2.28.9, a GPU each"}


def said(facts, kind=None):
    """All sentences on `facts`, with what to do."""
    return [f"{f.text} {f.do}".strip() for f in doctor.findings(facts) if kind in (None, f.kind)]


def test_a_good_machine_has_no_problem():
    assert said(GOOD, "problem") == said(GOOD, "note") == []
    assert "four ranks on the CPU over gloo, on 8 cores." in said(GOOD, "works")
    assert any("no GPU" in text for text in said(GOOD))
    kinds = [f.kind for f in doctor.findings(replace(GOOD, cores=2, loopback="down"))]
    assert kinds == sorted(kinds, key=["problem", "note", "works"].index) and kinds[0] == "problem"


# what differs from a good machine, the kind of finding, words in it
# fmt: off
CASES = [
    (dict(cores=2), "note", "2 cores|--cpus-per-task=8"),
    (dict(memory=1 << 30), "note", "1.0 GiB|--mem=8G"),
    (dict(memory=100 << 20), "problem", "room for 2 ranks|--mem"),
    (dict(files=210), "problem", "room for 1 ranks|ulimit -n"),
    (dict(shared=64 << 20), "note", "64 MiB|--shm-size"),
    (dict(shared=-1), "note", "cannot be written|DataLoader"),
    (dict(loopback="the loopback interface lo is down"), "problem", "cannot reach each other|lo"),
    (dict(temporary=-1), "problem", "cannot be written|TMPDIR"),
    (dict(temporary=1 << 20), "problem", "1 MiB free|another folder"),
    (dict(linux=False), "note", "not Linux"),
    (dict(torch="2.17.0"), "note", "2.17.0 is none of those|2.11 to 2.15"),
    (dict(torch_problem="`import torch` fails"), "problem", "`import torch` fails"),
    (dict(visible=""), "note", "hides every GPU|unset"),
    (dict(has_gpu=True, cuda=""), "problem", "2.13.0, is built for the CPU|pip install"),
    (dict(has_gpu=True), "problem", "(CUDA 13.0) sees none|update the driver"),
    (H100, "works", "1 x H100; CUDA 13.0. `%%ranks 4 --device cuda`: nccl 2.28.9, a GPU each"),
    ({**H100, "better": "CUDA MPS lets ranks compute at once"}, "note", "CUDA MPS"),
    ({**H100, "gpu_problem": "no kernel image"}, "problem", "no kernel image"),
]
# fmt: on


@pytest.mark.parametrize(("changed", "kind", "words"), CASES, ids=[case[2] for case in CASES])
def test_a_finding(changed, kind, words):
    facts, words = replace(GOOD, **changed), words.split("|")
    assert any(all(word in text for word in words) for text in said(facts, kind)), said(facts)
    # it is about what differs: a good machine hears nothing of the kind
    assert not any(all(word in text for word in words) for text in said(GOOD))
    assert max(map(len, doctor.report(facts).splitlines())) <= 120


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
        assert doctor._ask_torch() == {"torch_problem": says}


def test_on_this_machine():
    command = [sys.executable, "-m", "rankcell.command", "doctor"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1) and run.stderr == ""
    assert run.stdout.startswith("rankcell doctor on ") and "torch 2." in run.stdout
