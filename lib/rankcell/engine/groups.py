"""Inside a rank: its process groups, and the connections behind them.

The rank joins a process group before its first cell, and a new one whenever a connection was closed. A cell may
make groups of its own, destroy them, and set the default group up again, as pasted scripts do: those calls are
watched like operations, because they wait for other ranks and open connections.
"""

import contextlib
import datetime
import functools
import inspect
import os
import socket
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import GroupError
from . import system
from .match import Signature, SignatureStore
from .messages import LEAVES, StartRank
from .operation import Operation, caller, forget_groups
from .record import Recorder

# of a group that names no limit: nccl's own, ten minutes, ends a rank that waits for one which computes
DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
# a group with a shorter limit is left to end its waits by itself
SHORT_TIMEOUT = datetime.timedelta(minutes=5)


class GroupCalls:
    """Makes process groups as the others can see it: as an operation in which this rank waits for them."""

    # of a group that is made without one; None: torch's own
    default_timeout: datetime.timedelta | None = None
    _adopting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # around what connects

    def __init__(self, recorder: Recorder, rank: int, world_size: int) -> None:
        self.recorder, self.rank, self.world_size = recorder, rank, world_size
        self._new_group, self._destroy = dist.new_group, dist.destroy_process_group
        # Whoever drops the last hold on a group of gloo's waits for its threads and keeps Python locked, and one that
        # has just done its part needs Python: torch 2.13 alone hangs so. These are held until that is long past.
        self.left: deque[Any] = deque(maxlen=32)

    def new_group(self, ranks: Any = None, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        """`dist.new_group`, compared between the ranks that must call it, before it opens a connection."""
        world = tuple(range(self.world_size))
        members = tuple(sorted(ranks)) if ranks is not None else world
        limit = timeout if timeout is not None else self.default_timeout
        local = bool(kwargs.get("use_local_synchronization", args[2] if len(args) > 2 else False))
        if local and self.rank not in members:
            return None
        make = functools.partial(self._new_group, ranks, limit, *args, **kwargs)
        text, beside = f"new_group({list(members)})", len(dist.distributed_c10d._world.pg_names) - 1
        if local:
            # its members alone come to it, in any order: nobody else counts it
            whom, label = members, f"new_group of {list(members)}"
            # torch names it after its ranks and this number: under different names nobody meets
            text += f" beside {beside} other group{'s' * (beside != 1)}"
            signature = Signature(text, "local new_group", members=beside)
        else:
            whom, label = world, ""
            signature = Signature(text, "new_group", members=zlib.crc32(repr(members).encode()))
        group = self.waited_for("new_group", whom, make, label=label, signature=signature, members=members)
        if isinstance(group, dist.ProcessGroup):
            self._note_timeout(group, timeout)
        return group

    def _note_timeout(self, group: Any, timeout: datetime.timedelta | None) -> None:
        """Here a hang is reported even where a timeout of the group would end it."""

    def waited_for(
        self,
        op: str,
        ranks: tuple[int, ...],
        make: Callable[[], Any],
        *,
        label: str = "",
        text: str = "",
        signature: Signature | None = None,
        members: tuple[int, ...] = (),
        blocks: bool = True,
    ) -> Any:
        """Call `make`, for others an operation of `ranks` in which this one waits; at once if it `blocks`."""
        recorder = self.recorder
        o = Operation(op)
        o.group, o.ranks = label or op, ranks
        o.line, o.via, o.file, o.outer = caller(2)
        o.text = text
        with recorder.call_by_hand(o, blocks=blocks):
            if signature is not None:
                o.text = signature.text
                recorder.matcher.check(recorder.name_of(o), signature.packed(), o, ranks)
            if self.rank in members and not recorder.enqueues:
                self._meet(f"rankcell {recorder.generation} {o.group} {o.seq}", members)
            with self._adopting():
                return make()

    def _meet(self, name: str, members: tuple[int, ...]) -> None:
        """Wait for the other members in Python, which can be ended: gloo's own wait for them cannot."""
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        store.set(f"{self.rank}", "")
        until = time.monotonic() + SHORT_TIMEOUT.total_seconds()
        # of ranks that do not exist torch says so
        while not store.check([f"{r}" for r in members if r in range(self.world_size)]) and time.monotonic() < until:
            time.sleep(0.002)

    def destroy(self, group: Any = None) -> None:
        """`dist.destroy_process_group`: where calls only enqueue, it waits until the others call it, too."""
        default = group is None or group is dist.GroupMember.WORLD
        alive = list(dist.distributed_c10d._world.pg_map)
        self.left.extend(alive if default else [g for g in alive if g is group])
        if not (self.recorder.enqueues and dist.is_initialized()) or group is dist.GroupMember.NON_GROUP_MEMBER:
            self._destroy(group)
        else:
            ranks = tuple(range(self.world_size)) if default else tuple(dist.get_process_group_ranks(group))
            label = LEAVES if default else f"{LEAVES} {group.group_name}"
            self.waited_for(LEAVES, ranks, lambda: self._destroy(group), label=label, blocks=default)
        if not dist.is_initialized():
            forget_groups()
            _forget_meshes()


def replace_in_torch(*calls: tuple[Any, Callable[..., Any]]) -> None:
    """Put the second function of each pair in the place of the first one, torch's, wherever torch keeps that."""
    for original, ours in calls:
        wrapped = functools.update_wrapper(functools.partial(ours), original)
        for module in (dist, dist.distributed_c10d, dist.device_mesh):
            vars(module).update({name: wrapped for name, kept in vars(module).items() if kept is original})


def _forget_meshes() -> None:
    """Let DTensor forget what it has worked out for meshes whose groups are gone.

    It keeps the layouts of results by the shape of a mesh, so a new mesh like an old one would be given the groups of
    the old one. Torch has the means for it, but promises none of them.
    """
    if (tensor := sys.modules.get("torch.distributed.tensor")) is None:
        return
    with contextlib.suppress(AttributeError):
        tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    with contextlib.suppress(AttributeError):
        torch._C._clear_DTensor_sharding_propagator_cache()
    with contextlib.suppress(AttributeError):
        tensor._redistribute._gen_transform_infos.cache_clear()


class Groups(GroupCalls):
    """The default process group of one rank, and what the learner's code makes beside it."""

    def __init__(self, config: StartRank, recorder: Recorder, say: Callable[[str], None]) -> None:
        super().__init__(recorder, config.rank, config.world_size)
        self._config, self._say = config, say
        self.default_timeout = DEFAULT_TIMEOUT if config.enqueues else None
        self.aborted = False  # the groups of this generation can send nothing more
        self._generation = config.generation
        self._again = 0  # how often a program has set the default group up anew in this generation
        # of our own for the backend's connections: to count their bytes and to shut them down
        self.connections: list[socket.socket] = []
        self._init = dist.init_process_group

    def install(self) -> None:
        """From now on the learner's calls come here first."""
        replace_in_torch((self._new_group, self.new_group), (self._destroy, self.destroy), (self._init, self.init))

    @property
    def renewed(self) -> bool:
        """Whether groups of earlier cells were closed."""
        return self._generation != self._config.generation or self._again > 0

    @property
    def name(self) -> str:
        """Which default group the rank is in; "" if the learner's code has destroyed it."""
        if not dist.is_initialized():
            return ""
        return f"{self._generation}.{self._again}" if self._again else f"{self._generation}"

    def join(self, generation: int) -> None:
        if dist.is_initialized():
            # first: destroying a group with an unfinished operation waits for it otherwise, for 20 s
            self.close()
            self.left.extend(dist.distributed_c10d._world.pg_map)
            with contextlib.suppress(RuntimeError):  # its connections were closed on purpose
                self._destroy()
        forget_groups()
        _forget_meshes()
        for s in self.connections:
            s.close()
        self.connections = []
        self._generation, self._again, self.aborted = generation, 0, False
        config = self._config
        store = self._store(f"{generation}")
        with self._adopting():
            self._init_with(dist.PrefixStore(f"{generation}", store))
        if config.node:
            first = config.rank - config.local_rank
            matcher = self.recorder.matcher  # ranks of other nodes are met in the store
            matcher.store = SignatureStore(dist.PrefixStore(f"calls {generation}", store), config.rank)
            matcher.near = frozenset(range(first, first + config.local_world_size))
        self.recorder.join(f"{generation}")

    def destroy(self, group: Any = None) -> None:
        """The same, which also gives back our copies of the group's connections."""
        super().destroy(group)
        self.connections = system.still_used(self.connections)

    def init(self, *args: Any, **kwargs: Any) -> None:
        """`dist.init_process_group` as a script calls it: a rank is in a group already, and can join anew."""
        config = self._config
        given = inspect.signature(self._init).bind(*args, **kwargs).arguments
        numbers = {name: given[name] for name in ("rank", "world_size") if name in given}
        if asked := [f"{name}={n}" for name, n in numbers.items() if n not in (-1, None, getattr(config, name))]:
            where = f"init_process_group({', '.join(asked)}) on rank {config.rank} of {config.world_size}"
            how = "Leave the call out: `rank`, `world_size` and `dist` are there."
            raise GroupError(f"{where}: a rank cell has its ranks already, in a process group. {how}")
        backend, timeout = given.get("backend"), given.get("timeout")
        name = str(backend or config.backend).lower()
        if name not in (config.backend, f"cpu:{config.backend}", "cpu:gloo,cuda:nccl"):
            why = f"the ranks of this world talk over {config.backend} on {config.device}"
            how = "Write `backend=None`, or start a world on the other device with `--device`."
            raise GroupError(f"init_process_group({name!r}): {why}. {how}")
        if dist.is_initialized():
            why = "a rank cell runs on ranks that are in a process group already"
            self._say(f"init_process_group did nothing here: {why}. In a script of your own it is needed.")
            return
        self._again += 1
        generation = f"{self._generation}.{self._again}"
        group = dist.PrefixStore(generation, self._store(f"{self._generation}"))
        self.recorder.join(generation, again=True)
        everybody, label = tuple(range(config.world_size)), f"default group {generation}"
        self.waited_for("init_process_group", everybody, lambda: self._init_with(group, timeout), label=label)
        self._note_timeout(dist.distributed_c10d._get_default_group(), timeout)

    def _note_timeout(self, group: Any, timeout: datetime.timedelta | None) -> None:
        if timeout is not None and timeout < SHORT_TIMEOUT:
            self.recorder.groups_with_timeout.add(group.group_name)

    def close(self) -> None:
        """End whatever waits in the groups, here and at the other ends.

        gloo: its connections are shut down, and whoever waits on one gets an error. nccl's kernels spin on the GPU
        until their communicator is aborted, and then the host goes on.
        """
        if self._config.enqueues and not self.aborted:
            self.aborted = True
            for group in list(dist.distributed_c10d._world.pg_map):
                with contextlib.suppress(RuntimeError):  # it was aborted before
                    (group._get_backend(torch.device("cuda")) if self._config.backend == "nccl" else group).abort()
        system.shut_down(self.connections)

    def _store(self, name: str) -> Any:
        where = self._config.store
        if where.startswith("/"):
            # without a number of ranks: the last of so many that leave would remove the file, in which others that set
            # their group up again may have written already. The notebook removes it.
            return dist.FileStore(f"{where}/{name}")
        host, _, port = where.rpartition(":")
        return dist.TCPStore(host, int(port), None, False)

    def _init_with(self, store: Any, timeout: Any = None) -> None:
        config = self._config
        options: dict[str, Any] = {}
        if config.backend == "nccl":
            options["device_id"] = torch.device("cuda", torch.cuda.current_device())
        if timeout is not None or config.enqueues:
            options["timeout"] = timeout or DEFAULT_TIMEOUT
        # as torch itself does where no backend is named: tensors on the CPU have theirs beside nccl
        backend = "cpu:gloo,cuda:nccl" if config.backend == "nccl" else config.backend
        self._init(backend, store=store, rank=config.rank, world_size=config.world_size, **options)

    @contextlib.contextmanager
    def _adopting(self) -> Any:
        """Keep a copy of every connection that is opened in the block."""
        before = set(system.tcp_connections())
        try:
            yield
        finally:
            for number, fd in system.tcp_connections().items():
                if number not in before:
                    with contextlib.suppress(OSError):  # closed meanwhile
                        self.connections.append(socket.socket(fileno=os.dup(fd)))
