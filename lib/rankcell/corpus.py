"""What the lessons train on: a text that ships with the course, a small regression, and random numbers by name, none of
them from torch's global ones.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor


def generator(seed: int, *names: object) -> torch.Generator:
    """Random numbers that depend on `seed` and `names` only: the same on every rank, whatever was drawn before.

    generator(0, "batch", 7)  # the batch of step 7
    """
    digest = hashlib.sha256(repr((seed, *map(str, names))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def normal(shape: Sequence[int], seed: int, *names: object) -> Tensor:
    """Numbers of mean 0 and standard deviation 1 from the generator of these names."""
    return torch.randn(tuple(shape), generator=generator(seed, *names), device="cpu")


@cache
def text() -> str:
    """The course's text: 22 old fables in our own words, about 10 kB."""
    return files(__package__).joinpath("data/fables.txt").read_text("utf-8")


@cache
def vocabulary() -> str:
    """Every character of the text once, in order; a token is a place in it."""
    return "".join(sorted(set(text())))


def encode(words: str) -> Tensor:
    """One token per character, `(length,)` int64."""
    places = {character: place for place, character in enumerate(vocabulary())}
    if missing := sorted(set(words) - set(places)):
        raise ValueError(f"The text has no {', '.join(map(repr, missing))}. It knows {vocabulary()!r}.")
    return torch.tensor([places[character] for character in words], dtype=torch.long)


def batch(
    tokens: Tensor, step: int, *, size: int = 16, length: int = 32, seed: int = 0, rank: int = 0, world_size: int = 1
) -> tuple[Tensor, Tensor]:
    """The inputs and targets of one step, each `(size / world_size, length)`: pieces from random places.

    `size` is that of the global batch. The rows depend on `seed` and `step` only, so with `world_size` ranks rank r
    gets the r-th part of the very rows that one process would get.
    """
    if size % world_size:
        raise ValueError(f"A batch of {size} cannot be shared by {world_size} ranks. Choose a multiple.")
    places, random = len(tokens) - length, generator(seed, "batch", step)
    starts = torch.randint(places, (size,), generator=random, device="cpu").chunk(world_size)[rank]
    rows = torch.stack([tokens[start : start + length + 1] for start in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batches(tokens: Tensor, steps: int, **options: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of `steps` steps from step 0, with the options of `batch`."""
    return (batch(tokens, step, **options) for step in range(steps))


def regression(
    samples: int = 1024, d_in: int = 6, d_out: int = 3, *, noise: float = 0.1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs `(samples, d_in)` and targets `(samples, d_out)` that can be learnt: a fixed net's outputs plus noise.

    A model that has learnt all there is to learn has a mean squared error of noise², 0.01.
    """
    x = normal((samples, d_in), seed, "inputs")
    inner = normal((d_in, 16), seed, "inner") / d_in**0.5
    outer = normal((16, d_out), seed, "outer") / 16**0.5
    y = torch.tanh(2 * x @ inner) @ outer
    return x, y + noise * normal(y.shape, seed, "noise")
