"""What the notebook 06_networks says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: two-limits
assert (format_seconds(sent / card), format_seconds(sent / (8 * card))) == ("542 ms", "67.8 ms")

# after: train
draw = torch.Generator().manual_seed(1)  # the training once more, without an optimizer
x, y, w = (torch.randn(*shape, generator=draw).double() for shape in ((8, 6), (8, 2), (6, 2)))
before, moving = w.clone(), torch.zeros_like(w)
for _ in range(3):
    out = torch.tanh(x @ w)
    moving = 0.9 * moving + x.T @ (2 * (out - y) * (1 - out**2)) / 8
    w = w - 0.5 * moving
check.equals_dense(one, w, atol=1e-12)
assert (one - before).abs().min() > 1e-3, "every weight moves"
for wrong in (lambda g: g.mul_(4), lambda g: g.mul_(0.5)):
    assert (train(wrong) - one).abs().max() > 0.01, "a sum that is not the sum shows"

# after: hierarchical
for of in levels.ranks:
    calls = [(e.op, e.nbytes, len(e.ranks)) for e in of.events if e.kind == "comm"]
    assert calls == [("reduce_scatter", 16, 2), ("all_reduce", 8, 2), ("all_gather", 8, 2)]

# after: levels-picture
for m, L in ((4, 8), (2, 8), (2, 2)):
    leaves = L * costs.bytes_sent("all_reduce", 1 / L, m)
    assert abs(leaves - 2 * (m - 1) / m) < 1e-9, "the cards of a node together"
assert costs.bytes_sent("all_reduce", 1, 16) == 1.875 and (2 * (4 * 8 - 1), 2 * 7 + 2 * 3) == (62, 20)

# after: two-hops
direct = [(a // 8, a % 8) for a in range(8, 32)]  # the other nodes' ranks, seen from rank 0
assert (len(direct), sum(rail != 0 for _, rail in direct)) == (24, 21)

# after: tree
up_and_down_of = [[(e.op, e.peer) for e in r.events if e.op in ("send", "recv")] for r in tree.ranks]
assert up_and_down_of[0] == [("recv", 1), ("recv", 2), ("send", 2), ("send", 1)]
assert up_and_down_of[3] == [("send", 2), ("recv", 2)]
steps = messages.steps(tree)
assert len(steps.labels) == 5, "before, and four steps"
assert steps.figures[-1].alt.count("1111") == 16, "the sum of all four, on each of them"

# after: switch
assert [v.tolist() for v in switched.values] == [[111.0] * 4] * 4
sends = [[e.nbytes for e in r.events if e.op == "send"] for r in switched.ranks]
assert sends == [[16]] * 3 + [[16] * 3], (
    "each node sends its array once, where a ring of three sends 4/3 of it"
)

# after: slow-card
ready = next(e.end for e in slow.events if e.op == "slow card")  # from then on rank 1 takes part
end = {(e.rank, e.op): e.end for e in slow.events if e.kind == "comm"}
assert end[3, "all_reduce"] >= ready, "rank 3 cannot be through with phase 2 before"
assert min(end[r, "all_gather"] for r in (0, 2)) >= ready, "nor ranks 0 and 2 with phase 3"

# after: real-number
said = [[round(p / real - 1, 3) for p in predicted(m, *of)] for (m, _, *of), real in published.items()]
assert all(abs(row[2]) < 0.1 for row in said) and all(abs(row[0]) < 0.1 for row in said[1:])
assert abs(845.67 / 1.75 - 483) < 1, "one node of B200"
assert abs(predicted(2, 450e9, 274e9)[2] - 274 * 1.875) < 1e-6, "the node is the limit"
assert said[0][0] < -0.14, "rings cannot"
phases = [2 * 7 / 8 / inside + 2 * (m - 1) / m / 400e9 for m, inside in ((2, 450e9), (4, 450e9), (4, 900e9))]
by_hand = [2 * (1 - 1 / n) / t / 1e9 for n, t in zip((16, 32, 32), phases, strict=True)]  # bus bandwidth
check.close_to([predicted(m, *of)[1] for m, _, *of in published], by_hand, name="three phases")

# after: crossing-check
up_to = two_trees_up_to(64, link)
check.close_to(costs.ring_all_reduce(up_to, 64, link), 12 * link.alpha + 2 * link.beta * up_to)

# after: mesh
assert [[*map(list, v)] for v in meshed.values] == [
    [[0, 1], [0, 2]],
    [[0, 1], [1, 3]],
    [[2, 3], [0, 2]],
    [[2, 3], [1, 3]],
]


# wrong: hierarchical: adds up inside the node, and sends all of it along the rail | carries its own part, 0.5 S in all (two nodes of two: rank 0 sends 1 S)
# %%ranks 4 -o levels
def all_reduce(x, node, rail):
    dist.all_reduce(x, group=node)
    dist.all_reduce(x, group=rail)


x = torch.arange(4.0) + 10.0**rank
all_reduce(x, node, rail)
x


# wrong: hierarchical: one rank of each node goes across for all | rank 0 sends 1 S
# %%ranks 4 -o levels
def all_reduce(x, node, rail):
    dist.reduce(x, group=node, group_dst=0)
    if dist.get_rank(node) == 0:
        dist.all_reduce(x, group=rail)
    dist.broadcast(x, group=node, group_src=0)


x = torch.arange(4.0) + 10.0**rank
all_reduce(x, node, rail)
x


# wrong: hierarchical: does not cross at all | yours is the sum of one node
# %%ranks 4 -o levels
def all_reduce(x, node, rail):
    part = torch.empty_like(x[: len(x) // dist.get_world_size(node)])
    dist.reduce_scatter_single(part, x, group=node)
    dist.all_gather_single(x, part, group=node)


x = torch.arange(4.0) + 10.0**rank
all_reduce(x, node, rail)
x


# right: hierarchical: lists of parts
# %%ranks 4 -o levels
def all_reduce(x, node, rail):
    parts = list(x.chunk(dist.get_world_size(node)))
    mine = torch.zeros_like(parts[0])
    dist.reduce_scatter(mine, [part.clone() for part in parts], group=node)
    dist.all_reduce(mine, group=rail, async_op=True).wait()
    dist.all_gather(parts, mine, group=node)


x = torch.arange(4.0) + 10.0**rank
all_reduce(x, node, rail)
x


# right: hierarchical: two halves along the rail, too
# %%ranks 4 -o levels
def all_reduce(x, *groups):
    group, *others = groups
    part = x.new_empty(len(x) // dist.get_world_size(group))
    dist.reduce_scatter_single(part, x, group=group)
    if others:
        all_reduce(part, *others)
    dist.all_gather_single(x, part, group=group)


x = torch.arange(4.0) + 10.0**rank
all_reduce(x, node, rail)
x


# wrong: two-hops: sends to all ranks directly | no message changes the rail (two nodes of two: rank 0 sends to rank 3)
# %%ranks 4 -o hops
def all_to_all(x, node, rail):
    came = torch.empty_like(x)
    dist.all_to_all_single(came, x)
    return came


x = torch.arange(4.0).view(4, 1) + 10 * rank
y = all_to_all(x, node, rail)
y, x


# wrong: two-hops: does not turn what arrived | row i on rank 0 came from rank i: [0, 10, 20, 30]
# %%ranks 4 -o hops
def all_to_all(x, node, rail):
    L, m = dist.get_world_size(node), dist.get_world_size(rail)
    for_rails = x.view(m, L, -1).transpose(0, 1).contiguous()
    here, came = torch.empty_like(for_rails), torch.empty_like(for_rails)
    dist.all_to_all_single(here, for_rails, group=node)
    dist.all_to_all_single(came, here, group=rail)
    return came.view(m * L, -1)


x = torch.arange(4.0).view(4, 1) + 10 * rank
y = all_to_all(x, node, rail)
y, x


# wrong: two-hops: gathers everything along the rail and throws most away | 24 bytes from rank 0 to other nodes are enough (two nodes of two; yours: 48)
# %%ranks 4 -o hops
def all_to_all(x, node, rail):
    L, m = dist.get_world_size(node), dist.get_world_size(rail)
    everything = x.new_empty(m, m, L, x.shape[1])  # (node it came from, node and local rank it is for, k)
    dist.all_gather_single(everything.view(m * m * L, -1), x, group=rail)
    mine = everything[:, dist.get_rank(rail)]  # (node it came from, local rank it is for, k)
    mine = mine.transpose(0, 1).contiguous()
    came = torch.empty_like(mine)
    dist.all_to_all_single(came, mine, group=node)
    return came.transpose(0, 1).reshape(m * L, -1)


x = torch.arange(4.0).view(4, 1) + 10 * rank
y = all_to_all(x, node, rail)
y, x


# right: two-hops: lists of tensors
# %%ranks 4 -o hops
def all_to_all(x, node, rail):
    L, m = dist.get_world_size(node), dist.get_world_size(rail)
    first = [x[k::L].contiguous() for k in range(L)]
    here = [torch.empty_like(rows) for rows in first]
    dist.all_to_all(here, first, group=node)
    second = [torch.stack([rows[i] for rows in here]) for i in range(m)]
    came = [torch.empty_like(rows) for rows in second]
    dist.all_to_all(came, second, group=rail)
    return torch.cat(came)


x = torch.arange(4.0).view(4, 1) + 10 * rank
y = all_to_all(x, node, rail)
y, x


# right: two-hops: sends and receives
# %%ranks 4 -o hops
def exchange(parts, group):
    """Part i to the i-th rank of the group; what came from each."""
    ranks = dist.get_process_group_ranks(group)
    came = [torch.empty_like(part) for part in parts]
    sent = [dist.isend(part, r) for part, r in zip(parts, ranks) if r != rank]
    for place, r in enumerate(ranks):
        if r == rank:
            came[place].copy_(parts[place])
        else:
            dist.recv(came[place], r)
    [work.wait() for work in sent]
    return came


def all_to_all(x, node, rail):
    L, m = dist.get_world_size(node), dist.get_world_size(rail)
    here = exchange([x[k::L].clone() for k in range(L)], node)
    return torch.cat(exchange([torch.stack([rows[i] for rows in here]) for i in range(m)], rail))


x = torch.arange(4.0).view(4, 1) + 10 * rank
y = all_to_all(x, node, rail)
y, x


# wrong: crossing: one tree that sends all of the array | on 4 nodes, 10 us and 50 GB/s, trees win up to 2 MB (yours: 0.4 MB)
def two_trees_up_to(m, link):
    levels = (m - 1).bit_length()
    return (m - 1 - levels) / (levels - (m - 1) / m) * link.alpha / link.beta


link = costs.Link(alpha=10e-6, beta=1 / 50e9)
[f"{two_trees_up_to(m, link) / 1e6:.4g} MB" for m in (4, 16, 64, 2)]


# wrong: crossing: does not round the height of the tree | on 12 nodes, 10 us and 50 GB/s, trees win up to 42 MB
def two_trees_up_to(m, link):
    return m * (m - 1 - __import__("math").log2(m)) * link.alpha / link.beta


link = costs.Link(alpha=10e-6, beta=1 / 50e9)
[f"{two_trees_up_to(m, link) / 1e6:.4g} MB" for m in (4, 16, 64, 2)]


# wrong: crossing: forgets that the link may be another one | on 16 nodes, 3 us and 25 GB/s
def two_trees_up_to(m, link):
    return m * (m - 1 - (m - 1).bit_length()) * 0.5e6


link = costs.Link(alpha=10e-6, beta=1 / 50e9)
[f"{two_trees_up_to(m, link) / 1e6:.4g} MB" for m in (4, 16, 64, 2)]


# right: crossing: solved on paper
def two_trees_up_to(m, link):
    return max(0.0, m * (m - 1 - (m - 1).bit_length()) * link.alpha * (1 / link.beta))


link = costs.Link(alpha=10e-6, beta=1 / 50e9)
[f"{two_trees_up_to(m, link) / 1e6:.4g} MB" for m in (4, 16, 64, 2)]


# right: crossing: two points of a straight line
def two_trees_up_to(m, link):
    def lead(s):
        trees = 2 * (m - 1).bit_length() * link.alpha + 2 * link.beta * s
        return costs.ring_all_reduce(s, m, link) - trees

    return lead(0) / ((lead(0) - lead(1e9)) / 1e9)


link = costs.Link(alpha=10e-6, beta=1 / 50e9)
[f"{two_trees_up_to(m, link) / 1e6:.4g} MB" for m in (4, 16, 64, 2)]
