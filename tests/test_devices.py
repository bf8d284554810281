"""On which device and over which backend a world talks: a table of machines, none of which needs to be here."""

import ctypes
import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rankcell.engine import devices
from rankcell.engine.devices import Machine, Mps, MpsDaemon, choose
from rankcell.errors import WorldSizeError

NEW, OLD = (2, 30, 7), (2, 28, 9)
HERE, RUNS = Mps(installed=True), Mps(installed=True, running=True)

# ranks, --device, machine: device, backend, a part of the note, a part of how to get better
TABLE = [
    (4, "cpu", Machine(4, NEW), "cpu", "gloo", "as asked", ""),
    (4, "auto", Machine(), "cpu", "gloo", "no GPU here", ""),
    (4, "auto", Machine(4, OLD), "cuda", "nccl", "one of 4 GPUs for each rank", ""),
    (
        4,
        "auto",
        Machine(1, NEW),
        "cpu",
        "gloo",
        "1 GPU is too few for 4 ranks",
        "`--device cuda` lets the ranks share",
    ),
    (4, "auto", Machine(2, NEW), "cpu", "gloo", "2 GPUs are too few for 4 ranks", "`--device cuda`"),
    (4, "auto", Machine(4), "cpu", "gloo", "this torch has no nccl", "`--device cuda`"),
    (4, "cuda", Machine(8, OLD), "cuda", "nccl", "one of 8 GPUs for each rank", ""),
    (1, "cuda", Machine(1, OLD), "cuda", "nccl", "one of 1 GPUs for each rank", ""),
    (
        4,
        "cuda",
        Machine(1, OLD),
        "cuda",
        "gloo",
        "NCCL 2.28.9 does not let ranks share a GPU",
        "NCCL 2.30 or newer",
    ),
    (4, "cuda", Machine(1), "cuda", "gloo", "this torch has no nccl", "NCCL 2.30 or newer"),
    (
        4,
        "cuda",
        Machine(1, NEW),
        "cuda",
        "nccl",
        "nccl 2.30.7, sharing 1 GPU in turns",
        "nvidia-cuda-mps-control -d",
    ),
    (4, "cuda", Machine(1, NEW, HERE), "cuda", "nccl", "side by side by a CUDA MPS of this world", ""),
    (4, "cuda", Machine(1, NEW, RUNS), "cuda", "nccl", "as CUDA MPS runs", ""),
    (
        8,
        "cuda",
        Machine(2, NEW, HERE, nodes=2),
        "cuda",
        "nccl",
        "sharing 2 GPUs in turns",
        "nvidia-cuda-mps-control",
    ),
    (4, "cuda", Machine(4), "cuda", "gloo", "one of 4 GPUs for each rank", ""),
]


@pytest.mark.parametrize(("ranks", "asked", "machine", "device", "backend", "note", "better"), TABLE)
def test_what_is_chosen_and_why(ranks, asked, machine, device, backend, note, better):
    choice = choose(ranks, asked, machine)
    assert (choice.device, choice.backend) == (device, backend)
    assert note in choice.note and (better in choice.better if better else True)
    assert choice.start_mps == ("MPS of this world" in choice.note)


def test_ranks_that_share_a_gpu_have_their_part_of_it():
    alone, four, five = (choose(n, "cuda", Machine(g, NEW)) for n, g in ((4, 4), (4, 1), (5, 2)))
    assert alone.shared == 1 and alone.memory_fraction is None and alone.environment == {}
    assert four.shared == 4 and four.memory_fraction == 0.9 / 4
    assert five.shared == 3 and five.memory_fraction == 0.9 / 3
    assert four.environment == {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
    }
    assert choose(64, "cuda", Machine(1, NEW)).environment["NCCL_MAX_CTAS"] == "1"


def test_what_cannot_start_has_something_in_its_place():
    best = choose(4, "cuda", Machine(1, NEW, HERE))
    assert best.start_mps and best.instead.backend == "nccl" and not best.instead.start_mps
    last = best.instead.instead
    assert last.backend == "gloo" and last.device == "cuda" and last.instead is None
    assert "NCCL 2.30.7 did not start on it" in last.note
    assert choose(4, "cuda", Machine(4, NEW)).instead is None


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"device .gpu. does not exist\. Choose cpu, cuda or auto\."):
        choose(2, "gpu", Machine())
    with pytest.raises(WorldSizeError, match=r"no GPU that torch can use\. Use `--device cpu`\."):
        choose(2, "cuda", Machine())


CONTROL = """#!/bin/sh
# plays nvidia-cuda-mps-control: a daemon that notes what it is told
echo "$CUDA_MPS_PIPE_DIRECTORY $*" >> {log}
if [ "$1" = -d ]; then exit {code}; fi
read order
echo "$order" >> {log}
[ {answers} = yes ] && echo "" || {{ echo "Cannot find MPS control daemon process"; exit 1; }}
"""


@pytest.fixture
def mps(tmp_path, monkeypatch):
    """Put a program in the place of nvidia-cuda-mps-control; returns its log."""

    def put(code=0, answers="yes"):
        control = tmp_path / "nvidia-cuda-mps-control"
        control.write_text(CONTROL.format(log=tmp_path / "log", code=code, answers=answers))
        control.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path / "log"

    return put


def test_a_daemon_is_started_for_a_world_and_ended_with_it(mps):
    log, daemon = mps(), MpsDaemon()
    assert daemon.start() == ""
    folder = daemon.environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert Path(folder).is_dir()
    daemon.stop()
    daemon.stop()
    lines = log.read_text().splitlines()
    assert lines[0] == f"{folder} -d" and lines[-1] == "quit -t 1" and lines[-2] == f"{folder} "
    assert not Path(folder).exists() and daemon.environment == {}


@pytest.mark.parametrize(("code", "answers"), [(1, "yes"), (0, "no")])
def test_a_daemon_that_does_not_start_is_said_and_leaves_nothing(mps, code, answers):
    log, daemon = mps(code, answers), MpsDaemon()
    assert daemon.start() in ("nvidia-cuda-mps-control -d did not start", "CUDA MPS does not answer")
    assert daemon.environment == {} and not Path(log.read_text().split()[0]).exists()


def test_it_ends_also_when_the_notebook_is_killed(mps):
    log = mps()
    code = (
        "import os, signal; from rankcell.engine.devices import MpsDaemon; d = MpsDaemon(); assert d.start() == ''; "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    until = time.monotonic() + 30
    while "quit" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    assert "quit -t 1" in log.read_text()


@pytest.mark.parametrize(("answers", "running"), [("yes", True), ("no", False)])
def test_whether_a_daemon_runs(mps, answers, running):
    mps(answers=answers)
    assert devices.look_for_mps() == Mps(installed=True, running=running)


def test_the_version_of_nccl_is_that_of_the_loaded_library(monkeypatch):
    """torch says with which one it was built; the function runs without its module, as the doctor's process has it."""

    class Loaded:
        def ncclGetVersion(self, said):
            said._obj.value = 23102
            return 0

    scope = {}
    exec(inspect.getsource(devices.nccl_version), scope)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: Loaded())
    assert scope["nccl_version"]() == (2, 31, 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert scope["nccl_version"]() == ()
