"""What only a GPU can show: the numbers that `make gpu` has recorded, each with its machine and date. Nothing is
measured here, and nothing is made up: where there is no record, the table says so.
"""

import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path


@dataclass(frozen=True)
class Measurement:
    """One number for a lesson: on which GPU it was measured, when, with which torch."""

    lesson: str
    gpu: str
    date: str
    torch: str
    what: str
    value: float
    unit: str


@dataclass(frozen=True, repr=False)
class GpuRecord:
    """What was measured on GPUs, each number with its machine and date. Shows as a table."""

    figures: tuple[Measurement, ...]

    def __repr__(self) -> str:
        rows = []
        for (gpu, date, version), same in groupby(self.figures, key=lambda f: (f.gpu, f.date, f.torch)):
            rows.append(f"{gpu}, torch {version}, measured {date}")
            rows += [f"  {f.value:>9.4g} {f.unit:<8} {f.what}" for f in same]
        return "\n".join(rows) or "No GPU has been measured yet: `make gpu` on a machine with one writes a record."


def of_a_gpu(lesson: str = "", folder: str | Path = "recorded") -> GpuRecord:
    """What was measured for a `lesson` ("07"; all by default): the files of `folder`, beside the notebooks."""
    records = [json.loads(path.read_text("utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    found = (Measurement(**figure) for record in records for figure in record["figures"])
    return GpuRecord(tuple(figure for figure in found if figure.lesson.startswith(lesson)))


recorded = of_a_gpu  # what computes with the numbers reads better so
