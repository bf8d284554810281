"""A job, which is given, and the ways to lay it out over GPUs. Ranks are numbered as Megatron does it: tensor
parallelism inside, then context, then data, pipeline stages outside; experts take neighbours out of context and data.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from .chips import Chip
from .shapes import Shape
from .stacks import Stack

NONE, SELECTIVE, FULL = range(3)  # recomputed in the backward: nothing, attention's inside, whole layers
GPIPE, ONE_F_ONE_B, ZERO_BUBBLE, ZB_2P, ZB_V = range(5)


@dataclass(frozen=True)
class Job:
    """What is trained, on what: `batch` in sequences of `seq` tokens, `number_format` "bf16", "fp8", "fp4"."""

    shape: Shape
    chip: Chip
    n_gpus: Any
    seq: Any
    batch: Any
    number_format: str
    stack: Stack
    flash: Any = True
    fp8_attention: bool = False  # scores and values, too, are products of fp8


@dataclass(frozen=True)
class Layout:
    """How a job is spread: the sizes of the groups, the cut of the batch, what is kept and what is recomputed.

    `chunks` are the stages per rank of an interleaved pipeline, `zero` the stage of ZeRO over the data-parallel
    ranks (0: plain data parallelism), `schedule` and `recompute` one of the constants above.
    """

    tp: Any = 1
    pp: Any = 1
    dp: Any = 1
    cp: Any = 1
    ep: Any = 1
    etp: Any = 1
    chunks: Any = 1
    micro_batch: Any = 1
    zero: Any = 1
    recompute: Any = NONE
    sequence_parallel: Any = True
    schedule: Any = ONE_F_ONE_B

    def at(self, index: Any) -> Self:
        """The layout at `index` of layouts in arrays; with a mask or indices, those layouts."""
        return replace(self, **{name: v[index] for name, v in vars(self).items() if isinstance(v, np.ndarray)})

    def microbatches(self, job: Job) -> Any:
        """How many micro-batches each data-parallel rank computes per step."""
        return np.maximum(1, job.batch / (self.dp * self.micro_batch))

    def tokens(self, job: Job) -> Any:
        """Tokens of one micro-batch on one rank: context parallelism cuts the sequence."""
        return self.micro_batch * job.seq / self.cp

    def shard(self) -> Any:
        """By how many ranks what lies between the matrix products is divided: tp with sequence parallelism."""
        return np.where(self.sequence_parallel, self.tp, 1)
