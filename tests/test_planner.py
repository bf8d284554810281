"""The planner against numbers counted by hand, against the course's other modules, and against published runs."""

import dataclasses
import json
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import fit_planner
from planner_rows import RowError, chip_called, format_called, model_called, parse, predict
from rankcell import costs, schedules
from rankcell.planner import chips, communication, memory, seconds, shapes, stacks
from rankcell.planner.layout import FULL, GPIPE, NONE, ONE_F_ONE_B, SELECTIVE, ZB_2P, ZERO_BUBBLE, Job, Layout
from rankcell.planner.search import REASONS, layouts, search

approx = pytest.approx
ROWS = fit_planner.rows_of()
STORED = json.loads(fit_planner.FILE.read_text("utf-8"))


def job(model="llama3-8b", gpu="H100", n_gpus=64, seq=8192, batch=512, **stack):
    profile = dataclasses.replace(stacks.STACKS["megatron-core"], **stack)
    return Job(shapes.find(model), chips.find(gpu), n_gpus, seq, batch, "bf16", profile)


# Data sheets: TFLOP/s without sparsity in bf16, fp8 and fp4 (0: it has none), TB/s of the memory; GB/s of a sum in a
# node and of a port, GPUs in a domain, GiB (GB where negative), and per mille of the peak that the best product reaches
SHEETS = {
    "V100-16": (125, 0, 0, 0.9, 124, 1.5625, 8, 16, 870), "V100-32": (125, 0, 0, 0.9, 124, 1.5625, 8, 32, 780),
    "A100-40": (312, 0, 0, 1.555, 235, 25, 8, 40, 870), "A100-80": (312, 0, 0, 2.04, 235, 25, 8, 80, 870),
    "H100-80": (989, 1979, 0, 3.35, 480, 50, 8, 80, 800), "H100-96": (989, 1979, 0, 2.4, 480, 50, 8, 96, 800),
    "H100-94": (989, 1979, 0, 3.9, 480, 50, 8, 94, 800), "H200": (989, 1979, 0, 4.8, 482, 50, 8, -141, 800),
    "B200": (2250, 4500, 9000, 8, 846, 50, 8, 180, 776), "B300": (2250, 4500, 13500, 8, 846, 100, 8, 270, 776),
    "GB200": (2450, 4900, 9800, 8, 846, 50, 72, 186, 744), "GB300": (2450, 4900, 14700, 8, 846, 100, 72, 277, 744),
    "MI300X": (1307, 2614, 0, 5.3, 350, 50, 8, -192, 540), "MI325X": (1307, 2614, 0, 6, 350, 50, 8, -256, 540),
    "MI350X": (2300, 4600, 9200, 8, 400, 50, 8, -288, 600), "MI355X": (2500, 5000, 10000, 8, 400, 50, 8, -288, 600),
}  # fmt: skip


def test_every_gpu_is_that_of_its_data_sheet():
    for name, chip in chips.CHIPS.items():
        peaks = [chip.peaks.get(kind, 0) / 1e12 for kind in ("bf16", "fp8", "fp4")]
        *rates, size, best = SHEETS[name]
        found = (*peaks, chip.hbm / 1e12, chip.bus / 1e9, chip.network / 1e9, chip.node, 1000 * chip.matmul)
        assert found == approx((*rates, best)), name
        assert chip.memory_bytes == (size * 2**30 if size > 0 else -size * 1e9), name
        rings = {"H": 370, "G": 740, "B": 740}  # GB/s where the switch can sum; else as a sum
        assert chip.ring / 1e9 == approx(rings.get(name[0], chip.bus / 1e9)), name
        limits = {
            "H100-96": 0.73,
            "B200": approx(10 / 11, abs=0.005),
            "GB200": approx(12 / 14, abs=0.005),
        }  # W
        assert (chip.alpha, chip.alpha_across, chip.sustained) == (5e-6, 15e-6, limits.get(name, 1))
    h100, limited = (
        chips.CHIPS["H100-80"],
        chips.CHIPS["H100-96"],
    )  # the next wider format where there is none
    assert [h100.peak(f) / 1e12 for f in ("fp4", "fp8", "bf16", "tf32")] == [1979, 1979, 989, 494.5]
    assert limited.peak("fp8") == approx(0.73 * 1979e12) and communication.PORT == 0.95


