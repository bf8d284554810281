"""On which device and over which backend a world talks: a table of machines, none of which needs to be here."""

import os
from pathlib import Path

import pytest

from rankcell.engine import devices
from rankcell.engine.devices import Machine, Mps, MpsDaemon, choose
from rankcell.errors import WorldSizeError

NEW, OLD = (2, 30, 7), (2, 28, 9)
HERE, RUNS = Mps(installed=True), Mps(installed=True, running=True)

# ranks, --device, machine: device, backend, a part of the note, a part of how to get better
# fmt: off
TABLE = [
    (4, "cpu", Machine(4, NEW), "cpu", "gloo", "as asked", ""),
    (4, "auto", Machine(), "cpu", "gloo", "no GPU here", ""),
    (4, "auto", Machine(4, OLD), "cuda", "nccl", "one of 4 GPUs for each rank", ""),
    (4, "auto", Machine(1, NEW), "cpu", "gloo", "1 GPU is too few for 4 ranks", "`--device cuda` lets the ranks share"),
    (4, "auto", Machine(2, NEW), "cpu", "gloo", "2 GPUs are too few for 4 ranks", "`--device cuda`"),
    (4, "auto", Machine(4), "cpu", "gloo", "this torch has no nccl", "`--device cuda`"),
    (4, "cuda", Machine(8, OLD), "cuda", "nccl", "one of 8 GPUs for each rank", ""),
    (4, "cuda", Machine(1, OLD), "cuda", "gloo", "NCCL 2.28.9 does not let ranks share a GPU", "NCCL 2.30 or newer"),
    (4, "cuda", Machine(1), "cuda", "gloo", "this torch has no nccl", "NCCL 2.30 or newer"),
    (4, "cuda", Machine(1, NEW), "cuda", "nccl", "nccl 2.30.7, sharing 1 GPU in turns", "nvidia-cuda-mps-control -d"),
    (4, "cuda", Machine(1, NEW, HERE), "cuda", "nccl", "side by side by a CUDA MPS of this world", ""),
    (4, "cuda", Machine(1, NEW, RUNS), "cuda", "nccl", "as CUDA MPS runs", ""),
    (8, "cuda", Machine(2, NEW, HERE, nodes=2), "cuda", "nccl", "sharing 2 GPUs in turns", "nvidia-cuda-mps-control"),
    (4, "cuda", Machine(4), "cuda", "gloo", "one of 4 GPUs for each rank", ""),
]
# fmt: on


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
    several = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
    assert four.environment == several
    assert choose(64, "cuda", Machine(1, NEW)).environment["NCCL_MAX_CTAS"] == "1"


def test_what_cannot_start_has_a_replacement_or_is_refused():
    best = choose(4, "cuda", Machine(1, NEW, HERE))
    assert best.start_mps and best.instead.backend == "nccl" and not best.instead.start_mps
    last = best.instead.instead
    assert last.backend == "gloo" and last.device == "cuda" and last.instead is None
    assert "NCCL 2.30.7 did not start on it" in last.note
    assert choose(4, "cuda", Machine(4, NEW)).instead is None
    with pytest.raises(WorldSizeError, match=r"no GPU that torch can use\. Use `--device cpu`\."):
        choose(2, "cuda", Machine())


CONTROL = """#!/bin/sh
# plays nvidia-cuda-mps-control: a daemon that notes what it is told
echo "$CUDA_MPS_PIPE_DIRECTORY $*" >> {log}
if [ "$1" = -d ]; then exit {code}; fi
read order
echo "$order" >> {log}
exit {answers}
"""


@pytest.fixture
def mps(tmp_path, monkeypatch):
    """Put a program in the place of nvidia-cuda-mps-control; returns its log."""

    def put(code=0, answers=0):
        control = tmp_path / "nvidia-cuda-mps-control"
        control.write_text(CONTROL.format(log=tmp_path / "log", code=code, answers=answers))
        control.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert devices.look_for_mps() == Mps(installed=True, running=not answers)
        (tmp_path / "log").unlink()
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


def test_a_daemon_that_does_not_start_leaves_nothing(mps):
    for failing, said in (
        ((1, 0), "nvidia-cuda-mps-control -d did not start"),
        ((0, 1), "CUDA MPS does not answer"),
    ):
        log, daemon = mps(*failing), MpsDaemon()
        assert daemon.start() == said
        assert daemon.environment == {} and not Path(log.read_text().split()[0]).exists()
