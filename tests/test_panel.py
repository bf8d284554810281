"""The planner's panel of the static site computes what Python's planner computes: its script runs in node here."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "site"))
import panel
from rankcell.planner import Job, Layout, chips, memory, search, seconds, shapes

SITE, NODE = Path(__file__).parent.parent / "site", shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node here")
JOBS = [
    dict(zip(("model", "gpu", "gpus", "network", "seq", "batch"), said, strict=True))
    for said in (
        ("llama3-8b", "H100-80", 64, 50e9, 8192, 512),
        ("mixtral-8x7b", "H100-80", 64, 2e9, 4096, 512),
        ("deepseek-v3", "GB200", 512, 50e9, 4096, 4096),
        ("llama3.2-1b", "MI300X", 8, 50e9, 32768, 64),
    )
]
ANSWER = """
    const planner = require(process.argv[1] + "/_static/planner.js");
    const {tables, asked} = JSON.parse(require("fs").readFileSync(0));
    console.log(JSON.stringify(asked.map(([said, layouts]) => {
        const job = planner.job(tables, said);
        const of = layouts.map((l) => ({stages: [...Array(l.pp).keys()].map((s) => planner.memory(job, l, s)),
            fullest: planner.fullest(job, l), step: planner.step(job, l), reason: planner.reason(job, l),
            mfu: planner.mfu(job, planner.rate(job, l))}));
        return {of, limit: planner.limit(job), found: planner.best(job)};
    })));
"""


def job_of(said):
    chip = replace(chips.CHIPS[said["gpu"]], network=said["network"])
    model = shapes.MODELS[said["model"]]
    return Job(model, chip, said["gpus"], said["seq"], said["batch"], "bf16", panel.STACK)


def layouts_of(said):
    """A dozen layouts of a job, every degree above 1 in some, all its GPUs used."""
    for k, (tp, pp, cp, micro) in enumerate(product((1, 4), (1, 2), (1, 2), (1, 2))):
        dp, left = divmod(said["gpus"], tp * pp * cp)
        ep = 8 if shapes.MODELS[said["model"]].experts and dp >= 8 else 1
        chunks, zero = (1, k % 4) if pp == 1 else (1 + k % 2, k % 2)
        more = {"micro_batch": micro, "chunks": chunks, "zero": zero, "recompute": 2 * (k % 3 == 1)}
        if not left:
            yield {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, **more}


@pytest.fixture(scope="module")
def answers():
    """For each job: its layouts, what the script says of each, and its five best layouts."""
    asked = [(said, list(layouts_of(said))) for said in JOBS]
    told = json.dumps({"tables": panel.tables(), "asked": asked})
    run = {"input": told, "stdout": subprocess.PIPE, "text": True, "timeout": 200, "check": True}
    answers = json.loads(subprocess.run([NODE, "-e", ANSWER, SITE], **run).stdout)
    return [(job_of(said), layouts, answer) for (said, layouts), answer in zip(asked, answers, strict=True)]


def test_memory_seconds_and_rejections_are_those_of_python(answers):
    verdicts = set()
    for job, layouts, answer in answers:
        assert answer["limit"] == pytest.approx(memory.limit(job), rel=1e-12)
        for fields, theirs in zip(layouts, answer["of"], strict=True):
            layout = Layout(**fields)
            for stage, parts in enumerate(theirs["stages"]):
                ours = memory.on_stage(job, layout, stage)
                weighed = {n: float(getattr(ours, "weights" if n == "parameters" else n)) for n in parts}
                assert parts == pytest.approx(weighed, rel=1e-9), fields
            assert theirs["fullest"] == pytest.approx(float(memory.fullest(job, layout)), rel=1e-9)
            step = seconds.step(job, layout)
            assert theirs["step"] == pytest.approx({k: float(v) for k, v in step._asdict().items()}, rel=1e-9)
            flops = job.batch * job.seq / job.n_gpus / step.total * job.shape.flops_per_token(job.seq)
            assert theirs["mfu"] == pytest.approx(float(flops) / job.chip.peak("bf16"), rel=1e-9)
            found = search.search(job, Layout(*(np.array([value]) for value in vars(layout).values())))
            assert bool(theirs["reason"]) == (found.verdict[0] >= 0), (fields, theirs["reason"])
            verdicts.add(int(found.verdict[0]))
    assert len(verdicts) >= 3


def test_the_five_best_are_those_of_python(answers):
    for job, _, answer in answers:
        found = search.search(job)
        ours, theirs = found.best(), answer["found"]["best"]
        assert answer["found"]["possible"] == np.sum(found.verdict < 0)
        assert [c["rate"] for c in theirs] == pytest.approx([rate for rate, _ in ours], rel=1e-9)
        for (_, layout), d in zip(ours, theirs, strict=True):
            assert {k: int(getattr(layout, k)) for k in d["layout"]} == d["layout"]
