"""On which device and over which backend a world talks: a table of machines, none of which needs to be here."""

import pytest

from rankcell.engine import devices
from rankcell.engine.devices import Machine, choose
from rankcell.errors import WorldSizeError

NEW, OLD = (2, 30, 7), (2, 28, 9)

# ranks, --device, machine: device, backend, a part of the note, a part of how to get better
# fmt: off
TABLE = [
    (4, "cpu", Machine(4, NEW), "cpu", "gloo", "as asked", ""),
    (4, "auto", Machine(), "cpu", "gloo", "no GPU here", ""),
    (4, "auto", Machine(4, OLD), "cuda", "nccl", "one of 4 GPUs for each rank", ""),
    (4, "auto", Machine(1, NEW), "cpu", "gloo", "1 GPU is too few for 4 ranks", "`--device cuda` lets the ranks share"),
    (4, "auto", Machine(2, NEW), "cpu", "gloo", "2 GPUs are too few for 4 ranks", "`--device cuda`"),
    (4, "auto", Machine(4), "cpu", "gloo", "this torch has no nccl", ""),
    (4, "cuda", Machine(8, OLD), "cuda", "nccl", "one of 8 GPUs for each rank", ""),
    (4, "cuda", Machine(1, NEW), "cuda", "nccl", "nccl 2.30.7, sharing 1 GPU in turns", "nvidia-cuda-mps-control -d"),
    (4, "cuda", Machine(1, NEW, True), "cuda", "nccl", "nccl 2.30.7, sharing 1 GPU side by side (CUDA MPS)", ""),
    (4, "cuda", Machine(1, OLD), "cuda", "gloo", "NCCL 2.28.9 does not let ranks share a GPU", "NCCL 2.30 or newer"),
    (4, "cuda", Machine(4), "cuda", "gloo", "this torch has no nccl", "NCCL 2.30 or newer"),
    (8, "cuda", Machine(2, NEW), "cuda", "nccl", "sharing 2 GPUs in turns", "nvidia-cuda-mps-control"),
]
# fmt: on


@pytest.mark.parametrize(("ranks", "asked", "machine", "device", "backend", "note", "better"), TABLE)
def test_what_is_chosen_and_why(ranks, asked, machine, device, backend, note, better):
    choice = choose(ranks, asked, machine)
    assert (choice.device, choice.backend) == (device, backend)
    assert note in choice.note and (better in choice.better if better else True)


def test_ranks_that_share_a_gpu_have_their_part_of_it():
    alone, four, five = (choose(n, "cuda", Machine(g, NEW)) for n, g in ((4, 4), (4, 1), (5, 2)))
    assert alone.shared == 1 and alone.memory_fraction is None and alone.environment == {}
    assert four.shared == 4 and four.memory_fraction == 0.9 / 4
    assert five.shared == 3 and five.memory_fraction == 0.9 / 3
    several = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
    assert four.environment == several
    assert choose(64, "cuda", Machine(1, NEW)).environment["NCCL_MAX_CTAS"] == "1"


def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(WorldSizeError, match=r"no GPU that torch can use\. Use `--device cpu`\."):
        choose(2, "cuda", Machine())


def test_a_daemon_of_cuda_mps_is_asked(tmp_path, monkeypatch):
    control = tmp_path / "nvidia-cuda-mps-control"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for code, runs in ((0, True), (1, False)):
        control.write_text(f"#!/bin/sh\nread order\nexit {code}\n")
        control.chmod(0o755)
        assert devices.look(1).mps is runs
    assert not devices.look(1, mps=False).mps
