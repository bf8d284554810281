"""`rankcell plan`: the best layouts of a model on so many GPUs, for people who only want the answer.

rankcell plan --model llama3-8b --gpus 64xh100 --sequence 8192 --batch 4M-tokens
"""

import difflib
import re
import sys
from dataclasses import replace
from typing import Any

from . import chips, search, shapes, stacks
from .layout import FULL, RECOMPUTE, SELECTIVE, Job, Layout

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


class PlanError(ValueError):
    """A request that cannot be planned, and what would do."""


def gpus_of(said: str) -> tuple[int, chips.Chip]:
    """How many of which GPU "64xh100" says. Raises PlanError for anything else."""
    found = re.fullmatch(r"\s*(\d+)\s*[x×*]\s*(.+?)\s*", said, flags=re.I)
    if not found or int(found[1]) < 1:
        raise PlanError(f"--gpus {said!r} is not understood. Write how many of which, for example 64xh100.")
    return int(found[1]), chips.find(found[2])


def batch_of(said: str, seq: int) -> int:
    """Sequences per step: "512", or tokens as in "4M-tokens" (M is 2^20, k 2^10). Raises PlanError."""
    found = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)[-_ ]*(tokens?|sequences?|seqs?)?\s*", said, flags=re.I
    )
    if not found:
        raise PlanError(f"--batch {said!r} is not understood. Write 4M-tokens, or 512 for so many sequences.")
    count = float(found[1]) * _UNITS[found[2].lower()]
    if (found[3] or "").lower().startswith("token"):
        count /= seq
    if count < 1 or count != int(count):
        near = max(1, round(count))
        raise PlanError(
            f"--batch {said} is {count:g} sequences of {seq} tokens: not a whole number. The nearest batch is "
            f"{near} sequences, {near * seq} tokens."
        )
    return int(count)


def job_of(options: Any) -> Job:
    """The job that the options of the command describe. Raises PlanError or ValueError with what would do."""
    n_gpus, chip = gpus_of(options.gpus)
    if options.stack not in stacks.STACKS:
        near = (
            difflib.get_close_matches(options.stack, stacks.STACKS, n=3, cutoff=0.3)
            or list(stacks.STACKS)[:3]
        )
        raise PlanError(
            f"There is no stack called {options.stack!r}. The nearest are {', '.join(near)}; there are "
            f"{', '.join(stacks.STACKS)}."
        )
    if options.sequence < 1:
        raise PlanError(
            f"--sequence {options.sequence} is not a length. It is how many tokens a sequence has."
        )
    if options.network:
        chip = replace(chip, network=options.network * 1e9)
    return Job(
        shapes.find(options.model), chip, n_gpus, options.sequence, batch_of(options.batch, options.sequence),
        chips.number_format(options.format), stacks.STACKS[options.stack],
    )  # fmt: skip


def degrees(layout: Layout) -> str:
    """A layout in a line: its degrees above 1, the micro-batch, what is sharded and recomputed."""
    named = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep}
    parts = [f"{name} {int(n)}" for name, n in named.items() if n > 1] or ["one GPU"]
    if layout.chunks > 1:
        parts.append(f"{int(layout.chunks)} chunks")
    parts.append(f"micro-batch {int(layout.micro_batch)}")
    if layout.zero:
        parts.append(f"ZeRO-{int(layout.zero)}")
    if layout.recompute:
        parts.append(f"recompute {RECOMPUTE[int(layout.recompute)]}")
    return ", ".join(parts)


