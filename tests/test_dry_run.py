"""A dry run of a job script: what it asks for, what each program was told, and how it ends."""

import pytest

from rankcell.cluster import scripts
from rankcell.cluster.dry_run import dry_run, read_array, read_minutes


def test_each_rank_is_told_who_it_is():
    ran = dry_run(str(scripts.by_srun("python train.py", nodes=2, ranks_per_node=2)))
    assert ran.of("RANK") == [*"0123"] and ran.of("LOCAL_RANK") == [*"0101"]
    assert set(ran.of("MASTER_ADDR")) == {"node7"} and ran.calls[0]["words"] == ["python", "train.py"]
    assert ran.files["train-4242.out"].count("a line of") == 4 and ran.ends == [0]


def test_one_torchrun_starts_on_each_node():
    ran = dry_run(str(scripts.by_torchrun("train.py", nodes=2, ranks_per_node=2, cpus_per_rank=2)))
    assert ran.of("SLURM_NODEID") == ["0", "1"] and ran.of("CPUS") == ["4", "4"]


def test_a_status_goes_through_unless_a_pipe_hides_it():
    ends = [dry_run(f"srun python a.py{more}\n", end_with=3).ends for more in ("", " | cat")]
    assert ends == [[3], [0]]


def test_a_rank_that_fails_ends_the_others_where_srun_is_told_to():
    told = ("", "--kill-on-bad-exit=0", "--kill-on-bad-exit", "-K1")
    assert [len(dry_run(f"#SBATCH -n 2\nsrun {more} python a.py", end_with=3).calls) for more in told] == [
        2,
        2,
        1,
        1,
    ]


def test_an_array_has_a_file_for_each_task():
    ran = dry_run("#SBATCH -a 1-3%2 -o out-%a -c 2\n#SBATCH -t 10\npython a.py\n#SBATCH -t 20")
    assert (ran.tasks, ran.at_once, ran.options.time) == ([1, 2, 3], "2", "10")
    assert ran.unread == ["#SBATCH -t 20"], "below the first command"
    assert ran.files["out-2"] == "a line of 2\ntrouble of 2\n" and set(ran.of("CPUS")) == {"2"}


@pytest.mark.parametrize(
    "more", ["-J train", "--job-name train", "-p main", "--gres gpu:2 --mem 4G", "--unknown way"]
)
def test_other_options_of_sbatch_do_not_hide_the_next(more):
    assert dry_run(f"#SBATCH {more}\n#SBATCH -N 2 -n 2\nsrun python a.py").of("SLURM_NODEID") == ["0", "1"]


@pytest.mark.parametrize("more", ["--export ALL", "--mpi none", "-J step --cpu-bind cores", "-l -u"])
def test_other_options_of_srun_are_not_its_command(more):
    assert len(dry_run(f"#SBATCH -n 2\nsrun {more} -n 2 python a.py").calls) == 2


def test_an_option_of_sbatch_alone_gives_a_step_one_cpu():
    assert dry_run("#SBATCH -N 2 -n 2 -c 4\nsrun python a.py").of("CPUS") == ["1", "1"]


@pytest.mark.parametrize(
    "limit, minutes", [("90", 90), ("01:30", 1.5), ("1-12", 2160), ("1:0:0", 60), (None, None)]
)
def test_limits_are_read_as_slurm_reads_them(limit, minutes):
    assert read_minutes(limit) == minutes


def test_arrays_have_steps_and_gaps():
    assert read_array("1-5:2,9%3") == ([1, 3, 5, 9], "3") and read_array(None) == ([None], "")
