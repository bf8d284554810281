"""Plans a training job by arithmetic: memory, communication, seconds and the best layout over N GPUs.

    shapes         a transformer: sizes, parameters, operations
    chips          a GPU: peaks, memory, links
    stacks         software: the few fitted numbers, and on what they were fitted
    layout         a job and a way to lay it out
    memory         bytes on each pipeline stage
    communication  bytes and seconds of each kind of communication
    seconds        the time of a step, by what it is spent on
    search         all layouts: which are possible, which is fastest, why not the others: `search.search(job)`

Models and GPUs stand in models.csv and chips.csv, fitted numbers in fitted.json, which tools/fit_planner.py writes.
Fields of jobs and layouts may be NumPy arrays, so one formula serves one layout and a hundred thousand. Nothing here
needs torch, a GPU or a rank; nothing is measured, and no job is started.
"""

from .layout import Job, Layout
from .shapes import MODELS, Shape

__all__ = ["MODELS", "Job", "Layout", "Shape"]
