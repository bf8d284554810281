"""`rankcell doctor`: what of a machine lets ranks work, what will not work on it, and what to do.

`gather` looks at the machine, in one place; all that is said of it is a pure function of the `Facts` it returns.
Nothing is changed, and no rank is started. torch is asked in a process of its own, with a time limit: an import
from a slow file system, or a GPU that does not answer, is a finding and not a wait.
"""

import inspect
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import hardware, versions
from .engine import devices, system
from .engine.local import FILES_PER_RANK, MEMORY_PER_RANK
from .engine.match import SignatureTable

PROBE = 4.0  # seconds that torch gets to say what it sees
GPU = 25.0  # ... where there is a GPU: the first program after a start of the machine waits for its driver
QUICK = 1.0  # seconds for a command of the system
SRUN = 60.0  # seconds for all nodes of an allocation
GIB = 2**30

NETWORK = (
    "nfs nfs4 lustre gpfs beegfs cifs smb3 ceph 9p panfs wekafs afs pvfs2 fuse.sshfs fuse.juicefs".split()
)


@dataclass(frozen=True)
class Folder:
    """Where something is written: its path, the kind of its file system, whether it can be written, bytes free."""

    path: str
    kind: str = ""
    writable: bool = True
    free: int | None = None


@dataclass(frozen=True)
class Torch:
    """What torch said in a process of its own; `problem` is why it said nothing."""

    version: str = ""
    problem: str = ""
    late: bool = False  # it was still being imported when the time was over: all below is unknown
    seconds: float = 0.0  # to import it
    threads: int = 1  # of the process after the import
    forks: bool = True  # whether a fork of that process can compute
    cuda: str = ""  # version that it was built for
    nccl: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    gpu_problem: str = ""
    p2p: bool | None = None  # whether all GPUs reach each other's memory


@dataclass(frozen=True)
class Facts:
    """What `gather` has found on one machine. Sizes in bytes; None and "" where the machine does not tell."""

    host: str = ""
    linux: bool = True
    kernel: str = ""
    python: str = ""
    cores: int = 4  # that this process may use
    cores_of_machine: int = 4
    memory: int | None = None  # that new processes can have
    memory_of_machine: int | None = None
    container: str = ""
    loopback: str = ""  # why gloo could not talk over it
    address: str = "127.0.1.1"  # of this host's own name; "" if nobody knows it
    files: int = 4096  # limits of this process; -1: none
    processes: int = -1
    locked: int = -1
    address_space: int = -1
    shared: Folder = field(default_factory=lambda: Folder("/dev/shm", "tmpfs", free=8 * GIB))
    home: Folder = field(default_factory=lambda: Folder("~"))
    temporary: Folder = field(default_factory=lambda: Folder("/tmp"))
    here: Folder = field(default_factory=lambda: Folder("."))
    environment: Mapping[str, str] = field(default_factory=dict)  # the variables of WATCHED that are set
    driver: str = ""  # what `nvidia-smi` says, "" without an NVIDIA driver
    links: str = ""  # the table of `nvidia-smi topo -m`
    mps: devices.Mps = field(default_factory=devices.Mps)
    torch: Torch = field(default_factory=Torch)


@dataclass(frozen=True)
class Finding:
    """One sentence on the machine: `kind` is "works", "note" or "problem"; `do` is what to do about it."""

    kind: str
    text: str
    do: str = ""


WATCHED = (
    "CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES CUDA_MPS_PIPE_DIRECTORY NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME "
    "NCCL_MULTI_RANK_GPU_ENABLE NCCL_P2P_DISABLE OMP_NUM_THREADS LD_PRELOAD TMPDIR PYTHONPATH http_proxy "
    "CUDA_LAUNCH_BLOCKING SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_NODEID SLURM_MEM_PER_NODE SLURM_CPUS_ON_NODE"
).split()


def findings(facts: Facts) -> list[Finding]:
    """What `facts` mean for rank cells: problems first, then notes, then what works."""
    found = [finding for look in _LOOKS for finding in look(facts)]
    order = ("problem", "note", "works")
    return sorted(found, key=lambda f: order.index(f.kind))