# Billions of parameters, key heads and width of a head
KNOWN = {
    "llama2-7b": (6.74, 32), "llama2-13b": (13.02, 40), "llama2-70b": (69.0, 8), "llama3-8b": (8.03, 8),
    "llama3-70b": (70.6, 8), "llama3-405b": (405.8, 8), "llama3.2-1b": (1.24, 8, 64), "llama3.2-3b": (3.21, 8),
    "mistral-7b": (7.24, 8), "qwen2.5-7b": (7.62, 4), "qwen2.5-32b": (32.8, 8), "qwen2.5-72b": (72.7, 8),
    "qwen3-8b": (8.19, 8), "qwen3-32b": (32.8, 8), "nemotron4-15b": (15.6, 8), "nemotron4-340b": (341.0, 8, 192),
    "gpt3-1.3b": (1.31, 16), "gpt3-5b": (5.04, 32), "gpt3-7b": (6.65, 32), "gpt3-13b": (12.85, 40),
    "gpt3-20b": (20.2, 48), "gpt3-175b": (174.6, 96), "bloom-176b": (176.2, 112), "mixtral-8x7b": (46.7, 8),
    "mixtral-8x22b": (140.6, 8), "qwen3-30b-a3b": (30.5, 4), "qwen3-235b-a22b": (235.1, 4),
    "deepseek-v2-lite": (15.7, 16, 160), "deepseek-v3": (671.0, 128, 160), "gpt-oss-20b": (20.9, 8, 64),
    "gpt-oss-120b": (116.8, 8, 64), "llama4-scout": (107.8, 8), "llama4-maverick": (400.7, 8),
    "deepseek-v2": (236.0, 128, 160), "kimi-k2": (1026.0, 64, 160),
}  # fmt: skip


def test_every_model_has_its_published_size():
    assert KNOWN.keys() == shapes.MODELS.keys()
    for name, (size, keys, *width) in KNOWN.items():
        shape, width = shapes.find(name), (width or [128])[0]
        assert shape.name == name and shape.params / 1e9 == approx(size, rel=0.012), name
        assert (shape.width, shape.kv_width) == (width * shape.heads, width * keys), name
    active = {"mixtral-8x7b": 12.8, "mixtral-8x22b": 39, "qwen3-30b-a3b": 3.04, "qwen3-235b-a22b": 21.6,
              "deepseek-v2-lite": 2.45, "deepseek-v3": 36.6, "gpt-oss-20b": 3.6, "gpt-oss-120b": 5.1,
              "llama4-scout": 16.1, "llama4-maverick": 16.1, "deepseek-v2": 20.9, "kimi-k2": 31.7}  # fmt: skip
    found = {name: shape.active_params / 1e9 for name, shape in shapes.MODELS.items() if shape.experts}
    assert found == {name: approx(size, rel=0.02) for name, size in active.items()}


def test_names_however_they_are_spelt():
    for find, names in (
        (model_called, "Llama-3.1 70B=llama3-70b; Llama-3.3-70B-Instruct=llama3-70b; llama31_8b=llama3-8b; "
         "llama3.1_405b=llama3-405b; Qwen3_30B_a3B=qwen3-30b-a3b; DeepSeekV3=deepseek-v3; Mixtral 8x7B=mixtral-8x7b; "
         "gpt3_175b=gpt3-175b; llama2_70b_lora=llama2-70b"),
        (chip_called, "h100 SXM 80GB=H100-80; A100-SXM4-40GB=A100-40; NVIDIA A100=A100-80; v100=V100-32; "
         "H100-96GB-HBM2e-500W=H100-96; B200-SXM-180GB=B200; H200-141=H200; H100-500W=H100-96; h100-nvl=H100-94"),
    ):  # fmt: skip
        for spelt, name in (pair.split("=") for pair in names.split("; ")):
            assert find(spelt).name == name
    formats = ("BF16", "float16", "FP8-MX", "nvfp4", "amp_fp8", "fp32")
    assert [*map(format_called, formats)] == ["bf16", "bf16", "fp8", "fp4", "fp8", "tf32"]


