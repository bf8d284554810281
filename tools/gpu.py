"""`make gpu`: what only a machine with a GPU can show, in one go of at most 20 minutes, without a network.

    python tools/gpu.py                    # tests, figures, lessons; writes notebooks/recorded/<gpu>.json
    python tools/gpu.py --wheels FOLDER    # the same, with packages that the machine lacks (see below)

It needs torch with CUDA, and the packages of NEEDS. On a machine without a network they can be brought along:

    python -m pip download --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --dest FOLDER ipython 'cloudpickle<3.1.3' ipywidgets numpy pytest

Lessons run in copies, whose rank cells have `--device cuda`; the notebooks here stay as they are. The record holds
what was measured, on which machine and when; `rankcell.figures.of_a_gpu` shows it.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEEDS = ("torch", "IPython", "cloudpickle", "ipywidgets", "numpy", "pytest")
LESSONS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))[
    1:
]  # cells that need a Slurm say so and are skipped
BUDGET = 20 * 60.0  # seconds for everything
TESTS, FIGURES, LESSON = 420.0, 180.0, 240.0  # seconds for each part, for each lesson


def main(arguments: Sequence[str]) -> int:
    """Run everything and write the record; 0 if all of it went well."""
    parser = argparse.ArgumentParser(description="Everything that needs a GPU, and the record of it.")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels for packages that are missing here")
    parser.add_argument("--part", choices=["figures", "lesson"], help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part == "figures":
        import gpu_figures

        return print(json.dumps([dataclasses.asdict(f) for f in gpu_figures.measured()])) or 0
    if options.part == "lesson":
        return run_lesson(*options.paths)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = prepared(options.wheels, Path(folder))
        if (problem := missing(environment)) or (problem := no_gpu(environment)):
            print(problem)
            return 1
        with cuda_mps(environment, folder):
            return everything(environment, Path(folder), began)


def prepared(wheels: Path | None, folder: Path) -> dict[str, str]:
    """The environment for the parts, with the packages of `wheels` first on the path."""
    path = [str(ROOT / "lib")]
    if wheels is not None:
        site = folder / "site"
        install = ["install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
        found = sorted(str(w) for w in wheels.glob("*.whl"))
        subprocess.run([sys.executable, "-m", "pip", *install, *found], check=True)
        path.append(str(site))
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    command = folder / "bin" / "rankcell"  # as an installation has it: lessons call it
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rankcell.command "$@"\n')
    command.chmod(0o755)
    bins = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    return {**os.environ, "PATH": bins, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


def missing(environment: dict[str, str]) -> str:
    """A sentence that names packages which are not there, or ""."""
    code = f"import importlib.util as u; print(*[n for n in {NEEDS} if u.find_spec(n) is None])"
    names = said(environment, "-c", code).split()
    if not names:
        return ""
    return (
        f"make gpu needs {', '.join(names)}, which this Python ({sys.executable}) lacks. With a network: "
        f"`pip install {' '.join(n.lower() for n in names)}`; without one the head of tools/gpu.py says how to bring "
        f"wheels along."
    )


def no_gpu(environment: dict[str, str]) -> str:
    """A sentence if torch sees no GPU, or ""."""
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    words = said(environment, "-c", code).split()
    if words[-1:] == ["True"]:
        return ""
    version = words[0] if words else "which does not start"
    return (
        f"make gpu needs a GPU, and torch {version} sees none here: nothing was run, and no record was written. "
        f"`rankcell doctor` says what this machine has."
    )


@contextlib.contextmanager
def cuda_mps(environment: dict[str, str], folder: str) -> Iterator[None]:
    """CUDA MPS for this `environment`, where it is installed: ranks that share the GPU compute side by side."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    environment |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    subprocess.run([control, "-d"], env=environment, check=False)
    try:
        yield
    finally:
        subprocess.run([control], input="quit -t 1\n", text=True, env=environment, check=False)


def said(environment: dict[str, str], *words: str) -> str:
    """What a Python of this environment prints."""
    run = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    return run.stdout


