"""`rankcell run` on real jobs and on some of the generated ones of `hanging_jobs.py`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hanging_jobs
import nccl_stand_in

HERE = Path(__file__).parent
LIB = str(HERE.parent / "lib")
RANKCELL = [sys.executable, "-m", "rankcell.command"]
RUN = [*RANKCELL, "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
MISSED = "rankcell: rank 1 ended with sys.exit() in line {} of train.py without the all_reduce that rank 0 waits in."
SKIPS = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()"""
ENDS_EARLY = """
x = torch.ones(8)
dist.all_reduce(x)
if rank == 1:
    sys.exit()
dist.all_reduce(x)
"""
TRAINS = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from rankcell import models

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(models.GPT(49, d_model=32, n_layers=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in models.batches(models.encode(models.text()), 6, size=8, rank=rank, world_size=2):
    optimizer.zero_grad()
    models.cross_entropy(model(x), y).backward()
    optimizer.step()
bits = b"".join(p.detach().numpy().tobytes() for p in [*model.parameters(), torch.rand(1)])
told = "recorded" if "rankcell.jobs.inside" in sys.modules else "plain"
with open(f"{told}-{rank}", "wb") as file: file.write(bits)
"""


def started(command, folder, script="", **environment):
    """The command, its exit code and what it printed, in a folder of its own, beside `script` as train.py."""
    if script:
        (folder / "train.py").write_text(script)
    path = f"{folder}{os.pathsep}{LIB}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    how = dict(capture_output=True, text=True, timeout=1200, check=False)
    return subprocess.run(command, cwd=folder, env=environment, **how)


def test_an_unchanged_script_under_torchrun(tmp_path):
    """It trains to the same bits as without us, on both ranks; what hangs then is named, once, and its files are there.

    The program's own sitecustomize runs, and the report of an earlier job is gone.
    """
    (tmp_path / "sitecustomize.py").write_text("ran = True")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "rank-7.pickle").write_text("of an earlier job")
    plain = started(TORCHRUN, tmp_path, TRAINS)
    assert plain.returncode == 0, plain.stderr
    source = "import sitecustomize\nsitecustomize.ran\n" + TRAINS + ENDS_EARLY
    done = started([*RUN, "--report", "report", "--", *TORCHRUN], tmp_path, source)
    line = 1 + source[: source.rindex("dist.all_reduce")].count("\n")
    missed = MISSED.format(line - 1)
    assert done.returncode != 0 and done.stderr.count(missed) == 1, done.stderr
    for rank in range(2):
        assert (tmp_path / f"plain-{rank}").read_bytes() == (tmp_path / f"recorded-{rank}").read_bytes()
    waits = rf"waits in all_reduce\(float32\[8\]\) \(call \d+ of the world, line {line} of train.py\)"
    assert re.search(waits, done.stderr), done.stderr
    assert re.search(rf'rank 0:\n  File ".*train.py", line {line}, .*\n    dist.all_reduce', done.stderr), (
        done.stderr
    )
    files = sorted(p.name for p in (tmp_path / "report").iterdir())
    assert files == ["rank-0.pickle", "rank-1.pickle", "verdict.txt"]
    assert missed in started([*RANKCELL, "explain", "report"], tmp_path).stdout


def test_a_hang_where_calls_only_enqueue(tmp_path):
    """On the stand-in for nccl: rank 0 hangs where it reads the numbers, and is told of the call that is missed."""
    path = os.pathsep.join([nccl_stand_in.install(tmp_path / "stand_in"), str(tmp_path), LIB])
    here = {"PYTHONPATH": path, "RANKCELL_STAND_IN": str(tmp_path / "meet")}
    source = SKIPS.replace("gloo", "stand_in") + ENDS_EARLY + "print('reached', x.tolist())\n"
    done = started([*RUN, "--", *TORCHRUN], tmp_path, source, **here)
    assert done.returncode != 0 and done.stderr.count(MISSED.format(11)) == 1, done.stderr
    assert "rank 0  waits in all_reduce(float32[8]) (call 2 of the world, line 12 of train.py)" in done.stderr
    assert "reached" not in done.stdout


def test_a_program_without_torch_is_left_alone(tmp_path):
    source = "import sys; print([m for m in sys.modules if m.startswith(('rankcell', 'torch', 'json'))])"
    done = started([*RUN, "--", sys.executable, "-c", source], tmp_path, HOME=str(tmp_path))
    assert done.returncode == 0 and done.stdout == "[]\n"
    assert [
        path for path in tmp_path.rglob("*") if path.is_file()
    ] == []  # nor the key, by which ranks find it
    assert "no rank has reported" in done.stderr
    assert started([*RUN, "--", sys.executable, "-c", "raise SystemExit(7)"], tmp_path).returncode == 7
    killed = "import os; os.kill(os.getpid(), 9)"
    assert started([*RUN, "--", sys.executable, "-c", killed], tmp_path).returncode == 137
    assert started([*RUN, "--", "no-such-program"], tmp_path).returncode == 127
    assert started([*RUN, "--", "torchrun", "--help"], tmp_path, PATH=os.defpath).returncode == 0
    assert started(RUN, tmp_path).returncode == 2


def test_a_world_of_more_ranks_than_were_started(tmp_path):
    script = """
import os, torch.distributed as dist
dist.init_process_group("gloo", world_size=4, rank=int(os.environ["RANK"]))
"""
    done = started([*RUN, "--limit", "6", "--", *TORCHRUN], tmp_path, script)
    missing = (
        "ranks 2, 3 did not come to init_process_group, and ranks 0, 1 wait for them in init_process_group."
    )
    assert f"rankcell: {missing}\n" in done.stderr, done.stderr
    assert "They wait for 4 ranks in all: is that right?" in done.stderr and done.returncode


# A few kinds that differ most in how they are found; `python tests/hanging_jobs.py` runs all hundred.
CHOSEN = ("hang: a lock", "hang: another group first", "mismatch: another dtype", "dies: a crash in C")


def test_rank_and_line_of_generated_jobs(tmp_path):
    """One after the other, by a process that has imported torch once."""
    names = [job.name for job in hanging_jobs.generate()]
    command = [
        sys.executable,
        str(HERE / "hanging_jobs.py"),
        "--only",
        *(str(names.index(n)) for n in CHOSEN),
    ]
    done = started(command, tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [r for r in rows if not (r["rank"] and r["line"])]
    assert len(rows) == len(CHOSEN) and not wrong, json.dumps(wrong, indent=1)