def _world(f: Facts) -> Iterator[Finding]:
    by_memory = None if f.memory is None else f.memory // MEMORY_PER_RANK
    by_files = None if f.files < 0 else max(0, f.files - 200) // FILES_PER_RANK
    room = min((n for n in (by_memory, by_files) if n is not None), default=None)
    if room is not None and room < 4:
        yield Finding(
            "problem",
            f"there is room for {room} ranks, and the lessons use 4 (a rank takes about {MEMORY_PER_RANK >> 20} MiB "
            f"and {FILES_PER_RANK} open files).",
            "raise `ulimit -n` in the shell that starts Jupyter."
            if by_files is not None and by_files < 4
            else "end other programs, or ask for more memory (`--mem` of sbatch, the container's limit).",
        )
    elif f.cores < 4:
        yield Finding(
            "note",
            f"{f.cores} of {f.cores_of_machine} cores are this process's: four ranks take turns on them. All answers "
            f"are right, and times on the CPU are longer than those in the lessons.",
            "" if f.cores == f.cores_of_machine else _more_cores(f),
        )
    else:
        yield Finding("works", f"four ranks on the CPU over gloo, on {f.cores} cores.")
    if f.cores < f.cores_of_machine and f.cores >= 4:
        yield Finding(
            "note",
            f"this process may use {f.cores} of the machine's {f.cores_of_machine} cores.",
            _more_cores(f),
        )
    if f.memory is not None and f.memory < 2 * GIB:
        yield Finding(
            "note",
            f"{f.memory / GIB:.1f} GiB of memory are left for new processes"
            + (f" of {f.memory_of_machine / GIB:.0f} GiB in the machine" if f.memory_of_machine else "")
            + ": lessons 7 and 9 may be ended by the system.",
            "have 4 GiB free, or ask for them (`--mem=8G` of sbatch, `-m 8g` of docker).",
        )


def _more_cores(f: Facts) -> str:
    if "SLURM_JOB_ID" in f.environment:
        return "ask Slurm for more: `--cpus-per-task=8`."
    return (
        "the container, the cgroup or taskset that started it says how many it gets." if f.container else ""
    )


def _shared_memory(f: Facts) -> Iterator[Finding]:
    if not f.linux:
        return
    needed = SignatureTable.nbytes(4)
    if not f.shared.writable or (f.shared.free is not None and f.shared.free < needed):
        why = "cannot be written" if not f.shared.writable else f"has {(f.shared.free or 0) >> 10} KiB free"
        yield Finding(
            "note",
            f"{f.shared.path} {why}: ranks share memory in {f.temporary.path} instead, a DataLoader with workers "
            f"fails, and so does nccl between processes.",
            "give the container more: `docker run --shm-size=2g` or `--ipc=host`; in Kubernetes an emptyDir with "
            "medium: Memory at /dev/shm.",
        )
    elif f.shared.free is not None and f.shared.free < 256 << 20:
        yield Finding(
            "note",
            f"{f.shared.path} has {f.shared.free >> 20} MiB free: rank cells work; nccl takes some 33 MiB for each "
            f"pair of GPUs that cannot reach each other, and DataLoader workers pass their batches there.",
            "`docker run --shm-size=2g`, or `--ipc=host`.",
        )


def _network(f: Facts) -> Iterator[Finding]:
    asked = f.environment.get("GLOO_SOCKET_IFNAME", "")
    if f.loopback:
        yield Finding("problem", f"the ranks of one machine cannot reach each other: {f.loopback}")
    elif asked:
        yield Finding(
            "note",
            f"GLOO_SOCKET_IFNAME is {asked!r}: the ranks of this machine talk over it, not the loopback.",
        )
    if not f.address:
        yield Finding(
            "note",
            f"the name of this machine, {f.host!r}, has no address. Ranks on one machine do not ask for it; torchrun "
            f"and scripts that set MASTER_ADDR to it hang or fail.",
            f"add a line `127.0.1.1 {f.host}` to /etc/hosts, or use MASTER_ADDR=127.0.0.1.",
        )


