"""`rankcell doctor`: each finding on a machine that has just this, and the command on the one that runs the tests."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from rankcell import doctor
from rankcell.command import main
from rankcell.doctor import Facts, Folder, Torch
from rankcell.engine.devices import Mps

GOOD = Facts(
    host="good",
    cores=8,
    cores_of_machine=8,
    memory=32 << 30,
    memory_of_machine=64 << 30,
    python="3.12.3",
    torch=Torch(version="2.13.0", cuda="13.0"),
)
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


# what differs from a good machine, the kind of finding, words in it
CASES = {
    "two of many cores in Slurm": (
        {
            "cores": 2,
            "cores_of_machine": 64,
            "environment": {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"},
        },
        "note",
        ["2 of 64 cores", "--cpus-per-task=8"],
    ),
    "half of the cores": ({"cores": 4}, "note", ["may use 4 of the machine's 8 cores"]),
    "little memory": ({"memory": 1 << 30}, "note", ["1.0 GiB", "of 64 GiB", "--mem=8G"]),
    "no room for ranks": ({"memory": 100 << 20}, "problem", ["room for 2 ranks", "--mem"]),
    "few files for ranks": ({"files": 224}, "problem", ["room for 3 ranks", "ulimit -n"]),
    "few files": ({"files": 1000}, "note", ["1000 files", "room for 100 ranks"]),
    "few processes": ({"processes": 100}, "note", ["100 processes", "ulimit -u"]),
    "a small /dev/shm": (
        {"shared": Folder("/dev/shm", "tmpfs", free=64 << 20)},
        "note",
        ["64 MiB", "--shm-size"],
    ),
    "no room in /dev/shm": (
        {"shared": Folder("/dev/shm", "tmpfs", free=1 << 10)},
        "note",
        ["1 KiB", "/tmp instead"],
    ),
    "a read-only /dev/shm": (
        {"shared": Folder("/dev/shm", "tmpfs", writable=False)},
        "note",
        ["cannot be written", "DataLoader"],
    ),
    "loopback down": (
        {"loopback": "the loopback interface lo is down"},
        "problem",
        ["cannot reach each other", "lo"],
    ),
    "another interface": ({"environment": {"GLOO_SOCKET_IFNAME": "ib0"}}, "note", ["'ib0'"]),
    "a name without an address": ({"address": ""}, "note", ["'good', has no address", "/etc/hosts"]),
    "a limited address space": ({"address_space": 8 << 30}, "note", ["8.0 GiB", "ulimit -v unlimited"]),
    "... with a GPU": (
        {"address_space": 8 << 30, "driver": "H100"},
        "problem",
        ["CUDA reserves", "ulimit -v"],
    ),
    "little locked memory": (
        {"locked": 64 << 10, "torch": H100, "environment": {"SLURM_JOB_ID": "7"}},
        "note",
        ["64 KiB", "InfiniBand"],
    ),
    "TMPDIR cannot be written": (
        {"temporary": Folder("/scratch", writable=False)},
        "problem",
        ["/scratch", "TMPDIR"],
    ),
    "TMPDIR full": ({"temporary": Folder("/tmp", free=1 << 20)}, "problem", ["1 MiB free", "another folder"]),
    "TMPDIR on nfs": ({"temporary": Folder("/n/tmp", "nfs4")}, "note", ["nfs4", "starts slowly"]),
    "a long TMPDIR": ({"temporary": Folder("/" + "a" * 80)}, "note", ["81 letters", "AF_UNIX"]),
    "home on lustre": ({"home": Folder("/home/me", "lustre")}, "note", ["lustre", "local disk"]),
    "home read-only": (
        {"home": Folder("/home/me", "nfs", writable=False)},
        "note",
        ["/home/me", "IPYTHONDIR"],
    ),
    "here read-only": ({"here": Folder("/course", writable=False)}, "note", ["/course", "copy the course"]),
    "Docker": ({"container": "Docker"}, "note", ["container (Docker)"]),
    "WSL2": ({"container": "WSL2"}, "note", ["WSL2"]),
    "macOS": ({"linux": False}, "note", ["not Linux"]),
    "Slurm": (
        {"environment": {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}},
        "works",
        ["job 7 with 2 nodes", "doctor --nodes"],
    ),
    "no torch": ({"torch": Torch(problem="`import torch` fails")}, "problem", ["fails"]),
    "a slow torch": (
        {"torch": Torch(version="2.13.0", late=True)},
        "note",
        ["still being imported after 4 s"],
    ),
    "a torch of the future": (
        {"torch": Torch(version="2.17.0")},
        "note",
        ["2.17.0 is newer", "2.11 to 2.15"],
    ),
    "an old torch": ({"torch": Torch(version="2.4.0")}, "note", ["2.4.0 is older"]),
    "no forks": (
        {"torch": Torch(version="2.13.0", forks=False), "environment": {"LD_PRELOAD": "libx.so"}},
        "problem",
        ["a fork of a process", "libx.so"],
    ),
    "threads": ({"torch": Torch(version="2.13.0", threads=3)}, "note", ["2 threads", "it computes"]),
    "GPUs hidden": ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, "note", ["hides every GPU", "unset"]),
    "torch for the CPU beside a GPU": (
        {"driver": "H100, 580", "torch": Torch(version="2.13.0+cpu")},
        "problem",
        ["H100, 580", "built for the CPU"],
    ),
    "an old driver": ({"driver": "V100, 470"}, "problem", ["torch (CUDA 13.0) sees none", "driver older"]),
    "one GPU and an old NCCL": (
        {"torch": H100},
        "works",
        ["%%ranks 4 --device cuda", "gloo on CUDA tensors", "2.28.9"],
    ),
    "one GPU, a new NCCL, no MPS": (
        {"torch": replace(H100, nccl=(2, 30, 7))},
        "note",
        ["CUDA MPS lets ranks", "nvidia-cuda-mps-control -d"],
    ),
    "one GPU and MPS": (
        {"torch": replace(H100, nccl=(2, 30, 7)), "mps": Mps(installed=True, running=True)},
        "note",
        ["CUDA MPS runs already"],
    ),
    "four GPUs": ({"torch": replace(H100, gpus=("H100",) * 4)}, "works", ["4 x H100", "a GPU for each"]),
    "fewer than visible": (
        {"torch": H100, "environment": {"CUDA_VISIBLE_DEVICES": "0,1"}},
        "note",
        ["'0,1', and torch sees 1"],
    ),
    "blocking launches": (
        {"torch": H100, "environment": {"CUDA_LAUNCH_BLOCKING": "1"}},
        "note",
        ["nothing overlaps"],
    ),
    "a GPU that fails": (
        {"torch": replace(H100, gpu_problem="no kernel image")},
        "problem",
        ["no kernel image"],
    ),
    "links": (
        {"torch": replace(H100, gpus=("H100",) * 3), "links": TOPOLOGY},
        "note",
        ["NV18, 18 NVLinks together", "SYS, PCIe and the link between NUMA nodes"],
    ),
    "no peer access": (
        {"torch": replace(H100, gpus=("T4",) * 2, p2p=False)},
        "note",
        ["through the host's memory"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_finding(name):
    changed, kind, words = CASES[name]
    facts = replace(GOOD, **changed)
    assert any(all(word in text for word in words) for text in said(facts, kind)), said(facts)
    # it is about what differs: a good machine hears nothing of the kind
    assert not any(all(word in text for word in words) for text in said(GOOD))
    assert max(map(len, doctor.report(facts).splitlines())) <= 120


def test_problems_come_first():
    kinds = [f.kind for f in doctor.findings(replace(GOOD, cores=2, loopback="down"))]
    assert kinds == sorted(kinds, key=["problem", "note", "works"].index) and kinds[0] == "problem"


def test_links_of_network_cards_are_not_links_of_gpus():
    text = " ".join(said(replace(GOOD, torch=replace(H100, gpus=("H100",) * 3), links=TOPOLOGY)))
    assert "PIX" not in text


MOUNTS = """/dev/sda / ext4 rw 0 0
fs:/home /home nfs4 rw 0 0
tmpfs /home/me/tmp tmpfs rw 0 0
x /my\\040data lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me", "nfs4"),
        ("/home/me/tmp/x", "tmpfs"),
        ("/homes", "ext4"),
        ("/my data/x", "lustre"),
    ],
)
def test_the_file_system_of_a_path(path, kind):
    assert doctor.kind_of_mount(path, MOUNTS) == kind


