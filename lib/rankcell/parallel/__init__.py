"""The strategies of the lessons in their final form, as one would like to read them: usable in any torch program.

`ddp`, `zero` and `fsdp` (with `shards`) divide the batch, the optimizer and the parameters; `tensor`, `vocabulary` and
`transformer` each layer; `pipeline` the layers; `context` the sequence; `experts` the MLPs of a layer; `mesh` does
several at once. They need torch only, and a process group that somebody else has set up: rankcell, torchrun or your
script.

What they are not: a training library. torch's DDP, `fully_shard`, DTensor and pipelining have the edges that are left
out here: mixed precision, unusual hooks and checkpoints, parameters that only some ranks use.
"""

import torch.distributed

from ..versions import complete

complete(torch.distributed)