def _limits(f: Facts) -> Iterator[Finding]:
    if 0 <= f.files < 1024:
        yield Finding(
            "note",
            f"{f.files} files may be open at a time: room for {max(0, f.files - 200) // FILES_PER_RANK} ranks.",
            "`ulimit -n 4096` in the shell that starts Jupyter.",
        )
    if 0 <= f.processes < 512:
        yield Finding(
            "note",
            f"at most {f.processes} processes and threads of this user: a world of ranks with their threads may meet "
            "it.",
            "`ulimit -u` in the shell that starts Jupyter, or the limit of the container (pids).",
        )
    if 0 <= f.address_space < 64 * GIB:
        gpu = bool(f.torch.gpus or f.driver)
        yield Finding(
            "problem" if gpu else "note",
            f"the address space of a process is limited to {f.address_space / GIB:.1f} GiB (`ulimit -v`): CUDA "
            f"reserves far more than it uses and does not start under "
            f"it{'' if gpu else ', should there ever be a GPU'}.",
            "`ulimit -v unlimited`.",
        )
    if 0 <= f.locked < 64 << 20 and len(f.torch.gpus) > 0 and "SLURM_JOB_ID" in f.environment:
        yield Finding(
            "note",
            f"only {f.locked >> 10} KiB of memory may be locked (`ulimit -l`): nccl over InfiniBand needs more.",
            "ask the administrators for an unlimited memlock in Slurm (PropagateResourceLimitsExcept=MEMLOCK).",
        )


def _folders(f: Facts) -> Iterator[Finding]:
    if not f.temporary.writable:
        yield Finding(
            "problem",
            f"no temporary file can be written in {f.temporary.path}: no rank can be started.",
            "name a folder that can be written in TMPDIR, and restart the kernel.",
        )
    elif f.temporary.free is not None and f.temporary.free < 64 << 20:
        yield Finding(
            "problem",
            f"{f.temporary.path} has {f.temporary.free >> 20} MiB free: ranks meet there, and lesson 17 writes "
            "snapshots.",
            "make room, or name another folder in TMPDIR, and restart the kernel.",
        )
    if f.temporary.kind in NETWORK:
        yield Finding(
            "note",
            f"TMPDIR, {f.temporary.path}, is on a network file system ({f.temporary.kind}): a world starts slowly "
            "there.",
            "a folder on the machine's own disk or /dev/shm: `export TMPDIR=/tmp`.",
        )
    if len(f.temporary.path) > 75:
        yield Finding(
            "note",
            f"the path of TMPDIR has {len(f.temporary.path)} letters: a socket's path may have 107, and a DataLoader's "
            f"workers and torch's own servers add some 30 (AF_UNIX path too long).",
            "a shorter TMPDIR.",
        )
    if not f.home.writable:
        yield Finding(
            "note",
            f"the home directory, {f.home.path}, cannot be written: IPython keeps no history, and `%%ranks --nodes` "
            f"has no place for its key.",
            "set HOME, IPYTHONDIR and JUPYTER_RUNTIME_DIR to a folder that can be written.",
        )
    elif f.home.kind in NETWORK:
        yield Finding(
            "note",
            f"the home directory is on a network file system ({f.home.kind}). `%%ranks --nodes` needs just that; an "
            f"environment (.venv) there makes the first `import torch` of every node slow.",
            "put the environment on a local disk if the first cell takes long.",
        )
    if not f.here.writable:
        yield Finding(
            "note",
            f"{f.here.path} cannot be written: no notebook can be saved there, and `make` cannot build.",
            "copy the course to a folder of yours.",
        )


