"""Job scripts: what bash and sbatch read, and that each line says why it is there."""

import subprocess

import pytest

from rankcell.cluster import scripts

ALL = {
    "array": scripts.array("python sweep.py", tasks=12, at_once=2, gpus=1, environment="rankcell"),
    "alone": scripts.alone("python train.py --lr 0.1", minutes=1500),
    "srun": scripts.by_srun("python train.py", nodes=2, ranks_per_node=2, gpus_per_node=2),
    "requeue": scripts.by_srun(
        "python train.py --name 'two words'", nodes=2, ranks_per_node=4, signal_seconds=60, partition="spare"
    ),
    "torchrun": scripts.by_torchrun("train.py", nodes=2, ranks_per_node=2, cpus_per_rank=3, max_restarts=2),
    "elastic": scripts.by_torchrun("train.py", nodes=4, ranks_per_node=8, max_restarts=9, min_nodes=2),
}


@pytest.mark.parametrize("script", ALL.values(), ids=ALL)
def test_is_a_script_for_bash(script, tmp_path):
    path = script.write(tmp_path / "job.sh")
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    assert path.stat().st_mode & 0o111
    text = path.read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    directives = [k for k, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")]
    assert max(directives) < text.splitlines().index(commands[0]), "sbatch stops reading at the first command"


@pytest.mark.parametrize("script", ALL.values(), ids=ALL)
def test_every_line_is_explained(script):
    shown = script._repr_html_()
    for line in script.lines:
        assert len(line.why.split()) >= 3
        assert line.text.split("\n")[0] in repr(script)
    assert shown.count("<tr>") == len(script.lines) + 1
    assert "#SBATCH" not in " ".join(line.why for line in script.lines)


def test_no_rank_is_set_before_srun():
    """A value that is set once on the first node is the same on all ranks."""
    for script in ALL.values():
        for line in script.lines:
            if line.text.startswith("export"):
                assert "RANK" not in line.text.split("=")[0] and "SLURM_PROCID" not in line.text


def test_no_fixed_port_and_cpus_said_again():
    for name in ("srun", "requeue", "torchrun", "elastic"):
        text = str(ALL[name])
        assert "SLURM_JOB_ID % 10000" in text
        assert "srun --cpus-per-task=$SLURM_CPUS_PER_TASK" in text


def test_times_name_hours():
    assert "--time=00:15:00\n" in str(ALL["srun"])
    assert "--time=1-01:00:00\n" in str(ALL["alone"])


def test_an_environment_is_one_of_conda_or_a_folder():
    conda, folder = (str(scripts.alone("true", environment=name)) for name in ("rankcell", "./my env"))
    assert "conda.sh" in conda and "conda activate rankcell\n" in conda and "/bin/activate" not in conda
    assert "source './my env'/bin/activate\n" in folder and "conda" not in folder
    assert "activate" not in str(ALL["alone"])


def test_array_counts_from_zero():
    text = str(ALL["array"])
    assert "--array=0-11%2\n" in text and "--output=sweep-%A_%a.out\n" in text
    assert "--array=0-4\n" in str(scripts.array("true", tasks=5))


def test_torchrun_restarts_with_a_new_store():
    """Without it a restart fails in torch 2.13; without restarts it is not needed."""
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(ALL["torchrun"])
    assert "TORCH_DISABLE" not in str(scripts.by_torchrun("train.py", nodes=2, ranks_per_node=2))
    assert "--cpus-per-task=6\n" in str(ALL["torchrun"])


def test_elastic_job_outlives_a_node():
    text = str(ALL["elastic"])
    assert "#SBATCH --no-kill\n" in text and "--no-kill --wait=0" in text and "--nnodes=2:4" in text
    assert "no-kill" not in str(ALL["torchrun"])


def test_srun_runs_the_command_with_the_words_it_was_given(tmp_path):
    """The quoting survives bash twice: srun's line, and the shell inside it."""
    line = ALL["requeue"].lines[-4].text.split("bash -c ", 1)[1]
    inside = f"bash -c {line}".replace("exec python train.py", "printf %s,")
    environment = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "PATH": "/usr/bin:/bin"}
    said = subprocess.run(["bash", "-c", inside], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "--name,two words,"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: scripts.by_srun("x", nodes=0, ranks_per_node=2), "nodes must be at least 1, not 0."),
        (lambda: scripts.array("x", tasks=0), "An array needs at least 1 task, not 0."),
        (lambda: scripts.alone("x", minutes=0), "A job needs at least 1 minute, not 0."),
        (
            lambda: scripts.by_torchrun("x", nodes=2, ranks_per_node=2, min_nodes=3),
            "min_nodes=3 is more than the 2 nodes of the job.",
        ),
        (
            lambda: scripts.by_torchrun("x", nodes=2, ranks_per_node=2, min_nodes=1),
            "min_nodes needs max_restarts: a lost node is a restart of the others.",
        ),
    ],
)
def test_messages(wrong, says):
    with pytest.raises(ValueError) as error:
        wrong()
    assert str(error.value) == says


def test_says_in_which_order_torchrun_numbers_the_nodes():
    """torch sorts those who met by their address, as text: dynamic_rendezvous.py, `_NodeDesc`."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

    came = [_NodeDesc("node2", 7, 0), _NodeDesc("node10", 9, 0), _NodeDesc("node1", 8, 0)]
    assert [node.addr for node in sorted(came)] == ["node1", "node10", "node2"]
    assert "alphabetical order of their names (node10 comes before node2)" in ALL["torchrun"].lines[-1].why
