"""Fits the planner's few constants to published runs, and says how far off it is on those it was not fitted on.

    python tools/fit_planner.py            fit, print the errors, write lib/rankcell/planner/fitted.json
    python tools/fit_planner.py --check    fit, and fail if the file says something else

What is fitted: one efficiency per GPU and number format (EFFICIENCY), per software stack the numbers named in
FREE, and for all stacks together those in SHARED. What is declared beside them, DECLARED, follows from how the
stack works. Constants move one at a time, up or down by a factor that shrinks, as long as the mean error falls;
every source weighs the square root of its rows. The rows are in tests/data; their column `notes` names the source
of each.

Kept apart: each of FOLDS is left out of a whole fit of its own and predicted by what the others say about its
GPU, with the profile of the nearest relative where no other source uses its stack. That keeps rows out of the fit
only: the formulas were written with all of them in view.
"""

import argparse
import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "lib"))

from planner_rows import Row, parse, text  # noqa: E402
from rankcell.planner import memory, seconds, stacks  # noqa: E402
from rankcell.planner.layout import Job, Layout  # noqa: E402

FILE = ROOT / "lib" / "rankcell" / "planner" / "fitted.json"

# Bytes per parameter: 16-bit weights, 4-byte sums of gradients (2 + 4), Adam with a copy of the weights (12).
_OLD = {"masks": True, "logit_bytes": 6, "sequence_parallel": False, "overlap_tp": 0.0, "overlap_dp": 0.0}
DECLARED: dict[str, dict[str, Any]] = {
    # sums gradients in 4 bytes, overlaps nothing, counts the head as work; network is where the fit begins
    "nanotron": {
        "ampere_attention": True, "network": 0.3, "logit_bytes": 10, "reduce_bytes": 4,
        "split": "by work", "overlap_tp": 0.0, "overlap_dp": 0.0, "headroom": 0.12,
    },
    "llm-foundry": {"ampere_attention": True, "headroom": 0.03, "logit_bytes": 6, "overlap_tp": 0.0},
    # before 2022: dropout masks, nothing overlaps, no sequence parallelism
    "megatron-2020": dict(_OLD),
    "megatron-2021": dict(_OLD),
    "megatron-deepspeed": dict(_OLD),
    "zero-bubble": {"masks": True, "logit_bytes": 6, "split": "short ends"},
    # sums gradients in 16 bits, fuses the loss
    "megatron-core": {"gradient_bytes": 2, "logit_bytes": 6},
    "megatron-mlperf": {"gradient_bytes": 2, "logit_bytes": 6},
    "megatron-plain": {"overlap_tp": 0.0, "overlap_dp": 0.0},
    "megatron-tests": {"masks": True, "logit_bytes": 6, "workspace": 0.11e9, "overlap_tp": 0.0, "overlap_dp": 0.0},
    # compiled FSDP2; selective recomputation keeps every other matrix product
    "torchtitan": {"weight_bytes": 4, "logit_bytes": 10, "selective_kept": 0.5, "selective_again": 0.5},
}  # fmt: skip
FREE: dict[str, tuple[str, ...]] = {
    "nanotron": ("passes", "attention", "network"),
    "llm-foundry": ("passes", "attention"),
    "megatron-2020": ("passes",),
    "megatron-2021": ("passes",),
    "megatron-deepspeed": ("slowdown",),
    "zero-bubble": ("passes",),
    "megatron-core": ("passes", "attention", "overlap_tp"),
    "megatron-mlperf": ("passes",),
    "megatron-plain": ("slowdown", "passes"),
}
EVERY = "every"  # has the numbers that all stacks share: while they are fitted, then each has its copy
SHARED = ("floor",)
FREE_MEMORY: dict[str, tuple[str, ...]] = {"nanotron": ("norm_copies", "kept_whole", "workspace")}
EFFICIENCY = {
    "V100": {"bf16": 0.7}, "A100": {"bf16": 0.8}, "H100": {"bf16": 0.7, "fp8": 0.59}, "B200": {"fp4": 0.4},
    "B300": {"fp4": 0.35}, "GB200": {"fp4": 0.4}, "GB300": {"fp4": 0.4}, "MI355X": {"fp8": 0.4},
}  # fmt: skip
# Not fitted: in 16 bits these reach an H100's share of what their power limits leave of the peak (chips.csv).
BLACKWELL = ("B200", "B300", "GB200", "GB300")
RELATIVES = {"nanotron": "llm-foundry", "llm-foundry": "megatron-core", "torchtitan": "megatron-core"}
# Toy sizes: their time is the launch of kernels. Playbook rows of tier B: single runs through network stalls.
MEMORY_ONLY = ("mlm_goldens",)
PULL = 0.0005


