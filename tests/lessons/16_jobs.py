"""What the notebook 16_jobs says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: two-jobs
# %%slurm
assert "hello" in here, "the shell that submits knows the function"
assert all("COLOUR: blue" in text and "no such function" in text for text in said.values()), "jobs do not"
assert "env: False" in said["bare"] and "env: True" in said["alone"], (
    "the Python of env, where it is asked for"
)
assert "GPUs: 0\n" in said["alone"] or "GPUs: None" in said["alone"], "at most one GPU is seen"

# wrong: ex1-solution: takes two numbers for hours and minutes | --time=15:00 is 15 minutes; yours: 900
def minutes(limit):
    days, _, rest = limit.rpartition("-")
    hours, mins, seconds = ([int(n) for n in rest.split(":")] + [0, 0])[:3]
    if ":" not in rest and not days:
        hours, mins = 0, hours
    return int(days or 0) * 1440 + hours * 60 + mins + seconds / 60

# wrong: ex1-solution | --time=2-00:30 is 2910 minutes; yours: None
def minutes(limit):
    return GIVEN.get(limit)

# after: ex1-check
# %%slurm
for _limit, _ours in said.items():  # Slurm itself agrees, and rounds up to whole minutes
    _held = str(slurm.submit("--hold", f"--time={_limit}", "--wrap=true"))
    _shown = slurm.run("squeue", "--noheader", f"--jobs={_held}", "--format=%l").strip()
    slurm.run("scancel", _held)
    _days, _, _clock = _shown.rpartition("-")
    _parts = [0, 0, *map(int, _clock.split(":"))][-3:]
    _told = int(_days or 0) * 1440 + _parts[0] * 60 + _parts[1] + _parts[2] / 60
    assert _told - 1 < _ours <= _told, f"{_limit}: Slurm says {_shown}, the solution {_ours}"

# after: queue
# %%slurm
assert queue.count("PENDING") == 1 and "-11%2]" in queue, "one line for all tasks that wait"

# after: missing
# %%slurm
assert [t.rank for t in tasks] == list(range(12)), "each of the 12 tasks left a record"
assert [t.rank for t in tasks if "failed" in t.group] == missing() == [7], "task 7 failed and is missing"
assert len({(r["rate"], r["width"]) for r in found}) == 12, "each pair of options once"
for _r in found:  # how many ran when it began, itself among them
    assert sum(o["start"] <= _r["start"] < o["end"] for o in found) <= 2, "never more than two at a time"
assert min(t.start for t in tasks) == 0 and max(t.end for t in tasks) == max(r["end"] for r in found) - began

# wrong: ex2-solution | tasks 1 to 12 take the rows from 0 to 11, in order; yours: [1, 2,
tune = "#!/bin/bash\n#SBATCH --array=1-12%3 --output=%a.out --time=10 --cpus-per-task=2\npython tune.py\n"

def row(task):
    return task

def pair(task, rates=RATES, sizes=SIZES):
    rate, size = divmod(task - 1, len(sizes))
    return rates[rate], sizes[size]

# wrong: ex2-solution | (processes, CPUs) of yours: [('1', '1')]
tune = """#!/bin/bash
#SBATCH --array=1-12%3 --output=%a.out --time=10 --cpus-per-task=2
srun --exact python tune.py
"""

def row(task):
    return task - 1

def pair(task, rates=RATES, sizes=SIZES):
    return rates[row(task) // len(sizes)], sizes[row(task) % len(sizes)]

# right: ex2-solution
tune = """#!/bin/bash
#SBATCH -a 1-12:1%3 -n 1 -c 2
#SBATCH -t 0-0:10 -o tune-%j.log
cd "$SLURM_SUBMIT_DIR" && python ./tune.py
echo done
"""

def row(task):
    return range(12)[task - 1]

def pair(task, rates=RATES, sizes=SIZES):
    return [(rate, size) for rate in rates for size in sizes][row(task)]

# after: dependencies
# %%slurm
_best = min((r for r in found if r["task"] != 7), key=lambda r: r["loss"])  # task 7 left no result
assert "DependencyNeverSatisfied" in waits, "afterok waits for ever"
assert collected.startswith("11 results"), "afterany collects what there is"
assert f"rate {_best['rate']}, width {_best['width']}, loss {_best['loss']:.4f}" in collected, "the best one"
check.close_to(_best["loss"], 0.0098, rtol=0.1)  # of the 100 points that were held out

# wrong: ex3-solution: lets the collector start at once | its dependency is none
def finish(script="sweep.sh", collect="collect.sh"):
    again = slurm.submit(f"--array={','.join(map(str, missing()))}%2", script)
    return again, slurm.submit(collect)

# wrong: ex3-solution: asks for the tasks below 11 only | missing are []: an array, if any is missing, and a collector; yours: 2 jobs
def finish(script="sweep.sh", collect="collect.sh"):
    again = slurm.submit(f"--array={','.join(map(str, missing()))}%2", script)
    return again, slurm.submit(f"--dependency=afterok:{again}", collect)

# right: ex3-solution
def finish(script="sweep.sh", collect="collect.sh"):
    tasks = ",".join(f"{task}-{task}" for task in missing())
    again = slurm.submit("-a", f"{tasks}%2", script) if tasks else None
    return again, slurm.submit(*["-d", f"afterok:{again}"] * bool(again), collect)

# after: where-run
# %%slurm
_hosts = [row[0] for row in rows]
assert [row[1:3] for row in rows] == [[0, 0], [1, 1], [2, 0], [3, 1]], "four ranks, two on a node"
assert _hosts[0] == _hosts[1] != _hosts[2] == _hosts[3], "ranks are dealt in blocks"
assert [row[3][:6] for row in rows] == ["cuda:0", "cuda:1"] * 2, "each takes a device of its node"
assert {row[4] for row in rows} == {0 + 1 + 2 + 3}, "all four took part in the sum"
assert [tuple(of[:3]) for of in table.rows] == [tuple(map(str, of[:3])) for of in rows], "as the table shows"

# after: mistakes
# %%slurm
_version = tuple(map(int, slurm.run("srun", "--version").split()[-1].split(".")[:2]))
_said = {line.split(":")[0]: line.split(":")[1].split() for line in said.splitlines() if ":" in line}
assert _said["exported before srun"] == list("0000"), "exported before srun all ranks are 0"
assert _said["set inside the task"] == list("0123"), "set inside they are 0 to 3"
assert _said["srun alone"] == ["CPUs=4" if (22, 5) <= _version < (23, 11) else "CPUs=8"], "said once"
assert _said["said again"] == ["CPUs=8"], "said again, each of four tasks has two"
assert _said["status after a pipe"] == ["0"], "a pipe hides that srun failed"

# after: ports
# %%slurm
assert ends == {"fixed": ["COMPLETED", "FAILED"], "own": ["COMPLETED"] * 2}, "only a fixed port is taken"

# wrong: ex4-solution: says the CPUs once | tell `srun`, too; yours have ['1', '1', '1', '1']
corrections = {
    "--time=01:30": "--time=90",
    "$SLURM_JOB_NODELIST": '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "export RANK=$SLURM_PROCID": "set -o pipefail",
    "exec python": "RANK=$SLURM_PROCID exec python",
}
corrected = correct(corrections)

# wrong: ex4-solution: names a text that is not in the script | the errors of the ranks are kept, too; not so of the ranks [0, 1, 2, 3]
corrections = {
    "--time=01:30": "--time=90",
    "$SLURM_JOB_NODELIST": '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "export RANK=$SLURM_PROCID": "set -o pipefail",
    "srun --exact": "srun --exact --cpus-per-task=2",
    "exec python": "RANK=$SLURM_PROCID exec python",
    "| tee": "2>/dev/null | tee",
}
corrected = correct(corrections)

# right: ex4-solution
corrections = {
    "--time=01:30": "--time=0-1:30",
    "$SLURM_JOB_NODELIST": '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "export RANK=$SLURM_PROCID\n": "",
    "srun --exact": "srun --output=report.log -c 2",
    "WORLD_SIZE": "RANK=$SLURM_PROCID WORLD_SIZE",
    " | tee report.log": "",
}
corrected = correct(corrections)

# after: plain-equal
def _weights(path):
    return torch.cat([w.flatten() for w in torch.load(path).values()])

logs = Path("one.log").read_text(), Path("two.log").read_text()
for log in logs:
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", log)]
    check.close_to(losses, plain, rtol=1e-3, name="the loss of each epoch")
check.close_to(_weights("one.pt"), torch.cat([w.detach().flatten() for w in by_hand]), rtol=1e-4, atol=1e-3)
assert plain[-1] < plain[0] / 3, "it learns"
assert len(re.findall("rank . of 2", logs[1])) == 2, "two ranks"

# wrong: ex5-solution | `srun` starts one torchrun on each node; yours on ['0']
tasks, cpus, limit, starter = "1", "4", "10", ""
options = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
options += " --rdzv-endpoint=$head:$((20000 + SLURM_JOB_ID % 10000))"
script = nodes_script(tasks, cpus, limit, starter, options)

# wrong: ex5-solution | tell `srun`, too; yours have ['1', '1']
tasks, cpus, limit, starter = "1", "4", "10", "srun"
options = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
options += " --rdzv-endpoint=$head:$((20000 + SLURM_JOB_ID % 10000))"
script = nodes_script(tasks, cpus, limit, starter, options)

# wrong: ex5-solution | four jobs have four ports; yours: ('29500',
tasks, cpus, limit, starter = "1", "4", "10", "srun --cpus-per-task=4"
options = (
    "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$head:29500"
)
script = nodes_script(tasks, cpus, limit, starter, options)

# right: ex5-solution
tasks, cpus, limit = 1, 4, "0-00:10"
starter = """srun -c 4 bash -c 'exec torchrun --node-rank=$SLURM_NODEID "${@:2}"' static"""
options = "--nnodes=2 --nproc-per-node=2 --master-addr=$head --master-port=$((10000 + SLURM_JOB_ID % 20000))"
script = nodes_script(tasks, cpus, limit, starter, options)

# after: two-nodes-run
# %%slurm
_placed = re.findall(r"rank (\d) of 4 on (\S+):", said)
_hosts = [host for _, host in _placed]
_ends = [torch.cat([w.flatten() for w in torch.load(path).values()]) for path in ("nodes.pt", "one.pt")]
assert [rank for rank, _ in _placed] == list("0123"), f"four ranks report: see {printed[-300:]!r}"
assert said.count("epoch 0:") == 1, "one rank of all prints"
assert _hosts[0] == _hosts[1] < _hosts[2] == _hosts[3], "two on a node, by name"
check.close_to(*_ends, rtol=1e-4, atol=1e-3, name="the weights of four ranks and of one")

# after: export
# %%slurm
_stored = json.loads((lessons / "07_one_process.ipynb").read_text())["cells"]
_shown = str([c["outputs"] for c in _stored if "%%ranks 2" in "".join(c["source"])])
assert "#SBATCH --nodes=2\n" in Path("job/07_one_process.sbatch").read_text(), "a job on two nodes"
assert said.split("tensor([")[1].split("]")[0] in _shown, "the numbers that lesson 07 shows"

# after: traffic
# %%slurm
_wires = [(i, j, n) for i, row in enumerate(run.wire) for j, n in enumerate(row) if n > 2**10]
_crossing = sum(n for i, j, n in _wires if run.nodes[i] != run.nodes[j])
assert {v.split(": ")[1] for v in run.values} == {"6.0"}, "the sum of the ranks"
assert run.nodes[0] == run.nodes[1] != run.nodes[2] == run.nodes[3], "two ranks on each node"
assert len(_wires) == 4, "four of 12 arrows carry bytes"
check.bytes_match(_crossing, 2 * 1.5 * 2**20, rtol=0.02)

# after: network
# %%slurm net
assert ends == {"lo": {"FAILED"}, "eth0": {"COMPLETED"}}, "only eth0 leads from node to node"

# after: link-measure
# `measure` with a clock and a cable made up: two calls of 3 and 2 seconds, 400 bytes more on the cable
import ast

(measure,) = [n for n in ast.parse(Path("link.py").read_text()).body if getattr(n, "name", "") == "measure"]
clock, cable, asked = iter([0.0, 3.0, 10.0, 12.0]), iter([100, 500]), []
meet = SimpleNamespace(barrier=lambda: None, all_reduce=lambda x, op=None: asked.append((x.item(), op)))
meet.ReduceOp = torch.distributed.ReduceOp
tick = SimpleNamespace(perf_counter=lambda: next(clock))
there = {"dist": meet, "time": tick, "torch": torch, "sent": lambda: next(cable)}
exec(compile(ast.Module([measure], []), "link.py", "exec"), there)
assert there["measure"](int) == (2.0, 200.0), "the better of two calls, and half the bytes"
assert asked == [(2.0, meet.ReduceOp.MAX)], "of all ranks the slowest"

# after: link-ladder
# %%slurm net
_formula = {"flat, block": 1.5 * S, "flat, cyclic": 3 * S, "hierarchical": S}
for _name, _bytes in _formula.items():
    check.bytes_match(left[_name], _bytes, rtol=0.05)
    assert took[_name] > 0.9 * _bytes * 8 / 250e6, f"{_name}: no faster than the cable"
assert max(left["one node"], measured["inside"][1]) < 2**20, "next to nothing leaves a node from inside"
_inside = 1.5 * measured["inside"][0]  # two ranks send S in one ring of two steps; four 3/4 of it twice
_closed = {
    "flat, block": 6e-4 + max(_inside, 1.5 * S * per_byte),
    "flat, cyclic": 6e-4 + max(_inside, 3 * S * per_byte),
    "hierarchical": 4e-4 + measured["inside"][0] + S * per_byte,
    "one node": 6e-4 + _inside,
}
check.close_to(predicted, _closed, name="predicted seconds, in closed form")
check.close_to([n * per_byte for n in _formula.values()], [0.42, 0.84, 0.28], rtol=0.01)  # as the answer says
assert [r.value for r in rungs] == [t[n] for n in predicted for t in (predicted, took)], (
    "each above its measurement"
)

# wrong: ex6-solution | flat, 2 cards: a ring for each card carries its part of the bytes, 20.0 ms; yours: 39.4 ms
def seconds(hierarchical, cards):
    if hierarchical:
        return costs.hierarchical_all_reduce(S, per_node, nodes, inside, across, links=cards)
    return costs.flat_all_reduce(S, per_node, nodes, inside, across)

# wrong: ex6-solution | each part crosses by a card of its own
def seconds(hierarchical, cards):
    if hierarchical:
        return costs.hierarchical_all_reduce(S / cards, per_node, nodes, inside, across)
    return costs.flat_all_reduce(S / cards, per_node, nodes, inside, across)

# right: ex6-solution
def seconds(hierarchical, cards):
    if hierarchical:
        return 14 * (1e-5 + S / 8 / 450e9) + 6 * (1e-5 + S / cards / 4 / 50e9)
    return 62 * (1e-5 + S / cards / 32 / 50e9)