# Counted by hand: 10 layers on 16 GPUs, 32 sequences of 100 tokens; heads 64 wide, keys and values 128

SMALL = shapes.Shape("small", 10, 256, 4, 2, 1024, 1000)
ATTENTION, MLP, TABLE = 256 * (2 * 256 + 2 * 128), 3 * 256 * 1024, 1000 * 256
PARAMS = 10 * (ATTENTION + MLP) + 2 * TABLE
KEPT = 8 * 256 + 2 * (256 + 2 * 128) + 2 * 256 + 6 * 1024  # norms and inputs, q k v, output, three of MLP
PORT, BUS, RING = 50e9 * 0.95, 480e9, 370e9


def small(**stack):
    """A job whose stack has plain numbers only."""
    numbers = {"weight_bytes": 2, "gradient_bytes": 4, "optimizer_bytes": 12, "logit_bytes": 6,
               "workspace": 1000, "norm_copies": 0, "floor": 0,
               "kept_whole": 0, "masks": False, "split": "even", "reduce_bytes": 4, "network": 0.5, "passes": 10,
               "attention": 0.5}  # fmt: skip
    return Job(SMALL, chips.find("h100"), 16, 100, 32, "bf16", stacks.Stack(**(numbers | stack)))


@pytest.mark.parametrize("zero", range(4))
def test_memory_of_each_stage(zero):
    """4 stages of 3 layers (10 are cut into 3, 3, 3 and 1, and the longest counts), 4 ranks each."""
    layout = Layout(pp=4, dp=4, zero=zero, micro_batch=2)
    for stage in range(4):
        params, last = 3 * (ATTENTION + MLP) + TABLE * (stage in (0, 3)), stage == 3
        gradients, optimizer = (4 if zero >= k else 1 for k in (2, 1))  # shares
        kept, logits = (
            200 * 3 * (4 - stage) * KEPT,
            1200 * 1000 * last,
        )  # 4 micro-batches in all
        # ZeRO-3 gathers all three layers of it, and adds up its shares in 4 bytes
        parts = (2 * params, 4 * params / gradients, 12 * params / optimizer, kept, logits, 1000)
        found = memory.on_stage(small(), layout, stage)
        assert found == approx(parts)
        assert (found.states, found.total) == approx((sum(parts[:3]), sum(parts)))
    assert memory.fullest(small(), layout) == max(memory.on_stage(small(), layout, s).total for s in range(4))
    assert memory.limit(small(headroom=0.1)) == 0.9 * 80 * 2**30
    few = memory.on_stage(small(gradient_bytes=2), Layout(dp=16, zero=3), 0)  # three layers at a time
    assert few[:3] == approx((2 * PARAMS * 3 / 10, 4 * PARAMS / 16, 12 * PARAMS / 16))


def test_what_a_layer_keeps_of_a_token():
    inside, alone, two = KEPT - 8 * 256, {"dp": 16, "zero": 0}, {"tp": 2, "dp": 8, "zero": 0}
    for where, stack, kept in (
        (two | {"sequence_parallel": False}, {}, inside / 2 + 8 * 256), (two, {"kept_whole": 4}, KEPT / 2 + 4 * 256),
        (alone, {"kept_whole": 4, "selective_kept": 0.5}, KEPT),  # one rank gathers nothing
        (alone | {"recompute": FULL}, {}, 2 * 256 + KEPT / 10),  # one layer at a time
        (alone | {"recompute": SELECTIVE}, {"selective_kept": 0.5}, KEPT / 2),
        (alone, {"norm_copies": 6}, KEPT + 2 * 6 * 256), (two, {"masks": True}, KEPT / 2 + 256),
    ):  # fmt: skip
        found = memory.on_stage(small(**stack), Layout(**where), 0).activations
        assert float(found) / 100 / 10 == approx(kept), (where, stack)
    narrow = memory.kept_per_token(small(), Layout(), product_bytes=1)
    assert float(narrow) == KEPT - 2 * 256 - 256 - 1024  # inputs of products take a byte
    gpt = dataclasses.replace(SMALL, kv_heads=4, gated=False)  # Korthikanti: 34 and 5 a s / h
    plain = dataclasses.replace(small(), shape=gpt, flash=False)
    assert memory.kept_per_token(plain, Layout(), masks=True) == 34 * 256 + 5 * 4 * 100