def rows_of(folder: Path = ROOT / "tests" / "data") -> list[Row]:
    """All rows of both tables."""
    found: list[Row] = []
    for name in ("planner_1.csv", "planner_2.csv"):
        with (folder / name).open(encoding="utf-8", newline="") as file:
            found += list(csv.DictReader(file))
    return found


def tier(row: Row) -> str:
    """ "B" for a row that serves for ranking only, else "A"."""
    return "B" if row.get("tier") == "B" or "tier=B" in row["notes"] else "A"


def published_rate(row: Row, job: Job) -> float:
    """Tokens/s/GPU of a row; from its TFLOP/s, by the convention that its notes name, where it prints no rate.

    `hw_megatron` counts recomputation: 96 B s l h^2 (1 + s/6h + V/16lh), Narayanan et al., section 5.1 (2021);
    the other: 72 B s l h^2 (1 + s/6h + V/12lh).
    """
    if found := text(row, "tokens_per_s_per_gpu"):
        return float(found)
    s = job.shape
    factor, head = (96, 16) if "hw_megatron" in row["notes"] else (72, 12)
    per_token = factor * s.layers * s.hidden**2
    per_token *= 1 + job.seq / (6 * s.hidden) + s.vocab / (head * s.layers * s.hidden)
    return float(text(row, "tflops_per_gpu")) * 1e12 / per_token


def published_memory(row: Row) -> float:
    """GB that a row prints, 0 where it prints none."""
    return float(text(row, "mem_max_allocated_gb") or text(row, "mem_gb") or 0)


@dataclass(frozen=True)
class Bundle:
    """Rows of one stack, GPU and format as one job and one layout whose fields are arrays."""

    job: Job
    layout: Layout
    rate: np.ndarray
    gigabytes: np.ndarray
    last: np.ndarray
    weight: np.ndarray
    rows: list[Row]


def bundles(rows: Iterable[Row]) -> list[Bundle]:
    """The rows, gathered so that a few calls predict them all."""
    rows = list(rows)
    parsed = [(row, *parse(row)) for row in rows]
    sources: dict[str, int] = defaultdict(int)
    groups: dict[Any, list[tuple[Row, Job, Layout]]] = defaultdict(list)
    for row, job, layout in parsed:
        sources[row["source"]] += 1
        key = job.stack, job.chip.name, job.chip.node, job.number_format, bool(job.flash), job.fp8_attention
        groups[key].append((row, job, layout))
    found = []
    for members in groups.values():
        own, jobs, layouts = (list(column) for column in zip(*members, strict=True))
        job = replace(jobs[0], shape=_stacked([j.shape for j in jobs]), **{
            name: np.array([getattr(j, name) for j in jobs]) for name in ("n_gpus", "seq", "batch")
        })  # fmt: skip
        found.append(Bundle(
            job, _stacked(layouts),
            np.array([published_rate(r, j) for r, j in zip(own, jobs, strict=True)]),
            np.array([published_memory(r) for r in own]),
            np.array(["last" in r.get("mem_rank", "") for r in own]),
            np.array([sources[r["source"]] ** -0.5 for r in own]), own,
        ))  # fmt: skip
    return found


def _stacked(parts: list[Any]) -> Any:
    """One Shape or Layout whose fields are the arrays of those of many."""
    values = {f.name: [getattr(p, f.name) for p in parts] for f in fields(parts[0])}
    return replace(parts[0], **{k: v[0] if isinstance(v[0], str) else np.array(v) for k, v in values.items()})


@dataclass
class Constants:
    """What is fitted: numbers by stack, efficiencies by family of GPUs and format."""

    stacks: dict[str, dict[str, Any]]
    efficiency: dict[str, dict[str, float]]

    def applied(self, job: Job) -> Job:
        """The job with these numbers, except those that the options of its runs changed."""
        own, current = stacks.STACKS[job.stack.name], job.stack
        numbers = self.stacks.get(EVERY, {}) | self.stacks[current.name]
        numbers = {k: v for k, v in numbers.items() if getattr(current, k) == getattr(own, k)}
        return replace(job, stack=replace(current, **numbers))


