"""In the notebook: the ranks of a world that live on several nodes of the allocation that it runs in."""

import contextlib
import os
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import errors
from ..engine import channel, devices, system
from ..engine.host import Host
from ..engine.messages import HostEvent, ProcessExited, StartRank
from .agent import Did, Hello, Order

START_TIMEOUT = 120.0  # seconds for the agents to connect: Slurm may have to wait for the nodes
HELLO = 60.0  # seconds for an agent that has proved itself to say hello: it imports torch first
LOOKS_AT_CLOCK = 5  # the one with the quickest answer counts: half of its way is the doubt


@dataclass
class _Node:
    name: str
    channel: channel.Channel
    address: str  # ours, as this node reaches it
    gpus: int
    room: tuple[int, str]
    offset: float = 0.0  # seconds by which its clock was ahead of ours when the world was started
    alive: bool = True

    def compare_clocks(self) -> None:
        """Find `offset`. Nothing else is under way yet: the answer is the next message."""
        looks = []
        for _ in range(LOOKS_AT_CLOCK):
            asked = time.monotonic()
            self.channel.send(Order("clock"))
            theirs, now = self.channel.receive(), time.monotonic()
            looks.append((now - asked, theirs - (asked + now) / 2))
        self.offset = min(looks)[1]


class Nodes(Host):
    """The ranks of a world on `nodes` nodes of this allocation, `world_size / nodes` on each, in blocks. Raises
    AllocationError: not inside a Slurm allocation, or one with fewer nodes, or srun could not start; WorldSizeError:
    the ranks cannot be spread evenly, or do not fit; ValueError: there is no such device.
    """

    def __init__(self, world_size: int, nodes: int, device: str) -> None:
        self._per_node = _check(world_size, nodes)
        self.ranks = range(world_size)
        self.pids = {}
        self._nodes: list[_Node] = []
        # ranks whose end was ordered: what they said before they ended is not heard any more
        self._ending: Counter[int] = Counter()
        self._lost: list[HostEvent] = []
        self._store: Any = None
        self._srun: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()
        try:
            self._start_agents(nodes)
            self.names = [n.name for n in self._nodes]
            for node in self._nodes:
                if self._per_node > node.room[0]:
                    raise errors.WorldSizeError(f"{self._per_node} ranks do not fit on {node.name}: {node.room[1]}")
            gpus = min(n.gpus for n in self._nodes) * nodes
            self.choice = devices.choose(world_size, device, devices.look(gpus, mps=False))
        except BaseException:
            self.stop()
            raise
        for node in self._nodes:
            self._tell(node, Order("world", (world_size, self.choice)))

    def place_of(self, rank: int) -> tuple[int, int, str]:
        return rank % self._per_node, self._per_node, self._node_of(rank).name

    def address_for(self, rank: int) -> str:
        if self._store is None:  # held by this process; the ranks of all nodes find each other there
            import torch.distributed as dist

            listener = socket.create_server(("", 0), backlog=1024)
            self._port = port = listener.getsockname()[1]
            how: Any = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
            self._store = dist.TCPStore("127.0.0.1", port, None, True, **how)
        return f"{self._node_of(rank).address}:{self._port}"

    def reachable(self, rank: int) -> bool:
        return self._node_of(rank).alive

    def clock_offset(self, rank: int) -> float:
        return self._node_of(rank).offset

    def start(self, orders: Sequence[StartRank]) -> None:
        self._order("start", orders)

    def send(self, ranks: Sequence[int], message: bytes, *, control: bool = False) -> None:
        self._order("send", ranks, message, control=control)

    def kill(self, ranks: Sequence[int]) -> None:
        self._order("kill", ranks)

    def end(self, ranks: Sequence[int]) -> None:
        self._ending.update(rank for rank in ranks if self.reachable(rank))
        self._order("end", ranks)

    def pump(self, timeout: float) -> list[HostEvent]:
        found: list[HostEvent] = []
        with selectors.DefaultSelector() as selector:
            for node in self._nodes:
                if node.alive:
                    write = selectors.EVENT_WRITE if node.channel.unsent else 0
                    selector.register(node.channel, selectors.EVENT_READ | write, node)
            for key, ready in selector.select(0.0 if self._lost else timeout):
                node = key.data
                try:
                    if ready & selectors.EVENT_WRITE:
                        node.channel.push()
                    for message in node.channel.poll() if ready & selectors.EVENT_READ else ():
                        self._take(node, message, found)
                except (EOFError, OSError):
                    self._lose(node)
        lost, self._lost = self._lost, []
        return found + lost

    def _take(self, node: _Node, message: Any, found: list[HostEvent]) -> None:
        if not isinstance(message, Did):
            if not self._ending[message.rank]:
                found.append(message)
        elif message.problem:
            raise errors.StartError(f"on {node.name}: {message.problem}")
        elif message.what == "start":
            self.pids.update(message.result)
        else:
            self._ending.subtract(message.result)

    def stop(self) -> None:
        """End all ranks and the agents, and with them the job step. Safe to call twice."""
        patience = 1.0 if all(node.alive for node in self._nodes) else 0.0
        for node in self._nodes:
            node.alive = False
            node.channel.close()
        # the agents end when their channel does, and srun with them, unless it waits for a node that is gone
        if self._srun is not None:
            for end in (self._srun.terminate, self._srun.kill):
                try:
                    self._srun.wait(patience)
                except subprocess.TimeoutExpired:
                    patience = 1.0
                    end()
            self._srun.wait()
        self._log.close()
        self._store = None

    def _start_agents(self, nodes: int) -> None:
        key = secrets.token_bytes(32)
        with socket.create_server(("", 0), backlog=max(nodes, 8)) as listener:
            path = channel.write_key(key, listener.getsockname()[1])
            try:
                how: Any = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": subprocess.STDOUT}
                how["start_new_session"] = True  # an interrupt of the notebook is for the ranks' cell, not for srun
                self._srun = subprocess.Popen(_command(nodes, path), **how)
                self._nodes = self._accept(listener, key, nodes, self._srun)
            finally:
                path.unlink(missing_ok=True)
        for node in self._nodes:
            node.compare_clocks()

    def _accept(self, listener: socket.socket, key: bytes, nodes: int, srun: "subprocess.Popen[bytes]") -> list[_Node]:
        """The agents that have connected, when all have."""
        listener.settimeout(0.1)
        deadline = time.monotonic() + START_TIMEOUT
        found: dict[int, _Node] = {}
        while len(found) < nodes:
            if srun.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                said = self._log.read()[-2000:].decode(errors="replace").strip()
                ended = f"{len(found)} of {nodes} nodes answered within {START_TIMEOUT:.0f} s"
                if srun.returncode is not None:
                    ended = f"srun ended with code {srun.returncode}"
                how = "Try `!srun --overlap hostname` in the notebook: it must name the nodes of the allocation."
                raise errors.AllocationError(f"no ranks on {nodes} nodes: {ended}.\n{said}".rstrip() + f"\n{how}")
            with contextlib.suppress(TimeoutError):
                sock, _ = listener.accept()
                # each in a thread of its own: a stranger who says nothing keeps nobody waiting
                threading.Thread(target=_greet, args=(sock, key, found), daemon=True).start()
        return [node for _, node in sorted(found.items())]

    def _node_of(self, rank: int) -> _Node:
        return self._nodes[rank // self._per_node]

    def _order(self, what: str, items: Sequence[Any], *more: Any, **options: Any) -> None:
        """Have the agents do `what`, each with those of `items` that are its ranks, or about them."""
        for i, node in enumerate(self._nodes):
            if mine := [item for item in items if getattr(item, "rank", item) // self._per_node == i]:
                self._tell(node, Order(what, (mine, *more), options))

    def _tell(self, node: _Node, order: Order) -> None:
        if node.alive:
            try:
                node.channel.post(order)
            except OSError:
                self._lose(node)

    def _lose(self, node: _Node) -> None:
        if not node.alive or self._srun is None:
            return
        node.alive = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._srun.wait(0.2)
        step = self._srun.returncode is not None
        how = "where the job step has ended" if step else "which no longer answers (switched off, or cut off)"
        how = f"was on {node.name}, {how}"
        self._lost += [ProcessExited(rank, how) for rank in self.ranks if self._node_of(rank) is node]


def _command(nodes: int, key: Path) -> list[str]:
    """The command that starts an agent on each node: beside other steps of this allocation (srun nvidia-smi), the
    ranks of a node sharing its cores. An agent that cannot reach us ends the step, with its reason; the loss of a node
    is our message to tell, and not the end of the step.
    """
    places = f"--overlap --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpu-bind=none"
    ends = "--kill-on-bad-exit=1 --no-kill --mpi=none --export=ALL --job-name=rankcell"
    agent = sys.executable, "-c", "from rankcell.nodes.agent import main; main()", str(key)
    return ["srun", *places.split(), *ends.split(), *agent]


def _greet(sock: socket.socket, key: bytes, found: dict[int, _Node]) -> None:
    """Hear who is at the other end of `sock`, and note it if it is an agent of ours."""
    try:
        channel.authenticate(sock, key, server=True)
        sock.settimeout(HELLO)
        talk = channel.Channel(sock)
        hello: Hello = talk.receive()
        sock.settimeout(None)
        system.keep_alive(sock, reads_always=True)
    except (OSError, EOFError):  # not one of ours: nothing it said was read
        sock.close()
    else:
        found[hello.index] = _Node(hello.name, talk, sock.getsockname()[0], hello.gpus, hello.room)


def _check(world_size: int, nodes: int) -> int:
    """Ranks on each node, if this allocation has room for so many nodes."""
    if nodes < 1:
        raise errors.WorldSizeError(f"a world needs at least 1 node, got {nodes}.")
    per_node = world_size // nodes
    if world_size % nodes:
        take = f"Take {per_node * nodes or nodes} or {(per_node + 1) * nodes} ranks."
        raise errors.WorldSizeError(f"{world_size} ranks cannot be spread evenly over {nodes} nodes. {take}")
    line = f"`salloc --nodes={nodes} --ntasks-per-node={per_node} jupyter lab`"
    if "SLURM_JOB_ID" not in os.environ:
        said = f"{nodes} nodes need a Slurm allocation, and this notebook runs in none."
        raise errors.AllocationError(f"{said} Start JupyterLab in one: {line}")
    have = int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)
    if nodes > have:
        names = os.environ.get("SLURM_JOB_NODELIST", "unnamed")
        said = f"{nodes} nodes were asked for, and this allocation has {have} ({names})."
        raise errors.AllocationError(f"{said} Use `--nodes {have}`, or a larger one: {line}")
    if shutil.which("srun") is None:
        said = "this notebook runs in a Slurm allocation, but srun is not on its PATH."
        how = "Add the folder of Slurm's commands to PATH (`module load slurm` on many clusters)"
        raise errors.AllocationError(f"{said} {how} before you start JupyterLab.")
    return per_node