def test_sent_bytes_take_the_seconds_of_their_links():
    """Inside a node of 8 and across, on H100: 480 GB/s for sums, 370 for the rest, ports of 50 GB/s."""
    here, nbytes = small(), 2 * 100 * 256
    sent = lambda kind, of=here, **fields: communication.KINDS[kind](of, Layout(**fields))
    near = sent("tensor", tp=8, dp=2, micro_batch=8)  # forward 4 halves, backward 4, inputs 2
    wide = sent("tensor", tp=16, micro_batch=16, sequence_parallel=False)
    assert near.nbytes == 10 * 10 * 2 * 7 * nbytes
    assert sent("tensor", tp=8, dp=2, micro_batch=8, recompute=FULL).nbytes == near.nbytes * 14 / 10
    pipes = sent("pipeline", pp=2, dp=8, chunks=2, micro_batch=2)
    inside = sent("pipeline", dataclasses.replace(here, n_gpus=8), pp=2, dp=4, micro_batch=4)
    assert pipes.nbytes == 2 * 2 * 2 * 2 * nbytes
    assert sent("pipeline", dp=16).nbytes == sent("expert", dp=16).nbytes == 0
    for found, seconds_of in (
        (near, 10 * 10 * 2 * (7 * 5e-6 + 7 * nbytes / RING)),
        (wide, 8 * 10 * 2 * (15 * 15e-6 + 15 * nbytes / min(BUS, 8 * PORT))),
        (pipes, 2 * 2 * 2 * (2 * nbytes / PORT + 15e-6)),
        (inside, 2 * 2 * (4 * nbytes / RING + 5e-6)),
        (sent("context", cp=4, tp=2, dp=2, micro_batch=8), 60 * (3 * 5e-6 + 3 / 4 * 4 * 8 * 100 * 128 / 2 / RING)),
    ):  # fmt: skip
        assert float(found.seconds) == approx(seconds_of)
    shape = dataclasses.replace(SMALL, moe_layers=10, experts=16, top_k=2, expert_ffn=64)
    for one, copies in (
        (True, 1 - 1 / 4),
        (False, 2 / 2),
    ):  # in the other of two nodes are half of the experts
        of = dataclasses.replace(small(one_copy=one), shape=shape)
        token = 2 * 256 * (2 * 7 / 8 / 2 + copies)
        assert sent("expert", of, dp=16, ep=16).nbytes == approx(4 * 10 * 2 * 100 * token)
    # how many bytes a parameter, how many rings: of 2 micro-batches
    for zero, each, rings in ((0, 2 * 4, 2), (1, 2 + 4, 2), (2, 2 + 2 * 4, 3), (3, 2 * (2 * 2 + 4), 6)):
        found = sent("data", dp=16, zero=zero)
        assert found.nbytes == approx(15 / 16 * PARAMS * each)
        rate = min(8 * PORT, RING if zero else BUS) * 0.5
        assert float(found.seconds) == approx(rings * 15 * 15e-6 + found.nbytes / rate)


def test_a_layer_takes_its_operations_and_bytes():
    rate, layout, tokens = (1e12, 2e12), Layout(tp=2, dp=8, micro_batch=4, recompute=SELECTIVE), 400
    own = (ATTENTION + MLP) / 2  # read twice, 2 bytes, and a gradient of 4 bytes written
    matmul, square = 6 * own * tokens / 1e12 + 8 * own / 3.35e12, 4 * 100 * 256 * tokens / 2 / 989e12
    elementwise = 10 * KEPT / 2 * tokens / 3.35e12
    again = (matmul / 3 + square + elementwise / 3) / 4
    found = seconds.layer(small(selective_again=0.25), layout, rate)
    assert found == approx(
        (matmul, 3.5 * square, elementwise, again, 0)
    )  # half of the square, at half the rate
    faster = seconds.layer(dataclasses.replace(small(), fp8_attention=True), layout, rate)[1]
    assert faster == approx(3.5 * square * 0.74 / 1.2)
    for zero, shards in ((0, 1), (1, 8)):  # Adam's 34 bytes; the ranks of a sequence share them, too
        adam = seconds.optimizer_seconds(small(), Layout(tp=2, dp=4, cp=2, zero=zero))
        assert float(adam) == approx(34 * PARAMS / 2 / shards / 3.35e12)
    assert (
        SMALL.flops_per_token(100) == 6 * (10 * (ATTENTION + MLP) + TABLE) + 6 * 10 * 100 * 256
    )  # causal attention


