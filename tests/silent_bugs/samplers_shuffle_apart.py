"""Each rank shuffles the samples with a seed of its own and takes every fourth: some are taken twice, others never.

source: https://github.com/NVlabs/LongLive/issues/71
mesh: dp 4
first: token_embedding output
side: forward
"""

# %% ranks
order = torch.randperm(8, generator=generator(rank))  # broken
order = torch.randperm(8, generator=generator(0))  # mended
mine = order[rank::4]
model = gpt()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[mine]), y[mine])
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