def _place(f: Facts) -> Iterator[Finding]:
    if f.container:
        text = {
            "WSL2": "this is WSL2, Linux under Windows: rank cells work as on any Linux.",
            "gVisor": "this is gVisor, a kernel of its own: some counters of connections are missing.",
        }.get(f.container, f"this is a container ({f.container}): limits and /dev/shm are its own.")
        yield Finding("note", text)
    if not f.linux:
        yield Finding(
            "note",
            "this is not Linux: bytes on the wire, memory of ranks and the cores of a container are unknown here. "
            "The rest is written for macOS and was not tested there.",
        )
    if "SLURM_JOB_ID" in f.environment:
        nodes = f.environment.get("SLURM_JOB_NUM_NODES", "1")
        yield Finding(
            "works",
            f"this is Slurm job {f.environment['SLURM_JOB_ID']} with {nodes} node{'s' if nodes != '1' else ''}.",
            "`rankcell doctor --nodes` looks at all of them." if nodes != "1" else "",
        )


def _torch(f: Facts) -> Iterator[Finding]:
    t = f.torch
    if t.problem:
        yield Finding("problem", t.problem)
        return
    said = versions.beyond(t.version)
    if said:
        yield Finding("note", said)
    else:
        yield Finding("works", f"torch {t.version} on Python {f.python}.")
    if t.late:
        yield Finding(
            "note",
            f"torch was still being imported after {PROBE:.0f} s: a slow file system, or a busy machine. Nothing is "
            f"known of GPUs.",
            "run this again: the second time most of it is in memory.",
        )
    if t.seconds > 3:
        yield Finding(
            "note", f"`import torch` took {t.seconds:.1f} s: the first rank cell takes at least as long."
        )
    if not t.forks:
        yield Finding(
            "problem",
            "a fork of a process that has imported torch cannot compute here. Ranks are such forks"
            + (
                f" (LD_PRELOAD is {f.environment['LD_PRELOAD']!r})." if "LD_PRELOAD" in f.environment else "."
            ),
            "start Jupyter without LD_PRELOAD, debuggers and profilers.",
        )
    elif t.threads > 1:
        yield Finding(
            "note",
            f"importing torch starts {t.threads - 1} thread{'s' if t.threads > 2 else ''} here, and ranks are forks "
            f"of that process. A fork was tried, and it computes.",
        )


def _gpus(f: Facts) -> Iterator[Finding]:
    t, visible = f.torch, f.environment.get("CUDA_VISIBLE_DEVICES")
    if t.problem or t.late:
        return
    if not t.gpus:
        if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
            yield Finding(
                "note",
                f"CUDA_VISIBLE_DEVICES is {visible!r}: it hides every GPU.",
                "`unset CUDA_VISIBLE_DEVICES`; in a Slurm job ask for GPUs (`--gpus-per-node=1`).",
            )
        elif f.driver and not t.cuda:
            yield Finding(
                "problem",
                f"there is a GPU ({f.driver}), and this torch, {t.version}, is built for the CPU.",
                "install the build for CUDA: `pip install --force-reinstall torch==2.13.0`, or see pytorch.org.",
            )
        elif f.driver:
            yield Finding(
                "problem",
                f"there is a GPU ({f.driver}), and torch (CUDA {t.cuda}) sees none"
                + (f": {t.gpu_problem}." if t.gpu_problem else "."),
                "a driver older than torch's CUDA is the usual reason: `nvidia-smi` prints the newest CUDA that it "
                "knows.",
            )
        else:
            yield Finding("works", "no GPU: `--device cuda` says so, everything else runs on the CPU.")
        return
    names = ", ".join(f"{t.gpus.count(n)} x {n}" for n in dict.fromkeys(t.gpus))
    nccl = ".".join(map(str, t.nccl)) or "none"
    yield Finding(
        "works",
        f"{names}; CUDA {t.cuda}, nccl {nccl}. A world of {len(t.gpus)} rank{'s' * (len(t.gpus) > 1)} has a GPU for "
        f"each.",
    )
    machine = devices.Machine(len(t.gpus), t.nccl, f.mps)
    choice = devices.choose(4, "cuda", machine)
    yield Finding("works", f"`%%ranks 4 --device cuda`: {choice.note}.")
    if choice.better:
        yield Finding("note", choice.better)
    if choice.shared and f.mps.running:
        yield Finding("note", "CUDA MPS runs already: ranks that share a GPU compute side by side.")
    if visible is not None and len(t.gpus) < len([v for v in visible.split(",") if v.strip()]):
        yield Finding("note", f"CUDA_VISIBLE_DEVICES is {visible!r}, and torch sees {len(t.gpus)} of them.")
    if f.environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Finding(
            "note", "CUDA_LAUNCH_BLOCKING is 1: nothing overlaps, and lesson 6 shows nothing.", "unset it."
        )
    if t.gpu_problem:
        yield Finding("problem", f"the GPU does not work: {t.gpu_problem}.")
    if len(t.gpus) > 1:
        kinds = _paths(f.links)
        if kinds:
            via = "; ".join(
                f"{code}, {hardware.path_kind(code).meaning.replace('#', code[2:])}" for code in kinds
            )
            yield Finding("note", f"between the GPUs lies {via}.")
        if t.p2p is False:
            yield Finding(
                "note",
                "the GPUs cannot read each other's memory: nccl goes through the host's memory, which is slower.",
                "in a virtual machine or container this can be a setting (ACS, IOMMU).",
            )


