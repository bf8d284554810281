"""A training for the tests of the cluster: what it writes must not depend on how often it was stopped.

    FOLDER=... [STEPS=24] [SECONDS=0.05] [DIES=rank:step] python training.py

Reads its place from RANK, WORLD_SIZE and LOCAL_RANK. Every 4 steps a snapshot. Rank 0 appends "step loss
world_size" to FOLDER/log and writes the weights to FOLDER/weights.pt at the end. With DIES that rank kills
itself at that step, once. USR1 on any rank: save, leave with exit status 75.
"""

import os
import random
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from rankcell.cluster import snapshots
from rankcell.models import MLP, regression
from rankcell.parallel.ddp import DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
folder, steps = Path(os.environ["FOLDER"]), int(os.environ.get("STEPS", "24"))
told = torch.zeros(1)
signal.signal(signal.SIGUSR1, lambda *_: told.fill_(1))

torch.manual_seed(rank)  # dropout differs by rank
random.seed(rank)
model = DDP(torch.nn.Sequential(torch.nn.Dropout(0.2), MLP(6, 32, 3, dtype=torch.float64)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
x, y = regression(80)
data = TensorDataset(x.double(), y.double())
sampler = snapshots.Sampler(data)
loader = DataLoader(data, batch_size=16 // world_size, sampler=sampler, generator=torch.Generator())
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
step = snapshots.load(folder / "snapshot.pt", **parts)
print(f"rank {rank} of {world_size}, local rank {os.environ.get('LOCAL_RANK')}, from step {step}", flush=True)
while step < steps:
    sampler.set_epoch(sampler.epoch + 1 if sampler.seen >= len(sampler) else sampler.epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets) * (1 + 0.1 * random.random())
        loss.backward()
        optimizer.step()
        scheduler.step()
        sampler.seen += len(inputs)
        step += 1
        time.sleep(float(os.environ.get("SECONDS", "0")))
        if rank == 0:
            with (folder / "log").open("a") as file:
                file.write(f"{step} {loss.item()!r} {world_size}\n")
        if os.environ.get("DIES") == f"{rank}:{step}" and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        leave = told.clone()
        dist.all_reduce(leave)  # all ranks leave after the same step
        if step % 4 == 0 or leave:
            snapshots.save(folder / "snapshot.pt", step, **parts)
        if leave and step < steps:
            dist.destroy_process_group()
            raise SystemExit(75)
        if step == steps:
            break
if rank == 0:
    torch.save([p.detach() for p in model.parameters()], folder / "weights.pt")
dist.barrier()
dist.destroy_process_group()
