"""On a node: holds the node's ranks, does what the notebook says, passes on what comes from them, and ends with it."""

import json
import os
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from .. import errors
from ..engine import channel, launch, system
from ..engine.local import Local, room

MAX_WAITING = 8 << 20  # bytes that an agent holds for a notebook that does not read: then its ranks wait


@dataclass(frozen=True)
class Hello:
    index: int  # of the node in the allocation
    name: str
    gpus: int
    room: tuple[int, str]  # how many ranks fit, and why


@dataclass(frozen=True)
class Order:
    """What the notebook tells an agent: "world" (once, `Local`'s arguments), "clock", or a method of `Local`."""

    what: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class Did(NamedTuple):
    """An agent has done an order: "start" (`result`: process ids by rank) or "end" (ranks; they say nothing more)."""

    what: str
    result: Any
    problem: str = ""  # why it could not


@dataclass
class Agent:
    """The ranks of one node, and the notebook at the other end of `talk`."""

    talk: channel.Channel
    interface: str
    ranks: Local | None = None

    def serve(self) -> None:
        """Until the notebook is gone."""
        talk = self.talk
        while True:
            reads: list[Any] = [talk]
            if self.ranks is not None and talk.unsent < MAX_WAITING:
                reads.append(self.ranks)
            readable, writable, _ = select.select(reads, [talk] if talk.unsent else [], [])
            if writable:
                talk.push()
            if self.ranks is not None and self.ranks in readable:
                for event in self.ranks.pump(0.0):
                    talk.post(event)
            for order in talk.poll() if talk in readable else ():
                self._do(order)

    def _do(self, order: Order) -> None:
        if order.what == "clock":
            self.talk.post(time.monotonic())
        elif order.what == "world":
            self.ranks = Local(*order.arguments, interface=self.interface)
        else:
            assert self.ranks is not None
            problem = ""
            try:
                getattr(self.ranks, order.what)(*order.arguments, **order.options)
            except errors.StartError as error:
                problem = str(error)
            if order.what == "start":
                self.talk.post(Did("start", {} if problem else self.ranks.pids, problem))
            elif order.what == "end":
                self.talk.post(Did("end", tuple(order.arguments[0])))


def main() -> NoReturn:
    """The life of an agent: connect, serve, end all ranks."""
    told = json.loads(Path(sys.argv[1]).read_text())
    launch.warm_up()  # imports torch in the background, while we connect
    try:
        talk = channel.connect(told["addresses"], told["port"], bytes.fromhex(told["key"]))
    except OSError as error:
        why = "cannot reach the notebook. Its machine must accept connections from the nodes."
        sys.exit(f"{socket.gethostname()} {why} Tried:\n{error}")
    import torch

    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    talk.send(Hello(int(os.environ.get("SLURM_NODEID", "0")), name, torch.cuda.device_count(), room()))
    agent = Agent(talk, system.interface_of(talk.socket.getsockname()[0]) or system.LOOPBACK)
    try:
        agent.serve()
    except (EOFError, OSError):  # the notebook has ended, or has no more use for us
        pass
    finally:
        if agent.ranks is not None:
            agent.ranks.stop()
        os._exit(0)
