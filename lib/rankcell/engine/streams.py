"""Inside a rank: where a device has got to with the work that the host has put into its queues.

gloo's calls are over when they return. A backend such as nccl only enqueues: the host goes on, and a hang shows
where the host waits for the device, or never. Then an operation is over when the device says so.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

ENQUEUE = {"nccl", "nccl2", "nccl-legacy"}  # backends of torch that do so, by name: "nccl" is one of the others


def mark(tensor: torch.Tensor | None) -> Callable[[], bool]:
    """A function that tells whether the device of `tensor` has done all that its current stream holds now."""
    device = torch.cuda.current_device() if tensor is None or not tensor.is_cuda else tensor.device
    if torch.cuda.is_current_stream_capturing():  # into a graph: nothing runs now, and no event may be asked
        return lambda: True
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def done(work: dist.Work) -> Callable[[], bool]:
    """A function that tells whether `work` is over; true while a graph is recorded: its events may not be asked."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return (lambda: True) if capturing else work.is_completed