def torchrun(job: Job, layout: Layout) -> str:
    """The line that starts the job, with the options of Megatron-LM's pretrain_gpt.py."""
    host = 4 if job.chip.node > 8 else job.chip.node  # a tray of a rack-wide NVLink domain has 4 GPUs
    per_node = min(int(job.n_gpus), host)
    nodes = -(-int(job.n_gpus) // per_node)
    launch = (
        "--standalone"
        if nodes == 1
        else f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:29500"
    )
    words = [
        f"torchrun {launch} --nproc-per-node={per_node} pretrain_gpt.py",
        f"--seq-length {job.seq} --global-batch-size {job.batch} --micro-batch-size {int(layout.micro_batch)}",
        f"--tensor-model-parallel-size {int(layout.tp)} --pipeline-model-parallel-size {int(layout.pp)}",
    ]
    if layout.tp > 1:
        words.append("--sequence-parallel")
    if layout.cp > 1:
        words.append(f"--context-parallel-size {int(layout.cp)}")
    if layout.ep > 1:
        words.append(f"--expert-model-parallel-size {int(layout.ep)}")
    if layout.chunks > 1:
        per_chunk = int(job.shape.layers / (layout.pp * layout.chunks))
        words.append(f"--num-layers-per-virtual-pipeline-stage {per_chunk}")
    if layout.zero == 1:
        words.append("--use-distributed-optimizer")
    elif layout.zero > 1:
        sharded = "optim_grads" if layout.zero == 2 else "optim_grads_params"
        words.append(f"--use-megatron-fsdp --data-parallel-sharding-strategy {sharded}")
    if layout.recompute == FULL:
        words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif layout.recompute == SELECTIVE:
        words.append("--recompute-granularity selective")
    return " \\\n    ".join(words)


def expected_error(job: Job) -> str:
    """By how much plans were off on published runs that nothing was fitted on, as a sentence."""
    apart = stacks.ERRORS.get("kept apart", {})
    found = apart.get("experts" if job.shape.experts else "dense")
    memory = stacks.ERRORS.get("memory", {}).get("all")
    if not found or not memory:
        return "No errors are known."
    return (
        f"Error to expect: half of the published runs kept apart were within {found['median']:.0%} of the predicted "
        f"speed, nine of ten within {found['p90']:.0%}.\nMemory: half of the published runs, which partly served to "
        f"fit it, were within {memory['median']:.0%}, nine of ten within {memory['p90']:.0%}."
    )


def report(
    job: Job, found: search.Found, *, rejected: bool = False, price: float = 0, watts: float = 0
) -> str:
    """What the command prints."""
    shape, chip = job.shape, job.chip
    active = f", {shape.active_params / 1e9:.1f} billion active" if shape.experts else ""
    lines = [
        f"{shape.name}: {shape.params / 1e9:.1f} billion parameters{active}; {job.n_gpus} x {chip.name}, "
        f"{job.number_format}, {job.stack.name}; {job.batch} sequences of {job.seq} tokens.",
        f"{len(found)} layouts: {len(found.order)} are possible.",
    ]
    best = found.best()
    for place, choice in enumerate(best, 1):
        rate = choice.tokens_per_s_per_gpu
        lines += [
            "",
            f"{place}. {degrees(choice.layout)}",
            f"   {rate:,.0f} tokens/s/GPU, {choice.mfu:.0%} MFU; a step takes {choice.step.total:.2f} s; "
            f"{choice.memory.total / 1e9:.0f} of {search.memory.limit(job) / 1e9:.0f} GB",
            f"   memory: {', '.join(f'{k} {v / 1e9:.1f}' for k, v in choice.memory._asdict().items() if v >= 5e7)}",
            f"   time besides the model's operations: {choice.why}",
        ]
        if price or watts:
            hours = 1e9 / rate / 3600
            costs = [f"{hours * price:,.0f} for a billion tokens"] * bool(price)
            costs += [f"{hours * watts / 1e3:,.0f} kWh for a billion tokens"] * bool(watts)
            lines.append(f"   {', '.join(costs)}")
    if not best:
        lines += ["", "None is possible. Take more GPUs, a shorter sequence or a batch with more divisors."]
    else:
        lines += ["", torchrun(job, best[0].layout), "", expected_error(job),
                  "MFU counts causal attention and no recomputation, against the dense peak."]  # fmt: skip
    if rejected or not best:
        lines += ["", "Rejected, with an example of each reason:"]
        for reason, count in found.counts().items():
            index = int((found.verdict == search.REASONS.index(reason)).argmax())
            lines.append(f"   {count:6}  {degrees(found.layouts.at(index))}: {found.reason(index)}")
    return "\n".join(lines)


def add_command(commands: Any) -> None:
    """Add `plan` to the sub-commands of an argument parser."""
    command = commands.add_parser(
        "plan",
        help="print the best layouts of a model on so many GPUs",
        description="Print the best five layouts of a model on so many GPUs: speed, memory, why, and the line that "
        "starts the first. Nothing runs.",
    )
    command.add_argument("--model", required=True, help="for example llama3-8b, mixtral-8x7b, gpt3-175b")
    command.add_argument("--gpus", required=True, metavar="NxGPU", help="for example 64xh100, 8xa100-40")
    command.add_argument(
        "--sequence", type=int, default=4096, metavar="TOKENS", help="tokens per sequence (4096)"
    )
    command.add_argument(
        "--batch", default="4M-tokens", help="per step: 4M-tokens (M is 2^20), or 512 sequences"
    )
    command.add_argument("--format", default="bf16", help="bf16, fp8 or fp4 (bf16)")
    command.add_argument("--stack", default="megatron-core", help="software stack (megatron-core)")
    command.add_argument(
        "--network", type=float, default=0, metavar="GB/S", help="bytes/s per GPU between nodes, each way"
    )
    command.add_argument("--price", type=float, default=0, help="of a GPU-hour, in any currency")
    command.add_argument("--watts", type=float, default=0, help="of a GPU with its share of the server")
    command.add_argument("--rejected", action="store_true", help="say also why layouts are rejected")
    command.set_defaults(run=run)


def run(options: Any) -> int:
    """Plan as the options say and print it; the number for the shell is 0 when a layout was found."""
    try:
        job = job_of(options)
    except ValueError as error:
        print(f"rankcell plan: {error}", file=sys.stderr)
        return 1
    found = search.search(job)
    print(report(job, found, rejected=options.rejected, price=options.price, watts=options.watts))
    return 0 if len(found.order) else 1