def _paths(table: str) -> list[str]:
    """The kinds of paths between GPUs in the table that `nvidia-smi topo -m` printed, nearest first."""
    try:
        topology = hardware.parse_topology(table)
    except ValueError:  # it printed none
        return []
    kinds = {topology.path(a, b) for a in topology.gpus for b in topology.gpus if a != b}
    return sorted(kinds, key=lambda code: hardware.path_kind(code).order)


_LOOKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _torch,
    _world,
    _gpus,
    _shared_memory,
    _network,
    _limits,
    _folders,
    _place,
)


def report(facts: Facts) -> str:
    """What `findings` say, as text of at most 120 columns."""
    lines = [f"rankcell doctor on {facts.host}"]
    for finding in findings(facts):
        lines += _wrapped(f"  {finding.kind:<8} ", finding.text)
        if finding.do:
            lines += _wrapped(" " * 11 + "-> ", finding.do)
    return "\n".join(lines)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        120,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def compare(nodes: Sequence[Facts]) -> list[Finding]:
    """What differs between the nodes of an allocation and must not."""
    found = []
    asked: tuple[tuple[str, Callable[[Facts], Any]], ...] = (
        ("torch", lambda f: f.torch.version or "none"),
        ("Python", lambda f: f.python),
        ("the number of GPUs", lambda f: len(f.torch.gpus)),
        ("nccl", lambda f: ".".join(map(str, f.torch.nccl)) or "none"),
    )
    for what, of in asked:
        values = {f.host: of(f) for f in nodes}
        if len(set(values.values())) > 1:
            said = ", ".join(f"{value} on {host}" for host, value in values.items())
            found.append(Finding("problem", f"{what} is not the same on all nodes: {said}."))
    return found


# --- the machine is looked at from here on ---