def test_a_gpu_waits_for_the_host():
    """6 ms a layer, half of them forward. A third of the kernels' time is forward, a quarter if that is repeated."""
    of = small(floor=6e-3)
    experts = dataclasses.replace(SMALL, moe_layers=10, experts=8, top_k=2, expert_ffn=64)
    dropping = dataclasses.replace(small(floor=6e-3, moe_launches=1), shape=experts)
    experts = dataclasses.replace(of, shape=experts)
    for here, recompute, busy, waits in (
        (of, NONE, 4.5, 1.5), (of, NONE, 3, 2 + 1), (of, NONE, 9, 0), (of, NONE, 0, 6), (of, FULL, 4, 2 + 3),
        (of, FULL, 12, 0), (experts, NONE, 9, 3), (dropping, NONE, 4.5, 1.5),
    ):  # fmt: skip
        assert float(seconds.waiting(here, Layout(recompute=recompute), busy / 1e3)) == approx(waits / 1e3)
    layout, rate = Layout(dp=16), (1e15, 1e15)
    *kernels, launch = seconds.layer(of, layout, rate)
    assert 0 < float(sum(kernels)) < 3e-3 and float(launch) == approx(6e-3 - float(sum(kernels)))
    step = seconds.step(of, layout, rate=rate)
    assert float(step.launch) == approx(2 * 10 * float(launch))  # 2 micro-batches, 10 layers
    assert seconds.step(small(), layout, rate=rate).launch == 0


# Against the other modules of the course


def test_rings_are_those_of_costs():
    of = job(n_gpus=8, reduce_bytes=2.0)
    link = costs.Link(of.chip.alpha, 1 / of.chip.ring)
    found = communication.data(of, Layout(dp=8)).seconds  # gradients scattered, weights gathered
    assert float(found) == approx(costs.ring_all_reduce(2 * of.shape.params, 8, link))


@pytest.mark.parametrize(
    ("schedule", "make", "v"),
    [(GPIPE, schedules.gpipe, 1), (ONE_F_ONE_B, schedules.one_f_one_b, 1), (ONE_F_ONE_B, schedules.interleaved, 2),
     (ZERO_BUBBLE, schedules.zero_bubble, 1)],
)  # fmt: skip
def test_idle_time_is_that_of_the_schedule(schedule, make, v):
    p, m = 4, 8
    plan, share = make(p, m), v
    events = schedules.predict(plan, forward=1 / share, backward=2 / share)
    assert float(seconds.idle(schedule, p, 1, 1, 1, v)) == approx(schedules.length(events) - 3 * m)
    layout = Layout(pp=p, dp=16, chunks=v, schedule=schedule)
    if schedule in (GPIPE, ONE_F_ONE_B):
        held = [float(memory.in_flight(job(batch=16 * m), layout, s)) * v for s in range(p)]
        assert held == approx(schedules.peak_in_flight(plan))


def test_zb_2p_holds_twice_as_much():
    assert float(memory.in_flight(job(), Layout(pp=4, dp=1, schedule=ZB_2P), 1)) == 2 * 3 - 1


# Search


