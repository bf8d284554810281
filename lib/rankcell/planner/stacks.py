"""Software stacks: the few numbers in which Megatron-LM of 2021 and a compiled FSDP2 of today differ.

Everything else in the planner is arithmetic. Which rows each number was fitted on, and how far off the rows
are that it was not fitted on, stands in `fitted.json`, which tools/fit_planner.py writes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Stack:
    """A profile. Times in seconds, sizes in bytes, shares from 0 to 1.

    Time: `passes`: how often the bytes that a layer keeps cross the GPU's memory in a step (a fused stack reads
    and writes them few times, an eager one often); `attention`: the speed of attention as a share of that of
    matrix products; `floor`: the shortest a layer can take for a micro-batch, forward and backward, because
    kernels must be launched, `floor_tp` with tensor parallelism, `floor_moe` with experts; `overlap_tp`,
    `overlap_dp`, `overlap_ep`: the share of that communication that hides behind computation; `network`: the
    share of the network's rate that the sum of the gradients reaches, `reduce_bytes` per parameter of it;
    `stall`: seconds lost per micro-batch where a pipeline crosses nodes;
    `slowdown`: a factor on all computation for a stack that is slow for reasons nobody published.

    Memory: bytes per parameter of weights, gradients and optimizer; `logit_bytes` per element of the logits;
    `norm_copies`, `attention_copies`, `gate_copies`, `angles` and `kept_whole`: see `memory`; `end_bytes` per hidden
    element of a token that the last stage keeps beside its layers, around the final norm; `workspace` of the
    libraries; `headroom`: the share of the card that cannot be used.

    How it works: `split`: how it cuts the model into stages, "even", "by work" (the head counts as layers) or
    "short ends" (the first and the last stage have a layer fewer); `masks`: whether it keeps the masks of dropout;
    `ampere_attention`: whether its attention kernels were written for the A100, so that they reach half of that share
    on later GPUs (FlashAttention-2: 35 % of an H100's peak against 73 % of an A100's; https://arxiv.org/abs/2407.08608
    and 2307.08691); `sequence_parallel`: whether it has it;
    `selective_kept`, `selective_again`: with selective recomputation, the share of the activations that it keeps
    and of the forward that it repeats, beside the square of attention.
    """

    name: str = "today"
    passes: Any = 10.0
    attention: Any = 0.45
    floor: Any = 1e-3
    floor_tp: Any = 1.5e-3
    floor_moe: Any = 9e-3
    overlap_tp: Any = 0.3
    overlap_dp: Any = 0.7
    overlap_ep: Any = 0.0
    network: Any = 0.8
    reduce_bytes: Any = 2.0
    stall: Any = 0.0
    slowdown: Any = 1.0
    weight_bytes: Any = 2.0
    gradient_bytes: Any = 4.0
    optimizer_bytes: Any = 12.0
    logit_bytes: Any = 8.0
    norm_copies: Any = 0.0
    attention_copies: Any = 0.0
    gate_copies: Any = 0.0
    angles: Any = 0.0
    end_bytes: Any = 0.0
    kept_whole: Any = 0.0
    masks: Any = False
    selective_kept: Any = 1.0
    selective_again: Any = 0.0
    ampere_attention: bool = False
    workspace: Any = 0.5e9
    headroom: Any = 0.05
    split: str = "even"
    sequence_parallel: bool = True


_FITTED = json.loads(files(__package__).joinpath("fitted.json").read_text("utf-8"))
STACKS = {name: Stack(name=name, **numbers) for name, numbers in _FITTED["stacks"].items()}
# torch as it is, each operation a kernel of its own, no compiler, as `models.Llama` with torch's attention: counted,
# not fitted. An RMSNorm in float32 keeps its input and the normalised numbers in it (4 + 4 bytes, where a fused one
# keeps 2), and both norms of a layer so 6 copies of 2 bytes; attention's result is copied into the order of the
# tokens; silu keeps what it gives; queries and keys have a table of cosines and one of sines each. The loss: the
# log-softmax of the logits, its gradient and theirs, 2 bytes each. No workspace is counted.
# It is about bytes: its times are those of any stack, so `rankcell plan` does not offer it.
EAGER = Stack(
    name="eager", norm_copies=6, attention_copies=1, gate_copies=1, angles=4, end_bytes=10, logit_bytes=6,
    reduce_bytes=4, overlap_tp=0, workspace=0, sequence_parallel=False,
)  # fmt: skip
EFFICIENCY: dict[str, dict[str, float]] = _FITTED["efficiency"]
ERRORS: dict[str, Any] = _FITTED["errors"]
# Which stack a published run belongs to, by what its source or its notes say; the first that is found
_CLUES = (
    ("nanotron", "nanotron"), ("playbook", "nanotron"), ("foundry", "llm-foundry"), ("mosaic", "llm-foundry"),
    ("titan", "torchtitan"), ("fsdp", "torchtitan"), ("simumax", "megatron-plain"), ("zero_bubble", "zero-bubble"),
    ("mlm_golden", "megatron-tests"), ("golden", "megatron-tests"), ("dlperf", "megatron-2020"),
    ("megatron20", "megatron-2020"), ("megatron21", "megatron-2021"), ("korthikanti", "megatron-2021"),
    ("bloom", "megatron-deepspeed"), ("bigscience", "megatron-deepspeed"), ("deepspeed", "megatron-deepspeed"),
    ("mlperf", "megatron-mlperf"), ("mbridge", "megatron-core"), ("nemo", "megatron-core"),
    ("dgxc", "megatron-core"), ("mcore", "megatron-core"), ("megatron", "megatron-core"),
)  # fmt: skip


def find(source: str, notes: str = "") -> Stack:
    """The stack of a run, from where it was published; `megatron-core` where nothing is recognised."""
    for text in (source.lower(), notes.lower()):
        for clue, name in _CLUES:
            if clue in text and name in STACKS:
                return STACKS[name]
    return STACKS["megatron-core"]


def efficiency(
    chip: Any, number_format: str, fitted: Mapping[str, Mapping[str, float]] = EFFICIENCY
) -> float:
    """The share of the peak that large matrix products reach in training, one number per GPU and format.

    Fitted where published runs are at hand; else, for 16 bits, 88 % of the best matrix product that anybody
    measured on that GPU (MAMF, see `chips`), as the fits give on A100 and H100. Narrower formats reach as much
    less of their peak as fp8 does on an H100, per halving.
    """
    own = fitted.get(chip.family, {})
    wide = own.get("bf16", 0.88 * chip.matmul)
    narrow = fitted["H100"]["fp8"] / fitted["H100"]["bf16"]
    return own.get(number_format, wide * narrow ** {"fp8": 1, "fp4": 2}.get(number_format, 0))