def everything(environment: dict[str, str], folder: Path, began: float) -> int:
    """Tests, figures, lessons, and the record of them; 0 if all went well."""
    record: dict[str, Any] = {"date": datetime.date.today().isoformat(), "machine": machine(environment)}
    print("1 of 3: tests", flush=True)
    report = folder / "tests.xml"
    code, seconds = timed(tests(report), environment, TESTS)
    record["tests"] = {"status": code, "seconds": round(seconds), **counts(report)}
    print("2 of 3: figures", flush=True)
    run = subprocess.run(
        [sys.executable, __file__, "--part", "figures"],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=FIGURES,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("[")]
    record["figures"] = json.loads(lines[-1]) if lines else []
    print("3 of 3: lessons", flush=True)
    record["lessons"] = {}
    for notebook in LESSONS:
        left = BUDGET - (time.monotonic() - began)
        result = folder / f"{notebook.stem}.json"
        code, seconds = timed(
            [sys.executable, __file__, "--part", "lesson", str(notebook), str(result)],
            environment,
            min(LESSON, left),
        )
        outcome = json.loads(result.read_text()) if result.exists() else {}
        record["lessons"][notebook.stem] = {"status": code, "seconds": round(seconds), **outcome}
        print(
            f"  {notebook.stem}: {'whole' if code == 0 else outcome.get('stopped', 'not whole')}", flush=True
        )
    name = re.sub(r"[^a-z0-9]+", "-", record["machine"]["gpus"][0].lower()).strip("-")
    target = ROOT / "notebooks" / "recorded" / f"{name}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    minutes = (time.monotonic() - began) / 60
    sys.path.insert(0, str(ROOT / "lib"))
    from rankcell import figures

    print(figures.of_a_gpu(folder=target.parent))
    print(f"{target.relative_to(ROOT)} was written after {minutes:.1f} minutes.")
    failed = [record["tests"]["status"], run.returncode, *(v["status"] for v in record["lessons"].values())]
    return int(any(failed))


def tests(report: Path) -> list[str]:
    """The command that runs the tests for a GPU. Other files are not opened: they may import what is missing here."""
    marked = [
        str(p) for p in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in p.read_text("utf-8")
    ]
    words = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu", f"--junitxml={report}"]
    return [sys.executable, *words, *marked]


def timed(command: Sequence[str], environment: dict[str, str], limit: float) -> tuple[int, float]:
    """Exit code and seconds of a command; 124 if it took longer than `limit` seconds, as `timeout` says it."""
    start = time.monotonic()
    if limit <= 0:
        return 124, 0.0
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = 124
    return code, time.monotonic() - start


def counts(report: Path) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, and the names of those that did not pass."""
    import xml.etree.ElementTree as xml

    if not report.exists():
        return {}
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in xml.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[kind].append(f"{case.get('classname')}::{case.get('name')}")
    return {"passed": len(found["passed"]), "failed": found["failed"], "skipped": found["skipped"]}


def machine(environment: dict[str, str]) -> dict[str, Any]:
    """What the figures were measured on."""
    code = (
        "import json, torch; from rankcell.engine.devices import nccl_version; n = torch.cuda.device_count(); "
        "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda, "
        "'nccl': '.'.join(map(str, nccl_version())), "
        "'gpus': [torch.cuda.get_device_properties(i).name for i in range(n)], "
        "'memory': torch.cuda.get_device_properties(0).total_memory}))"
    )
    driver = ""
    with contextlib.suppress(OSError):
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = (
            subprocess.run(ask, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
        )
    return {
        **json.loads(said(environment, "-c", code)),
        "driver": driver,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
    }


# --- lessons ---


def on_cuda(source: str) -> str:
    """A cell as it runs here: a rank cell that names no device gets `--device cuda`."""
    first, newline, rest = source.partition("\n")
    if re.match(r"%%ranks\s+\d+", first) and "--device" not in first and "--nodes" not in first:
        first = f"{first} --device cuda"
    return first + newline + rest


def run_lesson(notebook: Path, result: Path) -> int:
    """Run the cells of a lesson in an IPython of their own, from top to bottom; 0 if each ended as its tags say."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    notebook, result = notebook.resolve(), result.resolve()
    os.chdir(notebook.parent)
    shell = InteractiveShell.instance()
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    shown, stopped = [], ""
    for number, cell in enumerate(cells, start=1):
        source = on_cuda("".join(cell["source"]))
        start = time.perf_counter()
        with capture_output() as captured:
            outcome = shell.run_cell(source, store_history=True)
        shown.append(
            {"cell": number, "seconds": round(time.perf_counter() - start, 2), "said": captured.stdout[:2000]}
        )
        error = outcome.error_before_exec or outcome.error_in_exec
        expected = "raises-exception" in cell.get("metadata", {}).get("tags", [])
        if (error is not None) != expected:
            what = (
                f"{type(error).__name__}: {error}".splitlines()[0][:200]
                if error is not None
                else "no error came"
            )
            stopped = f"cell {number} of {len(cells)} ({source.strip().splitlines()[0][:60]}): {what}"
            break
    result.write_text(json.dumps({"cells": len(shown), "of": len(cells), "stopped": stopped}))
    result.with_suffix(".shown.json").write_text(json.dumps(shown))
    with contextlib.suppress(Exception):
        shell.run_line_magic("ranks", "stop")
    return int(bool(stopped))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
