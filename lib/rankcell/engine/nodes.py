"""The ranks of a world that live on several nodes of a Slurm allocation.

`srun` starts one agent per node (`agent.py`). The agent connects back to the notebook, both prove that they know
a key, and from then on it starts, feeds and ends the ranks of its node as the notebook's process does on one
machine. Slurm launches and ends; nothing here replaces it.

The key travels in a file that only the user can read, on the file system that the nodes share, never on a
command line or in the environment. What is sent after the check is not encrypted, as torch's own traffic
between nodes is not.
"""

import contextlib
import json
import os
import queue
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .. import errors
from . import channel, devices, system
from .messages import Clock, Ended, Hello, HostEvent, Order, ProcessExited, Started, StartRank

START_TIMEOUT = 120.0  # seconds for the agents to connect: Slurm may have to wait for the nodes
CLOCKS_AGREE_FOR = 10.0  # seconds after which the clocks are compared anew
DRIFT = 1e-4  # seconds per second by which two clocks may drift apart: twice what cheap quartz does
HELLO = 60.0  # seconds for an agent that has proved itself to say hello: it imports torch first
_FOLDER = ".rankcell"  # in the home directory, which a cluster's nodes share


@dataclass
class _Node:
    """One node, as the notebook knows it."""

    name: str
    channel: channel.Channel
    address: str  # ours, as this node reaches it
    gpus: int
    room: tuple[int, str]
    offset: float = 0.0  # seconds by which its clock is ahead of ours
    compared: float = 0.0  # when `offset` was found
    doubt: float = float("inf")  # seconds by which it may have been wrong then
    alive: bool = True