def log_errors(bundle: Bundle, constants: Constants) -> np.ndarray:
    """Natural logarithm of predicted over published tokens/s/GPU, one per row."""
    job, chip = constants.applied(bundle.job), bundle.job.chip
    rates = [
        chip.peak(f) * stacks.efficiency(chip, f, constants.efficiency) for f in (job.number_format, "bf16")
    ]
    total = seconds.step(job, bundle.layout, rate=tuple(rates)).total
    return np.log(job.batch * job.seq / job.n_gpus / total / bundle.rate)


def memory_errors(bundle: Bundle, constants: Constants) -> np.ndarray:
    """Natural logarithm of predicted over published memory, one per row that prints any."""
    job, layout, known = constants.applied(bundle.job), bundle.layout, bundle.gigabytes > 0
    last = memory.on_stage(job, layout, layout.pp - 1).total
    most = np.where(bundle.last, last, memory.fullest(job, layout)) / 1e9
    return np.log(most[known] / bundle.gigabytes[known])


Key = tuple[str, str, str]  # "stacks" or "efficiency", whose, which


def descend(
    packed: list[Bundle], errors: Callable[[Bundle, Constants], np.ndarray], start: Constants, keys: list[Key]
) -> Constants:
    """The constants with each key moved, one at a time, to where the mean absolute error of the bundles is least.

    An error above 0.5 counts as 0.5. A pull of a hundredth of the squared distance from the start, in logarithms,
    keeps a number that the rows say nothing about where it was.
    """
    begin = {key: getattr(start, key[0])[key[1]][key[2]] for key in keys}
    scale = sum(b.weight.sum() for b in packed)

    def loss(bundle: Bundle) -> float:
        found = np.abs(errors(bundle, start))
        return float((np.minimum(found, 0.5) * bundle.weight[: len(found)]).sum() / scale)

    def pull(key: Key, value: float) -> float:
        distance = value - begin[key] if "overlap" in key[2] else math.log(value / begin[key])
        return PULL * distance**2

    losses = [loss(b) for b in packed]
    stride = dict.fromkeys(keys, 0.3)
    for _ in range(40):
        for part, name, what in keys:
            table, key = getattr(start, part)[name], (part, name, what)
            own = name in (b.job.stack.name for b in packed) if part == "stacks" else name != "H100"
            touched = [k for k, b in enumerate(packed)
                       if not own or name in (b.job.stack.name, b.job.chip.family)]  # fmt: skip
            old = table[what]
            before = sum(losses[k] for k in touched) + pull(key, old)
            for sign in (1, -1):
                move = sign * stride[key]
                _set(start, key, old + move if "overlap" in what else old * math.exp(move))
                now = {k: loss(packed[k]) for k in touched}
                if sum(now.values()) + pull(key, table[what]) < before - 1e-7:
                    for k, value in now.items():
                        losses[k] = value
                    break
                table[what] = old
            else:
                stride[key] *= 0.6
        if max(stride.values()) < 0.01:
            break
    return start


def _at(constants: Constants, key: Key) -> float:
    return getattr(constants, key[0])[key[1]][key[2]]


def _set(constants: Constants, key: Key, value: float) -> None:
    share = "overlap" in key[2] or key[0] == "efficiency"
    getattr(constants, key[0])[key[1]][key[2]] = min(max(value, 0.0), 0.95) if share else value


