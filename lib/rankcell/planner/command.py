"""`rankcell plan`: the best layouts of a model on so many GPUs, for people who only want the answer.

rankcell plan --model llama3-8b --gpus 64xh100 --sequence 8192 --batch 4M-tokens
"""

import re
import sys
from dataclasses import replace
from typing import Any

from . import chips, search, shapes, stacks
from .layout import RECOMPUTE, Job, Layout

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
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kmg]?)[- ]?(tokens|sequences)?\s*", said, flags=re.I)
    if not found:
        raise PlanError(f"--batch {said!r} is not understood. Write 4M-tokens, or 512 for so many sequences.")
    count = float(found[1]) * _UNITS[found[2].lower()]
    if (found[3] or "").lower() == "tokens":
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
        raise PlanError(f"There is no stack {options.stack!r}. There are {', '.join(stacks.STACKS)}.")
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


def expected_error(job: Job) -> str:
    """By how much plans were off on published runs that nothing was fitted on, as a sentence."""
    rate = stacks.ERRORS["kept apart"]["experts" if job.shape.experts else "dense"]
    memory = stacks.ERRORS["memory"]["all"]
    return (
        f"Error to expect: half of the published runs kept apart were within {rate['median']:.0%} of the predicted "
        f"speed, nine of ten within {rate['p90']:.0%}.\nMemory: half of the published runs, which partly served to "
        f"fit it, were within {memory['median']:.0%}, nine of ten within {memory['p90']:.0%}."
    )


def report(job: Job, found: search.SearchResult) -> str:
    """What the command prints."""
    shape, chip = job.shape, job.chip
    active = f", {shape.active_params / 1e9:.1f} billion active" if shape.experts else ""
    lines = [
        f"{shape.name}: {shape.params / 1e9:.1f} billion parameters{active}; {job.n_gpus} x {chip.name}, "
        f"{job.number_format}, {job.stack.name}; {job.batch} sequences of {job.seq} tokens.",
        f"{len(found)} layouts: {len(found.order)} are possible.",
    ]
    for place, choice in enumerate(found.best(), 1):
        gb = {name: nbytes / 1e9 for name, nbytes in choice.memory._asdict().items() if nbytes >= 5e7}
        lines += [
            "",
            f"{place}. {degrees(choice.layout)}",
            f"   {choice.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {choice.mfu:.0%} MFU; a step takes "
            f"{choice.step.total:.2f} s; {choice.memory.total / 1e9:.0f} of {search.memory.limit(job) / 1e9:.0f} GB",
            f"   memory: {', '.join(f'{name} {n:.1f}' for name, n in gb.items())}",
            f"   time besides the model's operations: {choice.why}",
        ]
    if len(found.order):
        lines += ["", expected_error(job),
                  "MFU counts causal attention and no recomputation, against the dense peak."]  # fmt: skip
    else:
        lines += ["", "None is possible. Take more GPUs, a shorter sequence or a batch with more divisors.",
                  "Rejected, with an example of each reason:"]  # fmt: skip
        for number, count in found.counts().items():
            index = int((found.verdict == number).argmax())
            lines.append(f"   {count:6}  {degrees(found.layouts.at(index))}: {found.reason(index)}")
    return "\n".join(lines)


def add_command(commands: Any) -> None:
    """Add `plan` to the sub-commands of an argument parser."""
    command = commands.add_parser(
        "plan",
        help="print the best layouts of a model on so many GPUs",
        description="Print the best five layouts of a model on so many GPUs: speed, memory, and why. Nothing runs.",
    )
    add = command.add_argument
    add("--model", required=True, help="for example llama3-8b, mixtral-8x7b, gpt3-175b")
    add("--gpus", required=True, metavar="NxGPU", help="for example 64xh100, 8xa100-40")
    add("--sequence", type=int, default=4096, metavar="TOKENS", help="tokens per sequence (4096)")
    add("--batch", default="4M-tokens", help="per step: 4M-tokens (M is 2^20), or 512 sequences")
    add("--format", default="bf16", help="bf16, fp8 or fp4 (bf16)")
    add("--stack", default="megatron-core", help="software stack (megatron-core)")
    add("--network", type=float, default=0, metavar="GB/S", help="bytes/s per GPU between nodes, each way")
    command.set_defaults(run=run)


def run(options: Any) -> int:
    """Plan as the options say and print it; the number for the shell is 0 when a layout was found."""
    try:
        job = job_of(options)
    except ValueError as error:
        print(f"rankcell plan: {error}", file=sys.stderr)
        return 1
    found = search.search(job)
    print(report(job, found))
    return 0 if len(found.order) else 1