class Nodes:
    """The ranks of a world on `nodes` nodes of this allocation, `world_size / nodes` on each, in blocks.

    A `host.Host`, as `host.ThisMachine` is.

    Raises:
        AllocationError: not inside a Slurm allocation, or one with fewer nodes, or srun could not start.
        WorldSizeError: the ranks cannot be spread evenly, or do not fit. ValueError: there is no such device.
    """

    on = ""

    def __init__(self, world_size: int, nodes: int, device: str) -> None:
        self._per_node = _check(world_size, nodes)
        self.ranks = range(world_size)
        self._nodes: list[_Node] = []
        self._selector = selectors.DefaultSelector()
        # ranks whose end was ordered: what they said before they ended is not heard any more
        self._ending: Counter[int] = Counter()
        self._pids: dict[int, int] = {}
        self._lost: list[HostEvent] = []
        self._store: Any = None
        self.notes: list[str] = []
        self._compared = 0.0
        self._log = tempfile.TemporaryFile()
        try:
            self._start_agents(nodes)
            for node in self._nodes:
                if self._per_node > node.room[0]:
                    raise errors.WorldSizeError(
                        f"{self._per_node} ranks do not fit on {node.name}: {node.room[1]}"
                    )
            machine = devices.look(min(n.gpus for n in self._nodes) * nodes, nodes)
            self.choice = devices.choose(world_size, device, machine)
        except BaseException:
            self.stop()
            raise
        for node in self._nodes:
            world = (world_size, self.choice.backend, dict(self.choice.environment))
            self._tell(node, Order("world", world))

    @property
    def names(self) -> list[str]:
        """The names of the nodes, in the order of their ranks."""
        return [n.name for n in self._nodes]

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id on its node."""
        return self._pids

    def place_of(self, rank: int) -> tuple[int, int, str]:
        """Its local rank, how many ranks are on its node, and the node's name."""
        return rank % self._per_node, self._per_node, self._nodes[rank // self._per_node].name

    def address_for(self, rank: int) -> str:
        """Host and port of the store, as the node of `rank` reaches it."""
        if self._store is None:  # held by this process; the ranks of all nodes find each other there
            import torch.distributed as dist

            listener = socket.create_server(("", 0), backlog=1024)
            self._port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                "127.0.0.1",
                self._port,
                None,
                True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return f"{self._nodes[rank // self._per_node].address}:{self._port}"

    def reachable(self, rank: int) -> bool:
        """Whether a process can be started in the place of `rank`."""
        return self._nodes[rank // self._per_node].alive

    def clock_offset(self, rank: int) -> float:
        """Seconds by which the clock of the rank's machine is ahead of ours."""
        if time.monotonic() - self._compared > CLOCKS_AGREE_FOR:
            self._compare_clocks()
        return self._nodes[rank // self._per_node].offset

    def prepare_store(self, generation: int) -> None:
        """The notebook holds the store, in memory, and it is always there."""

    def fallback(self, error: errors.StartError) -> None:
        """There is none."""

    def start(self, orders: Sequence[StartRank]) -> None:
        """Start a process for each of `orders`; its `Joined` tells more."""
        for node, mine in self._by_node(orders, key=lambda b: b.rank):
            self._tell(node, Order("start", (mine,)))

    def send(self, ranks: Sequence[int], message: bytes, *, control: bool = False) -> None:
        """Give a packed message to the main threads of `ranks`, or to their control threads, without waiting."""
        for node, mine in self._by_node(ranks):
            self._tell(node, Order("send", (mine, message), {"control": control}))

    def kill(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks` at once; `ProcessExited` follows."""
        for node, mine in self._by_node(ranks):
            self._tell(node, Order("kill", (mine,)))

    def end(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks`, and hear nothing of them any more."""
        for node, mine in self._by_node(ranks):
            if node.alive:
                self._ending.update(mine)
                self._tell(node, Order("end", (mine,)))

    def pump(self, timeout: float) -> list[HostEvent]:
        """What has come from the ranks, after waiting at most `timeout` seconds for something."""
        found: list[HostEvent] = []
        for key, ready in self._selector.select(0.0 if self._lost else timeout):
            node = key.data
            try:
                if ready & selectors.EVENT_WRITE:
                    node.channel.push()
                    self._watch(node)
                messages = node.channel.poll() if ready & selectors.EVENT_READ else []
            except (EOFError, OSError):
                self._lose(node)
                continue
            for message in messages:
                self._take(node, message, found)
        found += self._lost
        self._lost = []
        return found

    def _take(self, node: _Node, message: Any, found: list[HostEvent]) -> None:
        if isinstance(message, Clock):
            _agree(node, sent=message.asked, theirs=message.theirs)
        elif isinstance(message, Ended):
            self._ending.subtract(message.ranks)
        elif isinstance(message, Started):
            self._pids.update(message.pids)
            if message.problem:
                raise errors.StartError(f"on {node.name}: {message.problem}")
        elif not self._ending[message.rank]:
            found.append(message)

    def stop(self) -> None:
        """End all ranks and the agents, and with them the job step. Safe to call twice."""
        whole = all(node.alive for node in self._nodes)
        for node in self._nodes:
            node.alive = False
            node.channel.close()
        process = getattr(self, "_srun", None)
        # the agents end when their channel does, and srun with them, unless it waits for a node that is gone
        for end, patience in ((None, 1.0 if whole else 0.0), ("terminate", 1.0), ("kill", None)):
            if process is None or process.poll() is not None:
                break
            if end is not None:
                getattr(process, end)()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        self._log.close()
        self._selector.close()
        self._store = None

    def _start_agents(self, nodes: int) -> None:
        listener = socket.create_server(("", 0), backlog=max(nodes, 8))
        key = secrets.token_bytes(32)
        path = write_key(key, listener.getsockname()[1])
        try:
            self._srun = subprocess.Popen(
                _srun(nodes, path),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt of the notebook is for the ranks' cell, not for srun
            )
            self._nodes = _accept(listener, key, nodes, self._srun, self._log)
        finally:
            listener.close()
            path.unlink(missing_ok=True)
        for node in self._nodes:
            for _ in range(5):  # nothing else is under way yet: the answer is the next message
                node.channel.send(Order("clock", (time.monotonic(),)))
                answer: Clock = node.channel.receive()
                _agree(node, sent=answer.asked, theirs=answer.theirs)
            self._selector.register(node.channel, selectors.EVENT_READ, node)
        self._compared = time.monotonic()

    def _compare_clocks(self) -> None:
        """Ask every node for its time. The answer is taken in when it comes, and counts from then on."""
        self._compared = time.monotonic()
        for node in self._nodes:
            self._tell(node, Order("clock", (time.monotonic(),)))

    def _by_node(
        self, items: Sequence[Any], key: Callable[[Any], int] = lambda rank: rank
    ) -> list[tuple[_Node, list[Any]]]:
        found: dict[int, list[Any]] = {}
        for item in items:
            found.setdefault(key(item) // self._per_node, []).append(item)
        return [(self._nodes[i], mine) for i, mine in sorted(found.items())]

    def _tell(self, node: _Node, order: Order) -> None:
        if not node.alive:
            return
        try:
            node.channel.post(order)
            self._watch(node)
        except OSError:
            self._lose(node)

    def _watch(self, node: _Node) -> None:
        """Listen to a node, and for the moment in which it takes what is not on its way yet."""
        write = selectors.EVENT_WRITE if node.channel.unsent else 0
        self._selector.modify(node.channel, selectors.EVENT_READ | write, node)

    def _lose(self, node: _Node) -> None:
        if not node.alive:
            return
        node.alive = False
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(node.channel)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._srun.wait(0.2)
        step = self._srun.returncode is not None
        how = "where the job step has ended" if step else "which no longer answers (switched off, or cut off)"
        first = self._nodes.index(node) * self._per_node
        self._lost += [
            ProcessExited(r, f"was on {node.name}, {how}") for r in range(first, first + self._per_node)
        ]


def _srun(nodes: int, key: Path) -> list[str]:
    """The command that starts an agent on each node."""
    return [
        "srun",
        "--overlap",  # other steps of this allocation (srun nvidia-smi) still find room
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",  # the ranks of a node share its cores
        "--kill-on-bad-exit=1",  # an agent that cannot reach us ends the step, with its reason
        "--no-kill",  # the loss of a node is our message to tell, not the end of the step
        "--mpi=none",
        "--export=ALL",
        "--job-name=rankcell",
        sys.executable,
        "-m",
        "rankcell.engine.agent",
        str(key),
    ]


def _accept(
    listener: socket.socket, key: bytes, nodes: int, srun: "subprocess.Popen[bytes]", log: IO[bytes]
) -> list[_Node]:
    """The agents that have connected, when all have."""
    listener.settimeout(0.1)
    deadline = time.monotonic() + START_TIMEOUT
    found: dict[int, _Node] = {}
    arrived: queue.Queue[tuple[int, _Node]] = queue.Queue()
    while len(found) < nodes:
        if srun.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            said = log.read()[-2000:].decode(errors="replace").strip()
            ended = (
                f"srun ended with code {srun.returncode}"
                if srun.returncode is not None
                else f"{len(found)} of {nodes} nodes answered within {START_TIMEOUT:.0f} s"
            )
            raise errors.AllocationError(
                f"no ranks on {nodes} nodes: {ended}.\n{said}".rstrip()
                + "\nTry `!srun --overlap hostname` in the notebook: it must name the nodes of the allocation."
            )
        with contextlib.suppress(TimeoutError):
            sock, _ = listener.accept()
            # each in a thread of its own: a stranger who says nothing keeps nobody waiting
            threading.Thread(target=_greet, args=(sock, key, arrived), daemon=True).start()
        while not arrived.empty():
            index, node = arrived.get()
            found[index] = node
    return [node for _, node in sorted(found.items())]


def _check(world_size: int, nodes: int) -> int:
    """Ranks on each node, if this allocation has room for so many nodes."""
    if nodes < 1:
        raise errors.WorldSizeError(f"a world needs at least 1 node, got {nodes}.")
    if world_size % nodes:
        raise errors.WorldSizeError(
            f"{world_size} ranks cannot be spread evenly over {nodes} nodes. Take "
            f"{world_size // nodes * nodes or nodes} or {(world_size // nodes + 1) * nodes} ranks."
        )
    per_node = world_size // nodes
    line = f"salloc --nodes={nodes} --ntasks-per-node={per_node}"
    if "SLURM_JOB_ID" not in os.environ:
        raise errors.AllocationError(
            f"{nodes} nodes need a Slurm allocation, and this notebook runs in none. Start JupyterLab in "
            f"one: `{line} jupyter lab`"
        )
    have = int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)
    if nodes > have:
        raise errors.AllocationError(
            f"{nodes} nodes were asked for, and this allocation has {have} "
            f"({os.environ.get('SLURM_JOB_NODELIST', 'unnamed')}). Use `--nodes {have}`, or a larger one: "
            f"`{line} jupyter lab`"
        )
    if shutil.which("srun") is None:
        raise errors.AllocationError(
            "this notebook runs in a Slurm allocation, but srun is not on its PATH. Add the folder of "
            "Slurm's commands to PATH (`module load slurm` on many clusters) before you start JupyterLab."
        )
    return per_node


def write_key(key: bytes, port: int, *, name: str = "", **more: Any) -> Path:
    """The file that tells others where to connect and with which key. Only the user can read it.

    Raises:
        FileExistsError: there is one of this `name` already. OSError: the home directory cannot be written to.
    """
    folder = Path.home() / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    _sweep(folder)
    path = folder / f"{name or secrets.token_hex(8)}.json"
    addresses = [socket.gethostname(), *system.addresses()]
    text = json.dumps({"addresses": addresses, "port": port, "key": key.hex(), "pid": os.getpid(), **more})
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    return path


def _sweep(folder: Path) -> None:
    """Remove the files of processes of this machine that were killed before they could."""
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
            said = json.loads(path.read_text("utf-8"))
            if said["addresses"][0] == socket.gethostname():
                try:
                    os.kill(said["pid"], 0)  # only asks whether it is there
                except ProcessLookupError:
                    path.unlink()


def _agree(node: _Node, *, sent: float, theirs: float) -> None:
    """Take in a node's time, if it is surer than what we have: the clocks may have drifted apart since."""
    now = time.monotonic()
    doubt = (now - sent) / 2  # their clock was read somewhere between our question and their answer
    if doubt <= node.doubt + DRIFT * (now - node.compared):
        node.offset, node.doubt, node.compared = theirs - (sent + now) / 2, doubt, now


def _greet(sock: socket.socket, key: bytes, arrived: "queue.Queue[tuple[int, _Node]]") -> None:
    """Hear who is at the other end of `sock`, and announce it if it is an agent of ours."""
    try:
        channel.authenticate(sock, key, server=True)
        sock.settimeout(HELLO)
        talk = channel.Channel(sock)
        hello: Hello = talk.receive()
        sock.settimeout(None)
        system.keep_alive(sock, reads_always=True)
    except (PermissionError, OSError, EOFError):  # not one of ours: nothing it said was read
        sock.close()
        return
    arrived.put((hello.index, _Node(hello.name, talk, sock.getsockname()[0], hello.gpus, hello.room)))