def test_every_layout_is_possible_or_has_a_reason():
    found, here = search(job()), job()
    tried = layouts(job(n_gpus=8))
    degrees = [{*tried.micro_batch.tolist()}, {*tried.pp[tried.chunks > 1].tolist()}]
    degrees += [
        {*tried.zero[tried.pp > 1].tolist()},
        {*tried.zero.tolist()},
        {*layouts(job(n_gpus=1)).zero.tolist()},
    ]
    assert degrees == [{1, 2, 4, 8}, {2, 4, 8}, {0, 1}, {0, 1, 2, 3}, {1}]  # on one GPU nothing to shard with
    assert {*layouts(job("mixtral-8x7b", n_gpus=8)).ep.tolist()} == {1, 2, 4, 8}
    possible = np.flatnonzero(found.verdict < 0)
    for index in possible[:: len(possible) // 9]:  # arrays and single layouts agree
        layout = found.layouts.at(int(index))
        alone = Layout(**{f.name: int(getattr(layout, f.name)) for f in dataclasses.fields(Layout)})
        step = seconds.step(here, alone)
        assert min(map(float, step)) >= 0 and float(step.total) == approx(sum(map(float, step)))
        assert float(found.rate[index]) == approx(512 * 8192 / 64 / float(step.total))
        assert float(found.need[index]) == approx(float(memory.fullest(here, alone)))
    best = found.best()
    assert all(b <= 1.006 * a for (a, _), (b, _) in pairwise(best))
    assert best[0][0] == approx(np.nanmax(found.rate), rel=0.006)
    assert len({(layout.tp, layout.pp) for _, layout in best}) == 5
    assert all(memory.fullest(here, layout) <= memory.limit(here) for _, layout in best)


def test_a_rejected_layout_has_its_reason():
    cases = (
        {"tp": 64}, {"tp": 16, "dp": 4}, {"pp": 16, "dp": 4, "chunks": 4}, {"pp": 8, "dp": 8, "chunks": 3},
        {"dp": 64, "ep": 16}, {"dp": 64, "micro_batch": 3}, {"pp": 8, "dp": 8, "chunks": 2, "micro_batch": 16},
        {"dp": 64, "zero": 0},
    )  # fmt: skip
    assert len(cases) == len(REASONS)
    for number, fields in enumerate(cases):
        of = Layout(*(np.array([value]) for value in dataclasses.astuple(Layout(**fields))))
        assert search(job("mixtral-8x7b" if "ep" in fields else "llama3-8b"), of).verdict[0] == number, fields


def test_planning_needs_no_torch():
    code = "import sys, rankcell.planner.search; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Rows


def row(**columns):
    return {"model": "llama3_8b", "seq": "8192", "global_batch_seqs": "128", "micro_batch": "1", "gpu": "H100-80",
            "n_gpus": "8", "tp": "2", "pp": "1", "dp": "4", "dtype": "bf16", **columns}  # fmt: skip


def test_what_predict_gives_and_blanks_are_filled_in():
    found = predict(row(pp="2", dp="2"))
    assert set(found) == {"tokens_per_s_per_gpu", "step_s", "memory_gb", "memory_gb_by_stage", "fits"}
    assert len(found["memory_gb_by_stage"]) == 2 and found["memory_gb"] == max(found["memory_gb_by_stage"])
    assert found["step_s"] * found["tokens_per_s_per_gpu"] * 8 == approx(128 * 8192)
    assert (
        predict(row(micro_batch="2"))["fits"] and not predict(row(model="llama3_70b"))["fits"]
    )  # 71 GB of 86
    other = {**row(), "n_gpus": 8, "dp": "", "tp": 2.0, "cp": None, "ep": "nan"}
    assert predict({**dict.fromkeys(ROWS[-1], ""), **row()}) == predict(row()) == predict(other)
    of, layout = parse({"model": "llama3-8b", "n_gpus": 64, "tp": 4, "pp": 2, "zero_stage": ""})
    assert (layout.dp, layout.cp, layout.zero, of.seq, of.batch) == (8, 1, 1, 2048, 16)
    columns = [c for c in ROWS[-1] if c not in ("model", "params_b")]
    for published in {r["source"]: r for r in ROWS}.values():  # no blank column raises
        for k in range(0, len(columns), 3):
            assert predict({**published, **dict.fromkeys(columns[k : k + 3], None)})["memory_gb"] > 0


@pytest.mark.parametrize(
    ("columns", "says"),
    [({"tp": "two"}, "'tp' holds 'two'"), ({"tp": "0"}, "'tp' holds 0"), ({"tp": "1.5"}, "whole number"),
     ({"gpu": "K80"}, "column 'gpu'"), ({"dtype": "int3"}, "column 'dtype'"), ({"n_gpus": "12"}, "column 'n_gpus'"),
     ({"model": "secret", "layers": ""}, "'layers', 'hidden' and 'params_b'"), ({"zero_stage": "4"}, "'zero_stage'"),
     ({"recompute": "perhaps"}, "'recompute'"), ({"seq": "-1"}, "'seq'"), ({"ffn": "wide"}, "'ffn'")],
)  # fmt: skip
def test_a_row_that_cannot_be_understood_names_the_column(columns, says):
    with pytest.raises(RowError, match=says):
        predict(row(**columns))


@pytest.mark.parametrize(
    ("columns", "found"),
    [({"source": "mbridge", "opts": "{'cuda_graph_impl': 'full_iteration', 'moe_a2a_overlap': true}"},
      {"floor": 0, "overlap_ep": 0.9}),
     ({"flags": "capacity factor 1.5"}, {"moe_launches": 1}),
     ({"opts": "{'FP8_DPA': 'True'}"}, {"fp8_attention": True}),
     ({"opts": "{'fp8_dot_product_attention': false}"}, {"fp8_attention": False}),
     ({"source": "mbridge", "opts": "{'tp_comm_overlap': 0, 'overlap_grad_reduce': 0, 'sp': 0}"},
      {"overlap_tp": 0, "overlap_dp": 0, "sequence_parallel": False}),
     ({"source": "mlperf", "opts": "{'TP_COMM_OVERLAP': 'True', 'SEQ_PARALLEL': 'True'}"},
      {"overlap_tp": 0.8, "sequence_parallel": True}),
     ({"source": "mbridge", "n_experts": 8, "opts": "{'moe_flex_dispatcher_backend': 'hybridep'}"}, {"one_copy": True}),
     ({"source": "mbridge", "n_experts": 8}, {"one_copy": False}),
     ({"opts": "{'grad_reduce_in_fp32': 1}"}, {"gradient_bytes": 4}),
     ({"notes": "arXiv; attn=unfused; sp=0"}, {"flash": False, "sequence_parallel": False}),
     ({"notes": "schedule=ZB-1p"}, {"schedule": ZERO_BUBBLE}), ({"notes": "schedule=gpipe"}, {"schedule": GPIPE}),
     ({"zero_stage": "fsdp"}, {"zero": 3}), ({"zero_stage": "zero2"}, {"zero": 2}),
     ({"zero_stage": "zero1"}, {"zero": 1}), ({"zero_stage": "zero3"}, {"zero": 3}),
     ({"zero_stage": "ddp"}, {"zero": 0}), ({"zero_stage": "3-HSDP"}, {"zero": 3}),
     ({"zero_stage": "2 (no reshard after forward)"}, {"zero": 2}), ({"source": "torchtitan"}, {"name": "torchtitan"}),
     ({"notes": "8 x H100, 500 W"}, {"chip": chips.CHIPS["H100-96"]}),
     ({"recompute": "attn"}, {"recompute": SELECTIVE}),
     ({"layers": "12", "hidden": "8192", "heads": "64", "kv_heads": "8", "ffn": "28672", "vocab": "128384",
       "params_b": "12.3711", "model": "llama3_70b cut to 12 layers"}, {"layers": 12, "gated": True, "tied": False}),
     ({"layers": "24", "hidden": "2048", "heads": "16", "kv_heads": "16", "ffn": "8192", "vocab": "50368",
       "params_b": "1.31595", "model": "MPT-1b"}, {"gated": False, "tied": True, "vocab": 50368}),
     ({"model": "x", "tp": 1, "dp": 8, "ep": 8, "layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096,
       "vocab": 32000, "n_experts": 16, "top_k": 2, "moe_ffn": 512, "shared_ffn": 512, "moe_layers": 3, "arch": "moe"},
      {"experts": 16, "top_k": 2, "moe_layers": 3, "gated": True, "expert_ffn": 512, "ep": 8})],
)  # fmt: skip
def test_what_a_row_says_of_a_run(columns, found):
    of, layout = parse(row(**columns))
    everything = vars(of.stack) | vars(of) | vars(of.shape) | {"name": of.stack.name} | vars(layout)
    everything["sequence_parallel"] = layout.sequence_parallel
    assert {key: everything[key] for key in found} == found


# Published runs. Mean tokens/s/GPU (geometric) and GB by source, as the planner says: a change of a constant or a
# formula shows here first. After a new fit write what it finds, once the errors in fitted.json are no larger.
MEANS = {
    "bloom_prequel": (85.4549, 45.2973), "dlperf_v100": (3663.34, 9.48292), "korthikanti22": (103.715, 63.4411),
    "llm_foundry": (12346.7, 42.1406), "mbridge_2": (23139.2, 148.539), "mcore_readme": (1443.9, 30.3595),
    "megatron20_tex": (3553.22, 27.9859), "megatron21_table1": (372.452, 57.0767),
    "mlm_goldens": (46994.1, 2.24005), "mlperf_train": (34086.2, 116.329),
    "nanotron_playbook": (8309.46, 12.8693), "nemo_2407": (3132.03, 55.9661), "simumax_b200": (10008.8, 49.1229),
    "zero_bubble_t4": (7732.64, 44.8919),
}  # fmt: skip


def test_published_runs_are_predicted_as_before():
    found = defaultdict(list)
    for bundle in fit_planner.bundles(ROWS):
        of, layout = bundle.job, bundle.layout
        rates = of.batch * of.seq / of.n_gpus / seconds.step(of, layout).total
        need = memory.fullest(of, layout) / 1e9 + 0 * rates
        errors = fit_planner.log_errors(bundle, fit_planner.stored())
        assert rates / bundle.rate == approx(np.exp(errors), rel=1e-6)  # the fit sees the same planner
        for published, rate, gigabytes in zip(bundle.rows, rates, need, strict=True):
            found[published["source"]].append((np.log(rate), np.log(gigabytes)))
    means = {name: tuple(np.exp(np.mean(logs, axis=0))) for name, logs in found.items()}
    assert means == {name: approx(mean, rel=1e-5) for name, mean in MEANS.items()}


def test_errors_on_published_runs_are_the_stored_ones():
    constants = fit_planner.stored()
    for name, stored in fit_planner.errors_by_source(ROWS, constants).items():
        assert stored == approx(STORED["errors"]["fitted"][name], abs=0.003)
    assert all(errors["median"] <= 0.10 for errors in fit_planner.memory_by_source(ROWS, constants).values())
    clean = [b for b in fit_planner.bundles(r for r in ROWS if fit_planner.tier(r) == "A")]
    ran = np.concatenate([memory.fullest(b.job, b.layout) <= memory.limit(b.job) for b in clean])
    assert ran.mean() >= 0.99  # runs that ran are called possible
    ours, constant = fit_planner.against_constant_mfu(
        ROWS, constants
    )  # one MFU per GPU, the best in hindsight
    assert ours <= constant / 2


@pytest.mark.slow
def test_the_constants_are_those_of_the_fit():
    """The tool finds again what is stored: every number within 3 %, or within what moves no error."""
    again = fit_planner.as_json(fit_planner.fit(ROWS))
    for part in ("efficiency", "stacks"):
        for name, numbers in again[part].items():
            assert STORED[part][name] == {
                key: value if isinstance(value, bool | str) else approx(value, rel=0.03)
                for key, value in numbers.items()
            }
    few = fit_planner.fit(r for r in ROWS if r["source"] == "megatron21_table1").stacks["nanotron"]
    default = stacks.Stack()  # without a stack's runs nothing is known that was set with them in view
    assert (few["floor"], few["network"]) == (default.floor, default.network)


def test_the_lesson_s_published_rows_are_ours():
    rows = shapes.table("published.csv")
    assert len(rows) == 22
    assert all(any(row.items() <= other.items() for other in ROWS) for row in rows)