def test_what_torch_said():
    torch = doctor.heard('noise\n{"version": "2.13.0", "threads": 1}\n', "", late=False)
    assert torch.version == "2.13.0" and not torch.problem
    silent = doctor.heard("", "Traceback\nImportError: libcudart.so.13", late=False)
    assert silent.problem == "`import torch` fails in this environment: ImportError: libcudart.so.13"
    assert doctor.heard("", "", late=True).late
    stuck = doctor.heard('{"version": "2.13.0", "gpus": ["H100"], "nccl": [2, 28, 9]}\n', "", late=True)
    assert stuck.gpus == ("H100",) and "did not answer" in stuck.gpu_problem


def test_nodes_that_differ_are_named():
    assert doctor.compare([replace(GOOD, host="a"), replace(GOOD, host="b")]) == []
    odd = replace(GOOD, host="b", torch=replace(H100, version="2.11.0"))
    text = " ".join(f.text for f in doctor.compare([replace(GOOD, host="a"), odd]))
    assert "torch is not the same on all nodes: 2.13.0 on a, 2.11.0 on b." in text
    assert "the number of GPUs is not the same on all nodes: 0 on a, 1 on b." in text


def test_facts_travel_between_nodes():
    facts = replace(GOOD, torch=H100, mps=Mps(True, True), shared=Folder("/dev/shm", "tmpfs", False, 3))
    assert doctor.of_json(json.dumps(asdict(facts))) == facts


def test_nodes_need_an_allocation(monkeypatch, capsys):
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--nodes"]) == 2
    assert "salloc --nodes=2 rankcell doctor --nodes" in capsys.readouterr().out


def test_all_nodes_are_asked_by_srun(monkeypatch, capsys, tmp_path):
    """Of an srun that answers for two nodes, one of which has another torch."""
    answers = [replace(GOOD, host="n1"), replace(GOOD, host="n2", torch=Torch(version="2.11.0"))]
    lines = "\n".join(json.dumps(asdict(facts)) for facts in answers)
    (tmp_path / "srun").write_text(f"#!/bin/sh\ncat <<'END'\nslurm says hello\n{lines}\nEND\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert main(["doctor", "--nodes"]) == 1
    out = capsys.readouterr().out
    assert out.index("doctor on n1") < out.index("doctor on n2") < out.index("all 3 nodes")
    assert "2.13.0 on n1, 2.11.0 on n2" in out and "2 of 3 nodes answered" in out


def test_on_this_machine():
    """As a user runs it, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "rankcell.command", "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode in (0, 1) and run.stderr == ""
    assert run.stdout.startswith("rankcell doctor on ") and "torch 2." in run.stdout
