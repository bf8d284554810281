"""Plans a training job by arithmetic: memory, communication, seconds and the best layout over N GPUs.

Models and GPUs stand in models.csv and chips.csv, fitted numbers in fitted.json, which tools/fit_planner.py writes.
Fields of jobs and layouts may be NumPy arrays, so one formula serves one layout and a hundred thousand. Nothing here
needs torch, a GPU or a rank; nothing is measured, and no job is started.
"""

from .layout import Job, Layout
from .shapes import MODELS, Shape

__all__ = ["MODELS", "Job", "Layout", "Shape"]