def gather() -> Facts:
    """Look at this machine; takes at most about 5 s, with a GPU that is slow to start up to 25."""
    started = time.monotonic()
    probe = subprocess.Popen(
        [sys.executable, "-c", _PROBE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    host = socket.gethostname()
    smi = shutil.which("nvidia-smi")
    driver = _said(smi, "--query-gpu=name,driver_version", "--format=csv,noheader") if smi else ""
    temporary = os.environ.get("TMPDIR") or "/tmp"
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written anywhere
        pass
    limit = {kind: _limit(getattr(resource, f"RLIMIT_{kind}", None)) for kind in ("NPROC", "MEMLOCK", "AS")}
    return Facts(
        host=host,
        linux=system.LINUX,
        kernel=os.uname().release,
        python=".".join(map(str, sys.version_info[:3])),
        cores=system.available_cores(),
        cores_of_machine=os.cpu_count() or 1,
        memory=system.available_memory(),
        memory_of_machine=_memory_of_machine(),
        container=_container(os.environ, os.uname().release),
        loopback=system.interface_problem(os.environ.get("GLOO_SOCKET_IFNAME")),
        address=_address(host),
        files=system.open_file_limit(),
        processes=limit["NPROC"],
        locked=limit["MEMLOCK"],
        address_space=limit["AS"],
        shared=_folder("/dev/shm"),
        home=_folder(os.environ.get("HOME") or "/"),
        temporary=_folder(temporary),
        here=_folder(str(Path.cwd())),
        environment={name: os.environ[name] for name in WATCHED if name in os.environ},
        driver=driver,
        links=_said(smi, "topo", "-m") if smi else "",
        mps=devices.look_for_mps(),
        torch=_hear(probe, started + (GPU if driver else PROBE)),
    )


# what torch is asked: GPUs last, as they may take long or never answer
_PROBE = (
    inspect.getsource(devices.nccl_version)
    + """
import json, os, sys, time
start = time.monotonic()
import torch
said = {"version": torch.__version__, "seconds": time.monotonic() - start, "cuda": torch.version.cuda or ""}
try:
    said["threads"] = len(os.listdir("/proc/self/task"))
except OSError:
    pass
pid = os.fork()
if pid == 0:
    os._exit(0 if (torch.ones(64, 64) @ torch.ones(64, 64)).sum().item() == 64.0**3 else 1)
end, status = time.monotonic() + 1.5, None
while status is None and time.monotonic() < end:
    done, code = os.waitpid(pid, os.WNOHANG)
    status = code if done else None
    time.sleep(0.005)
if status is None:
    os.kill(pid, 9)
said["forks"] = status == 0
print(json.dumps(said), flush=True)
try:
    if torch.cuda.is_available():
        n = torch.cuda.device_count()
        said["gpus"] = [torch.cuda.get_device_properties(i).name for i in range(n)]
        said["nccl"] = nccl_version()
        said["p2p"] = all(torch.cuda.can_device_access_peer(i, j) for i in range(n) for j in range(n) if i != j)
        print(json.dumps(said), flush=True)
        (torch.ones(8, device="cuda") * 2).sum().item()
except Exception as error:
    said["gpu_problem"] = str(error).strip().splitlines()[0][:200]
print(json.dumps(said), flush=True)
"""
)


def _hear(probe: "subprocess.Popen[str]", deadline: float) -> Torch:
    """What the process that asks torch has said until `deadline`."""
    late = False
    try:
        out, err = probe.communicate(timeout=max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        late = True
        probe.kill()
        out, err = probe.communicate()
    return heard(out, err, late=late)


def heard(out: str, err: str, *, late: bool) -> Torch:
    """`Torch` from what the process has printed until it ended, or until its time was over (`late`)."""
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if not lines and late:
        return Torch(version=_installed("torch"), late=True)
    if not lines:
        last = (err.strip().splitlines() or ["it ended without a word"])[-1]
        return Torch(problem=f"`import torch` fails in this environment: {last}")
    said = json.loads(lines[-1])
    if late:
        said["gpu_problem"] = f"it did not answer within {GPU:.0f} s"
    known = {f.name for f in fields(Torch)}
    return Torch(**{k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if k in known})


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _said(command: str | None, *words: str) -> str:
    try:
        done = subprocess.run(
            [str(command), *words], capture_output=True, text=True, timeout=QUICK, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _limit(kind: int | None) -> int:
    if kind is None:
        return -1
    soft = resource.getrlimit(kind)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _memory_of_machine() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _address(host: str) -> str:
    """The address of `host`; "" if nobody knows one within a second."""
    code = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
    return _said(sys.executable, "-S", "-c", code, host)


def _container(environment: Mapping[str, str], release: str) -> str:
    for name, what in (
        ("APPTAINER_CONTAINER", "Apptainer"),
        ("SINGULARITY_CONTAINER", "Singularity"),
        ("COLAB_RELEASE_TAG", "Colab"),
        ("KAGGLE_KERNEL_RUN_TYPE", "Kaggle"),
        ("KUBERNETES_SERVICE_HOST", "Kubernetes"),
    ):
        if environment.get(name):
            return what
    if "microsoft" in release.lower():
        return "WSL2"
    for path, what in (("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman")):
        if Path(path).exists():
            return what
    return "gVisor" if "gvisor" in _read("/proc/version").lower() else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _folder(path: str) -> Folder:
    try:
        room = os.statvfs(path)
    except OSError:
        return Folder(path, "", writable=False)
    writable = os.access(path, os.W_OK | os.X_OK) and not room.f_flag & os.ST_RDONLY
    return Folder(
        path, kind_of_mount(path, _read("/proc/self/mounts")), writable, room.f_bavail * room.f_frsize
    )


def kind_of_mount(path: str, mounts: str) -> str:
    """The kind of file system that `path` lies on, by the text of /proc/self/mounts; "" where unknown."""
    best, kind = -1, ""
    real = os.path.realpath(path)
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ").rstrip("/")
        if (real == point or real.startswith(f"{point}/")) and len(point) >= best:
            best, kind = len(point), words[2]
    return kind


# --- the command ---


def main(*, nodes: bool = False, as_json: bool = False) -> int:
    """Print the report on this machine, or on all `nodes` of the allocation; 1 if there is a problem."""
    if nodes:
        return _all_nodes()
    facts = gather()
    print(json.dumps(asdict(facts)) if as_json else report(facts))
    return int(any(f.kind == "problem" for f in findings(facts)))


def _all_nodes() -> int:
    count = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or ""
    if not count.isdecimal() or shutil.which("srun") is None:
        print(
            "--nodes looks at the nodes of a Slurm allocation, and this process runs in none. Ask for one: "
            "`salloc --nodes=2 rankcell doctor --nodes`."
        )
        return 2
    command = [
        "srun",
        "--overlap",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
    ]
    command += ["--mpi=none", "--export=ALL", sys.executable, "-m", "rankcell.command", "doctor", "--json"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SRUN, check=False
        )
        out, err = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        out, err = _text(late.stdout), _text(late.stderr) or f"srun did not end within {SRUN:.0f} s."
    nodes = sorted((of_json(line) for line in out.splitlines() if line.startswith("{")), key=lambda f: f.host)
    found = compare(nodes)
    if len(nodes) < int(count):
        last = (err.strip().splitlines() or ["They said nothing."])[-1]
        found.append(Finding("problem", f"{len(nodes)} of {count} nodes answered. {last}"))
    for facts in nodes:
        print(report(facts), end="\n\n")
    print(f"all {count} nodes")
    for finding in found or [
        Finding("works", "torch, Python, nccl and the number of GPUs are the same everywhere.")
    ]:
        print("\n".join(_wrapped(f"  {finding.kind:<8} ", finding.text)))
    return int(bool([f for f in (*found, *(f for n in nodes for f in findings(n))) if f.kind == "problem"]))


def _text(said: Any) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def of_json(line: str) -> Facts:
    """`Facts` from the JSON that `--json` prints."""
    said = json.loads(line)
    for name in ("shared", "home", "temporary", "here"):
        said[name] = Folder(**said[name])
    said["mps"] = devices.Mps(**said["mps"])
    said["torch"] = Torch(**{k: tuple(v) if isinstance(v, list) else v for k, v in said["torch"].items()})
    return Facts(**said)


def add_command(commands: Any) -> None:
    """Add `doctor` to the sub-commands of `rankcell`."""
    parser = commands.add_parser(
        "doctor", help="what of this machine works for rank cells, what does not, and what to do"
    )
    parser.add_argument("--nodes", action="store_true", help="look at all nodes of this Slurm allocation")
    parser.add_argument("--json", action="store_true", help="the facts as one line of JSON")
    parser.set_defaults(run=lambda options: main(nodes=options.nodes, as_json=options.json))
