"""`rankcell plan`: the best layouts of a model on so many GPUs, for people who only want the answer.

rankcell plan --model llama3-8b --gpus 64xh100 --sequence 8192 --batch 4M-tokens
"""

import re
import sys
from dataclasses import replace
from typing import Any

from . import chips, search, shapes, stacks
from .layout import RECOMPUTE, Job, Layout


def job_of(options: Any) -> Job:
    """The job that the options of the command describe. Raises ValueError with what would do."""
    cards = re.fullmatch(r"([1-9]\d*)[x×*](.+)", options.gpus)
    if not cards:
        raise ValueError(f"--gpus {options.gpus!r} is not understood. Write how many of which, for example 64xh100.")
    chip = chips.find(cards[2])
    if options.network:
        chip = replace(chip, network=options.network * 1e9)
    batch, stack = batch_of(options.batch, options.sequence), stacks.STACKS[options.stack]
    shape = shapes.find(options.model)
    return Job(shape, chip, int(cards[1]), options.sequence, batch, options.format, stack)


def batch_of(said: str, seq: int) -> int:
    """Sequences per step: "512", or tokens as in "4M-tokens" (M is 2^20, k 2^10). Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)(-tokens)?", said, flags=re.I)
    if not found:
        raise ValueError(f"--batch {said!r} is not understood. Write 4M-tokens, or 512 for so many sequences.")
    count = float(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()] / (seq if found[3] else 1)
    if count < 1 or count != int(count):
        near = max(1, round(count))
        raise ValueError(
            f"--batch {said} is {count:g} sequences of {seq} tokens: not a whole number. The nearest batch is "
            f"{near} sequences, {near * seq} tokens."
        )
    return int(count)


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


def report(job: Job, found: search.SearchResult) -> str:
    """What the command prints."""
    shape = job.shape
    active = f", {shape.active_params / 1e9:.1f} billion active" if shape.experts else ""
    lines = [
        f"{shape.name}: {shape.params / 1e9:.1f} billion parameters{active}; {job.n_gpus} x {job.chip.name}, "
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
    if not len(found.order):
        lines += ["", "None is possible. Take more GPUs, a shorter sequence or a batch with more divisors.",
                  "Rejected, with an example of each reason:"]  # fmt: skip
        for number, count in found.counts().items():
            index = int((found.verdict == number).argmax())
            lines.append(f"   {count:6}  {degrees(found.layouts.at(index))}: {found.reason(index)}")
        return "\n".join(lines)
    rate = stacks.ERRORS["kept apart"]["experts" if shape.experts else "dense"]
    memory = stacks.ERRORS["memory"]["all"]
    lines += [
        "",
        "MFU counts causal attention and no recomputation, against the dense peak. Error to expect: half of the",
        f"published runs kept apart were within {rate['median']:.0%} of the predicted speed, nine of ten within "
        f"{rate['p90']:.0%}; of the memory within {memory['median']:.0%} and {memory['p90']:.0%}.",
    ]
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
    add("--format", default="bf16", choices=("bf16", "fp8", "fp4"), help="of matrix products (bf16)")
    add("--stack", default="megatron-core", choices=stacks.STACKS, help="software stack (megatron-core)")
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
