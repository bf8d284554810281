"""`rankcell doctor`: each finding on a machine that has just this, and the command on the one that runs the tests."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial

import pytest

from rankcell import doctor
from rankcell.command import main
from rankcell.doctor import Facts, Folder, Torch

SIZES = dict(cores=8, cores_of_machine=8, memory=32 << 30, memory_of_machine=64 << 30)
GOOD = Facts(host="good", **SIZES, python="3.12.3", torch=Torch(version="2.13.0", cuda="13.0"))
H100 = Torch(version="2.13.0", cuda="13.0", nccl=(2, 28, 9), gpus=("H100",), p2p=True)
TOPOLOGY = """
        GPU0    GPU1    GPU2    NIC0    CPU Affinity
GPU0     X      NV18    SYS     PIX     0-31
GPU1    NV18     X      SYS     SYS     0-31
GPU2    SYS     SYS      X      SYS     32-63
NIC0    PIX     SYS     SYS      X
"""


def said(facts, kind=None):
    """All sentences on `facts`, with what to do."""
    return [f"{f.text} {f.do}".strip() for f in doctor.findings(facts) if kind in (None, f.kind)]


def test_a_good_machine_has_no_problem_and_no_note():
    assert said(GOOD, "problem") == said(GOOD, "note") == []
    assert "four ranks on the CPU over gloo, on 8 cores." in said(GOOD, "works")
    assert any("no GPU" in text for text in said(GOOD))
    kinds = [f.kind for f in doctor.findings(replace(GOOD, cores=2, loopback="down"))]
    assert kinds == sorted(kinds, key=["problem", "note", "works"].index) and kinds[0] == "problem"


# what differs from a good machine, the kind of finding, words in it
T, NEW, SLURM = Torch(version="2.13.0"), replace(H100, nccl=(2, 30, 7)), {"SLURM_JOB_ID": "7"}
SHM, TMP = partial(Folder, "/dev/shm", "tmpfs"), partial(Folder, "/scratch")
# fmt: off
CASES = [
    (dict(cores=2, cores_of_machine=64, environment=SLURM), "note", "2 of 64 cores|--cpus-per-task=8"),
    (dict(memory=1 << 30), "note", "1.0 GiB|of 64 GiB|--mem=8G"),
    (dict(memory=100 << 20), "problem", "room for 2 ranks|--mem"),
    (dict(files=1000), "note", "1000 files|room for 100 ranks"),
    (dict(shared=SHM(free=64 << 20)), "note", "64 MiB|--shm-size"),
    (dict(shared=SHM(writable=False)), "note", "cannot be written|DataLoader"),
    (dict(loopback="the loopback interface lo is down"), "problem", "cannot reach each other|lo"),
    (dict(address=""), "note", "'good', has no address|/etc/hosts"),
    (dict(address_space=8 << 30), "note", "8.0 GiB|ulimit -v unlimited"),
    (dict(address_space=8 << 30, driver="H100"), "problem", "CUDA reserves|ulimit -v"),
    (dict(locked=64 << 10, torch=H100, environment=SLURM), "note", "64 KiB|InfiniBand"),
    (dict(temporary=TMP(writable=False)), "problem", "/scratch|TMPDIR"),
    (dict(temporary=TMP(free=1 << 20)), "problem", "1 MiB free|another folder"),
    (dict(temporary=Folder("/" + "a" * 80)), "note", "81 letters|AF_UNIX"),
    (dict(home=Folder("/home/me", "nfs", writable=False)), "note", "/home/me|IPYTHONDIR"),
    (dict(environment=SLURM | {"SLURM_JOB_NUM_NODES": "2"}), "works", "job 7 with 2 nodes|doctor --nodes"),
    (dict(torch=Torch(version="2.17.0")), "note", "2.17.0 is newer|2.11 to 2.15"),
    (dict(torch=replace(T, forks=False), environment={"LD_PRELOAD": "libx.so"}), "problem", "a fork of|libx.so"),
    (dict(torch=replace(T, threads=3)), "note", "2 threads|it computes"),
    (dict(environment={"CUDA_VISIBLE_DEVICES": ""}), "note", "hides every GPU|unset"),
    (dict(driver="H100, 580", torch=Torch(version="2.13.0+cpu")), "problem", "H100, 580|built for the CPU"),
    (dict(driver="V100, 470"), "problem", "torch (CUDA 13.0) sees none|driver older"),
    (dict(torch=H100), "works", "%%ranks 4 --device cuda|gloo on CUDA tensors|2.28.9"),
    (dict(torch=NEW), "note", "CUDA MPS lets ranks|nvidia-cuda-mps-control -d"),
    (dict(torch=replace(H100, gpus=("H100",) * 4)), "works", "4 x H100|a GPU for each"),
    (dict(torch=H100, environment={"CUDA_VISIBLE_DEVICES": "0,1"}), "note", "'0,1', and torch sees 1"),
    (dict(torch=replace(H100, gpu_problem="no kernel image")), "problem", "no kernel image"),
    (dict(torch=replace(H100, gpus=("H100",) * 3), links=TOPOLOGY), "note",
     "NV18, 18 NVLinks together|SYS, PCIe and the link between NUMA nodes"),
    (dict(torch=replace(H100, gpus=("T4",) * 2, p2p=False)), "note", "through the host's memory"),
]
# fmt: on


@pytest.mark.parametrize(("changed", "kind", "words"), CASES, ids=[case[2] for case in CASES])
def test_a_finding(changed, kind, words):
    facts, words = replace(GOOD, **changed), words.split("|")
    assert any(all(word in text for word in words) for text in said(facts, kind)), said(facts)
    # it is about what differs: a good machine hears nothing of the kind
    assert not any(all(word in text for word in words) for text in said(GOOD))
    assert max(map(len, doctor.report(facts).splitlines())) <= 120
    assert "PIX" not in "".join(said(facts))  # links of network cards are none of GPUs


MOUNTS = """/dev/sda / ext4 rw 0 0
fs:/home /home nfs4 rw 0 0
tmpfs /home/me/tmp tmpfs rw 0 0
x /my\\040data lustre rw 0 0
"""


def test_what_torch_said():
    torch = doctor.heard('noise\n{"version": "2.13.0", "threads": 1}\n', "", late=False)
    assert torch.version == "2.13.0" and not torch.problem
    silent = doctor.heard("", "Traceback\nImportError: libcudart.so.13", late=False)
    assert silent.problem == "`import torch` fails in this environment: ImportError: libcudart.so.13"
    assert doctor.heard("", "", late=True).late
    stuck = doctor.heard('{"version": "2.13.0", "gpus": ["H100"], "nccl": [2, 28, 9]}\n', "", late=True)
    assert stuck.gpus == ("H100",) and "did not answer" in stuck.gpu_problem


def test_all_nodes_are_asked_by_srun(monkeypatch, capsys, tmp_path):
    """Of an srun that answers for two nodes, one of which has another torch, and GPUs."""
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    monkeypatch.delenv("SLURM_NNODES", raising=False)
    assert main(["doctor", "--nodes"]) == 2
    assert "salloc --nodes=2 rankcell doctor --nodes" in capsys.readouterr().out
    assert doctor.compare([replace(GOOD, host="a"), replace(GOOD, host="b")]) == []
    answers = [replace(GOOD, host="n1"), replace(GOOD, host="n2", torch=replace(H100, version="2.11.0"))]
    lines = "\n".join(json.dumps(asdict(facts)) for facts in answers)
    (tmp_path / "srun").write_text(f"#!/bin/sh\ncat <<'END'\nslurm says hello\n{lines}\nEND\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert main(["doctor", "--nodes"]) == 1
    out = capsys.readouterr().out
    assert out.index("doctor on n1") < out.index("doctor on n2") < out.index("all 3 nodes")
    assert "torch is not the same on all nodes: 2.13.0 on n1, 2.11.0 on n2." in out
    assert "the number of GPUs is not the same on all nodes: 0 on n1, 1 on n2." in out
    assert "2 of 3 nodes answered" in out


def test_on_this_machine():
    command = [sys.executable, "-m", "rankcell.command", "doctor"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1) and run.stderr == ""
    assert run.stdout.startswith("rankcell doctor on ") and "torch 2." in run.stdout


def test_the_file_system_of_a_path():
    mounts = "\n".join(
        ("/dev/sda / ext4 rw 0 0", "fs:/home /home nfs4 rw 0 0", "x /my\\040data lustre rw 0 0")
    )
    kinds = {"/": "ext4", "/home/me": "nfs4", "/homes": "ext4", "/my data/x": "lustre"}
    assert {path: doctor.kind_of_mount(path, mounts) for path in kinds} == kinds
