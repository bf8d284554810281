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

SITE = Path(__file__).parent.parent / "site"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node here")
PART = {"parameters": "weights"}  # what the panel calls otherwise

JOBS = [
    {"model": model, "gpu": gpu, "gpus": gpus, "network": network, "seq": seq, "batch": batch}
    for model, gpu, gpus, network, seq, batch in (
        ("llama3-8b", "H100-80", 64, 50e9, 8192, 512),
        ("llama3-70b", "A100-80", 256, 12.5e9, 4096, 1024),
        ("gpt3-175b", "B200", 128, 2e9, 2048, 512),
        ("mixtral-8x7b", "H100-80", 64, 50e9, 4096, 512),
        ("deepseek-v3", "GB200", 512, 50e9, 4096, 4096),
        ("llama3.2-1b", "MI300X", 8, 50e9, 32768, 64),
    )
]


def job_of(said):
    chip = replace(chips.CHIPS[said["gpu"]], network=said["network"])
    return Job(
        shapes.MODELS[said["model"]], chip, said["gpus"], said["seq"], said["batch"], "bf16", panel.STACK
    )


def layouts_of(said):
    """A dozen layouts of a job, every degree above 1 in some, all its GPUs used."""
    moe = shapes.MODELS[said["model"]].experts
    cases = product((1, 4), (1, 2), (1, 2), (1, 2))
    for k, (tp, pp, cp, micro) in enumerate(cases):
        dp, left = divmod(said["gpus"], tp * pp * cp)
        if not left:
            ep = 8 if moe and dp >= 8 else 1
            yield {
                **{"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, "micro_batch": micro},
                **{"chunks": 1 if pp == 1 else 1 + k % 2, "zero": k % 4 if pp == 1 else k % 2},
                "recompute": 2 * (k % 3 == 1),
            }


@pytest.fixture(scope="module")
def answers():
    """For each job: what the script says of each layout, and its five best layouts."""
    asked = [(said, list(layouts_of(said))) for said in JOBS]
    program = """
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
    told = json.dumps({"tables": panel.tables(), "asked": asked})
    done = subprocess.run(
        [NODE, "-e", program, SITE], input=told, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return list(zip(asked, json.loads(done.stdout), strict=True))


def test_memory_and_seconds_are_those_of_python(answers):
    compared = 0
    for (said, layouts), answer in answers:
        job = job_of(said)
        assert answer["limit"] == pytest.approx(memory.limit(job), rel=1e-12)
        for fields, theirs in zip(layouts, answer["of"], strict=True):
            layout = Layout(**fields)
            for stage, parts in enumerate(theirs["stages"]):
                ours = memory.on_stage(job, layout, stage)
                for name, value in parts.items():
                    assert value == pytest.approx(float(getattr(ours, PART.get(name, name))), rel=1e-9), (
                        fields,
                        name,
                    )
            assert theirs["fullest"] == pytest.approx(float(memory.fullest(job, layout)), rel=1e-9)
            step = seconds.step(job, layout)
            assert theirs["step"] == pytest.approx(
                {k: float(v) for k, v in step._asdict().items()}, rel=1e-9
            ), fields
            rate = seconds.tokens_per_second_per_gpu(job, layout, step.total)
            assert theirs["mfu"] == pytest.approx(float(seconds.mfu(job, rate)), rel=1e-9)
            compared += 1
    assert compared >= 48


def test_rejections_are_those_of_python(answers):
    kinds = set()
    for (said, layouts), answer in answers:
        job = job_of(said)
        for fields, theirs in zip(layouts, answer["of"], strict=True):
            one = Layout(*(np.array([value]) for value in vars(Layout(**fields)).values()))
            found = search.search(job, one)
            assert bool(theirs["reason"]) == bool(found.reason(0)), (
                fields,
                theirs["reason"],
                found.reason(0),
            )
            kinds.add(int(found.verdict[0]))
    assert len(kinds) >= 3


def test_the_five_best_are_those_of_python(answers):
    for (said, _), answer in answers:
        found = search.search(job_of(said))
        assert answer["found"]["possible"] == len(found.order)
        ours, theirs = found.best(), answer["found"]["best"]
        assert [c["rate"] for c in theirs] == pytest.approx([c.tokens_per_s_per_gpu for c in ours], rel=1e-9)
        for c, d in zip(ours, theirs, strict=True):
            assert {k: int(getattr(c.layout, k)) for k in d["layout"]} == d["layout"]


def test_the_panel_is_small():
    assert len(panel.script()) < 12_000
