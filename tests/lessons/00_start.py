"""What the notebook 00_start says is right, and wrong answers to its exercise; tests/judge.py runs them."""

# after: first-sum
assert run.values == [[6, 6, 6]] * 4 or [v.tolist() for v in run.values] == [[6.0] * 3] * 4
assert [r.stdout for r in run.ranks] == [f"I hold {[float(r)] * 3}\n" for r in range(4)]

# wrong: ex1-solution: writes the sum down | every rank takes part in the sum (ranks without a message: 4)
# %%ranks 4 -o run
x = torch.tensor([float(sum(range(1, world_size + 1)))])
x

# wrong: ex1-solution: forgets the last line | the cell ends with x
# %%ranks 4 -o run
x = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(x)

# wrong: ex1-solution: keeps what the sum returns | a collective works in place, and returns None
# %%ranks 4 -o run
x = torch.tensor([rank + 1.0], device=device)
x = dist.all_reduce(x)
x

# wrong: ex1-solution: leaves the sum on rank 0 | numbers differ
# %%ranks 4 -o run
x = torch.tensor([rank + 1.0], device=device)
dist.reduce(x, dst=0)
x

# right: ex1-solution: gathers and adds up
# %%ranks 4 -o run
x = [torch.zeros(1, device=device) for _ in range(world_size)]
dist.all_gather(x, torch.tensor([rank + 1.0], device=device))
sum(x)