def fit(rows: Iterable[Row]) -> Constants:
    """The constants that suit the clean rows best, from the same start every time."""
    rows = list(rows)
    timed = [r for r in rows if tier(r) == "A" and r["source"] not in MEMORY_ONLY]
    start = Constants(
        {name: dict(numbers) for name, numbers in DECLARED.items()},
        {name: dict(formats) for name, formats in EFFICIENCY.items()},
    )
    for name in BLACKWELL:
        start.efficiency[name]["bf16"] = start.efficiency["H100"]["bf16"]
    default = stacks.Stack("today")
    for part in (FREE, FREE_MEMORY):
        for name, names in part.items():
            start.stacks[name] |= {
                n: getattr(default, n) or 1.0 for n in names if n not in start.stacks[name]
            }
    start.stacks[EVERY] = {n: getattr(default, n) for n in SHARED}
    packed = bundles(timed)
    used = {b.job.stack.name for b in packed}
    for name in (
        set(FREE) - used
    ):  # where a fit begins was set with the stack's runs in view: without them, forget it
        start.stacks[name] |= {n: getattr(default, n) or 1.0 for n in FREE[name]}
    seen = {(b.job.chip.family, b.job.number_format) for b in packed}
    keys = [("stacks", name, n) for name, names in FREE.items() if name in used for n in names]
    keys += [("stacks", EVERY, n) for n in SHARED]
    keys += [("efficiency", n, f) for n, fs in EFFICIENCY.items() for f in fs if (n, f) in seen]

    fitted = descend(packed, log_errors, start, keys)
    for name, names in FREE_MEMORY.items():
        own = bundles(r for r in rows if published_memory(r) and parse(r)[0].stack.name == name)
        if own:
            fitted = descend(own, memory_errors, fitted, [("stacks", name, n) for n in names])
    for name in BLACKWELL:
        fitted.efficiency[name]["bf16"] = fitted.efficiency["H100"]["bf16"]
    shared = fitted.stacks.pop(EVERY)
    for name in DECLARED:  # a stack that no row here uses has the numbers of its nearest relative
        if name not in used:
            relative = RELATIVES.get(name, "megatron-core")
            names = FREE["megatron-core"][:3]
            fitted.stacks[name] |= {
                n: fitted.stacks[relative][n] for n in names if n in fitted.stacks[relative]
            }
        fitted.stacks[name] |= shared
    return fitted


def _rounded(value: Any) -> Any:
    return value if isinstance(value, bool | str) else float(f"{value:.3g}")


def summary(errors: np.ndarray) -> dict[str, float]:
    """Rows, median and 90th percentile of the absolute error, median of the signed one, as shares."""
    signed = np.exp(errors) - 1
    size = np.abs(signed)
    return {"rows": len(errors), "median": round(float(np.median(size)), 3),
            "p90": round(float(np.quantile(size, 0.9)), 3), "signed": round(float(np.median(signed)), 3)}  # fmt: skip


def errors_by_source(rows: Iterable[Row], constants: Constants) -> dict[str, dict[str, float]]:
    """Errors of tokens/s/GPU by source, clean rows only."""
    found: dict[str, list[float]] = defaultdict(list)
    for bundle in bundles(r for r in rows if tier(r) == "A" and r["source"] not in MEMORY_ONLY):
        for row, error in zip(bundle.rows, log_errors(bundle, constants), strict=True):
            found[row["source"]].append(error)
    return {name: summary(np.array(errors)) for name, errors in sorted(found.items())}


def memory_by_source(rows: Iterable[Row], constants: Constants) -> dict[str, dict[str, float]]:
    """Errors of memory by source and of all rows that print any; each source's median weighs by its rows."""
    found: dict[str, list[float]] = defaultdict(list)
    for bundle in bundles(r for r in rows if published_memory(r)):
        for row, error in zip(bundle.rows, memory_errors(bundle, constants), strict=True):
            found[row["source"]].append(error)
    everything = np.concatenate([np.array(errors) for errors in found.values()])
    return {
        "all": summary(everything),
        **{name: summary(np.array(errors)) for name, errors in sorted(found.items())},
    }


def against_constant_mfu(rows: Iterable[Row], constants: Constants) -> tuple[float, float]:
    """Median error of the planner, and of one model-FLOP utilisation per GPU and format, the median of its rows."""
    ours, rates = [], defaultdict(list)
    for bundle in bundles(r for r in rows if tier(r) == "A" and r["source"] not in MEMORY_ONLY):
        ours.append(log_errors(bundle, constants))
        used = bundle.rate * bundle.job.shape.flops_per_token(bundle.job.seq)
        rates[bundle.job.chip.family, bundle.job.number_format].append(np.log(used))
    constant = [np.median(np.concatenate(r)) - np.concatenate(r) for r in rates.values()]
    return tuple(float(np.median(np.abs(np.exp(np.concatenate(e)) - 1))) for e in (ours, constant))  # type: ignore[return-value]


def stored() -> Constants:
    """The constants in `fitted.json`."""
    found = json.loads(FILE.read_text("utf-8"))
    return Constants(found["stacks"], found["efficiency"])


