"""Software stacks: the few numbers in which Megatron-LM of 2021 and a compiled FSDP2 of today differ. Which rows each
was fitted on, and how far off the others are, stands in `fitted.json`, which tools/fit_planner.py writes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Stack:
    """A profile. Times in seconds, sizes in bytes, shares from 0 to 1."""

    name: str = "today"
    passes: Any = 10.0  # how often what a layer keeps crosses the memory in a step: less often if fused
    attention: Any = 0.3  # the speed of attention, as a share of the peak in 16 bits
    # How long the host takes to launch a layer's kernels for a micro-batch, forward and backward. The fit begins with
    # what Megatron-LM's tests of toy models take on H100: at best 49 ms for 12 layers
    floor: Any = 4e-3
    moe_launches: Any = 2.0  # times that with experts: to route, sort and exchange takes as many kernels again
    overlap_tp: Any = 0.3  # the share of that communication that hides behind computation
    overlap_dp: Any = 0.7
    overlap_ep: Any = 0.0
    one_copy: bool = True  # to another domain a token goes once (DeepEP, HybridEP), not once per expert there
    network: Any = 0.8  # the share of the network's rate that the sum of the gradients reaches
    reduce_bytes: Any = 2.0  # of that sum, per parameter
    slowdown: Any = 1.0  # of all computation, for reasons nobody published
    weight_bytes: Any = 2.0  # per parameter, as the next two
    gradient_bytes: Any = 4.0
    optimizer_bytes: Any = 12.0
    logit_bytes: Any = 8.0  # per logit
    norm_copies: Any = 0.0  # see `memory.kept_per_token`
    kept_whole: Any = 0.0  # bytes per hidden element of a token, of gathered inputs that are not divided
    masks: Any = False  # whether it keeps the masks of dropout
    # With selective recomputation: the share of the activations that it keeps, and of the forward that it repeats,
    # beside the square of attention
    selective_kept: Any = 1.0
    selective_again: Any = 0.0
    # Attention kernels written for the A100 reach half of that share later: FlashAttention-2 has 35 % of an H100's peak
    # against 73 % of an A100's; https://arxiv.org/abs/2407.08608 and 2307.08691
    ampere_attention: bool = False
    workspace: Any = 0.5e9  # of the libraries
    headroom: Any = 0.05  # the share of the card that cannot be used
    split: str = "even"  # into stages: see `memory.layers_on`
    sequence_parallel: bool = True


_FITTED = json.loads(files(__package__).joinpath("fitted.json").read_text("utf-8"))
STACKS = {name: Stack(name=name, **numbers) for name, numbers in _FITTED["stacks"].items()}
EFFICIENCY: dict[str, dict[str, float]] = _FITTED["efficiency"]
ERRORS: dict[str, Any] = _FITTED["errors"]


def efficiency(chip: Any, number_format: str, fitted: Mapping[str, Mapping[str, float]] = EFFICIENCY) -> float:
    """The share of the peak that large matrix products reach in training, one number per GPU and format.

    Fitted where published runs are at hand; else, for 16 bits, 88 % of the best matrix product that anybody
    measured on that GPU (MAMF, see `chips`), as the fits give on A100 and H100. Narrower formats reach as much
    less of their peak as fp8 does on an H100, per halving.
    """
    own = fitted.get(chip.family, {})
    wide = own.get("bf16", 0.88 * chip.matmul)
    narrow = fitted["H100"]["fp8"] / fitted["H100"]["bf16"]
    return own.get(number_format, wide * narrow ** {"fp8": 1, "fp4": 2}.get(number_format, 0))
