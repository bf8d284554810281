"""Job scripts: what bash and sbatch read, and that each line says why it is there."""

import subprocess

import pytest

from rankcell.cluster import scripts

TRAIN = "python train.py --name 'two words'"
ALL = {
    "array": scripts.array("python sweep.py", tasks=12, at_once=2),
    "alone": scripts.alone("python train.py --lr 0.1"),
    "srun": scripts.by_srun("python train.py", nodes=2, ranks_per_node=2),
    "requeue": scripts.by_srun(TRAIN, nodes=2, ranks_per_node=4, signal_seconds=60, partition="spare"),
    "torchrun": scripts.by_torchrun("train.py", nodes=2, ranks_per_node=2, cpus_per_rank=3),
}
RENDEZVOUS = ["scontrol show hostnames", "=$((20000 + SLURM_JOB_ID % 10000))",
              "srun --cpus-per-task=$SLURM_CPUS_PER_TASK"]  # fmt: skip
HAS = {
    "array": ["--array=0-11%2\n", "--output=sweep-%A_%a.out\n", "--ntasks=1\n", "--cpus-per-task=1\n",
              "--time=00:15:00\n", "\npython sweep.py\n"],
    "alone": ["--time=00:15:00\n", "--gpus=1\n", "--output=train-%j.out\n", "\npython train.py --lr 0.1\n"],
    "srun": ["--nodes=2\n", "--ntasks-per-node=2\n", "export MASTER_ADDR=", "export MASTER_PORT",
             "--kill-on-bad-exit=1 ", "OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\n", *RENDEZVOUS],
    "requeue": ["--partition=spare\n", "--signal=USR1@60\n", "--requeue\n", "--open-mode=append\n", "--wait=30 ",
                "\nstatus=$?\n[ $status = 75 ] && scontrol requeue", "\nexit $status\n", *RENDEZVOUS],
    "torchrun": ["--cpus-per-task=6\n", "--ntasks-per-node=1\n", "OMP_NUM_THREADS=3\n",
                 "--nnodes=2 --nproc-per-node=2", "endpoint=$head:$port",
                 "--rdzv-id=$SLURM_JOB_ID", "--kill-on-bad-exit=1 ", *RENDEZVOUS],
}  # fmt: skip
LACKS = {"alone": ["activate", "srun"], "srun": ["requeue", "--wait"], "requeue": ["--kill-on"]}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_a_job_script_says_what_was_asked_for(name, tmp_path):
    script = ALL[name]
    path = script.write(tmp_path / "job.sh")
    text = path.read_text()
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0 and path.stat().st_mode & 0o111
    assert [part for part in HAS[name] if part not in text] == []
    assert [part for part in LACKS.get(name, ()) if part in text] == []
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    after = text[: text.rindex("#SBATCH")].splitlines()
    assert all(line.startswith("#") for line in after), "sbatch stops reading at the first command"
    for line in script.lines:
        assert len(line.why.split()) >= 3 and line.text.split("\n")[0] in repr(script)
        # set once, on the first node, a rank is the same on all of them
        assert not line.text.startswith("export") or "RANK" not in line.text.split("=")[0]
    assert script._repr_html_().count("<tr>") == len(script.lines) + 1


def test_an_option_left_out_leaves_its_lines_out():
    assert "source './my env'/bin/activate\n" in str(scripts.alone("true", environment="./my env"))
    assert "--array=0-4\n" in str(scripts.array("true", tasks=5))
    assert "(node10 comes before node2)" in ALL["torchrun"].lines[-1].why  # torch sorts the names as text


def test_srun_runs_the_command_with_the_words_it_was_given():
    """The quoting survives bash twice: srun's line, and the shell inside it."""
    line = ALL["requeue"].lines[-4].text.split("bash -c ", 1)[1]
    says = "printf %s, $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE"
    inside = f"bash -c {line}".replace("exec python train.py", says)
    environment = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "PATH": "/usr/bin:/bin"}
    said = subprocess.run(["bash", "-c", inside], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "3,1,8,4,--name,two words,"


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [(scripts.by_srun, {"nodes": 0, "ranks_per_node": 2}, "nodes must be at least 1, not 0."),
     (scripts.array, {"tasks": 0}, "tasks must be at least 1, not 0.")],
)  # fmt: skip
def test_what_cannot_be_is_said(make, options, says):
    with pytest.raises(ValueError) as error:
        make("x", **options)
    assert str(error.value) == says