# name -> which rows are left out together
FOLDS: dict[str, Callable[[Row], bool]] = {
    "playbook, 3.57B": lambda r: r["source"] == "nanotron_playbook" and "3.57" in r["model"],
    "playbook, whole": lambda r: r["source"] == "nanotron_playbook",
    "llm-foundry, H100": lambda r: r["source"] == "llm_foundry" and r["gpu"] == "H100-80",
    "llm-foundry, A100": lambda r: r["source"] == "llm_foundry" and r["gpu"] == "A100-40",
    "Megatron 2020": lambda r: r["source"] == "megatron20_tex" and r["gpu"] == "A100-40",
    "Megatron 2021": lambda r: r["source"] == "megatron21_table1",
    "Korthikanti 2022": lambda r: r["source"] == "korthikanti22",
    "Megatron-Core README": lambda r: r["source"] == "mcore_readme",
    "NeMo 24.07": lambda r: r["source"] == "nemo_2407",
    "Megatron-Bridge, experts": lambda r: r["source"] == "mbridge_2",
    "MLPerf": lambda r: r["source"] == "mlperf_train",
    "zero bubble": lambda r: r["source"] == "zero_bubble_t4",
    "SimuMax": lambda r: r["source"] == "simumax_b200",
}  # fmt: skip


def kept_apart(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Errors of tokens/s/GPU on each fold, fitted on everything else; pooled as "dense" and "experts"."""
    found, dense, experts = {}, [], np.array([])
    for name, belongs in FOLDS.items():
        constants = fit([r for r in rows if not belongs(r)])
        own = [r for r in rows if belongs(r) and tier(r) == "A"]
        errors = np.concatenate([log_errors(b, constants) for b in bundles(own)])
        found[name] = summary(errors)
        if "experts" in name:
            experts = errors
        elif name != "playbook, 3.57B":  # these rows are in "playbook, whole" too
            dense.append(errors)
        print(f"  {name:26} {found[name]}", flush=True)
    return {"dense": summary(np.concatenate(dense)), "experts": summary(experts), **found}


def as_json(constants: Constants) -> dict[str, Any]:
    """What `fitted.json` holds, errors apart."""
    return {
        "efficiency": {n: {f: _rounded(v) for f, v in fs.items()} for n, fs in constants.efficiency.items()},
        "stacks": {n: {k: _rounded(v) for k, v in sorted(ns.items())} for n, ns in constants.stacks.items()},
    }


def fitted_on(rows: Iterable[Row]) -> dict[str, Any]:
    """By stack: the numbers that are fitted, and the sources and how many of their rows they are fitted on."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        if tier(row) == "A" and row["source"] not in MEMORY_ONLY:
            found[parse(row)[0].stack.name][row["source"]] += 1
    numbers = {name: [*FREE.get(name, ()), *SHARED, *FREE_MEMORY.get(name, ())] for name in found}
    return {name: {"numbers": numbers[name], "rows": dict(rows)} for name, rows in sorted(found.items())}


def main() -> int:
    """Fit, and print or write."""
    parser = argparse.ArgumentParser(description="Fit the planner's constants to published runs.")
    parser.add_argument("--check", action="store_true", help="fail if fitted.json says something else")
    parser.add_argument("--folds", action="store_true", help="and the errors on rows kept apart (minutes)")
    options = parser.parse_args()
    rows = rows_of()
    constants = fit(rows)
    new = as_json(constants)
    old = json.loads(FILE.read_text("utf-8"))
    if options.check:
        return 0 if all(old[k] == v for k, v in new.items()) else 1
    constants = Constants(new["stacks"], new["efficiency"])  # rounded: the errors are those of what is stored
    fitted = errors_by_source(rows, constants)
    for name, numbers in fitted.items():
        print(f"{name:20} {numbers}")
    for name, numbers in new["stacks"].items():
        print(name, numbers)
    print(new["efficiency"])
    apart = kept_apart(rows) if options.folds else old.get("errors", {}).get("kept apart", {})
    errors = {"fitted": fitted, "memory": memory_by_source(rows, constants), "kept apart": apart}
    FILE.write_text(
        json.dumps({**new, "fitted on": fitted_on(rows), "errors": errors}, indent=1) + "\n", "utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
