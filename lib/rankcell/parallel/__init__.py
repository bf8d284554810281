"""The strategies of the lessons in their final form, as one would like to read them: usable in any torch program.

`ddp` divides the batch; `tensor`, `vocabulary` and `transformer` each layer; `pipeline` the layers; `context` the
sequence; `experts` the MLPs of a layer. They need torch only, and a process group that somebody else has set up:
rankcell, torchrun or your script. ZeRO stands whole in lesson 10, several at once in lesson 19.

What they are not: a training library. torch's DDP, `fully_shard`, DTensor and pipelining have the edges that are left
out here: mixed precision, unusual hooks and checkpoints, parameters that only some ranks use.
"""

import torch.distributed

from ..versions import complete

complete(torch.distributed)
