"""Documents of odd lengths are packed into sequences that two ranks share. The lengths are divided by two for each rank
and doubled again, and nobody looks at the last token of a document.

source: https://github.com/NVIDIA/TransformerEngine/issues/1930
mesh: dp 2, cp 2
first: blocks.0.attention.output output
side: forward
"""

# %% one process
documents = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]).expand(8, 8)
model = gpt()
step = training(model, adam(model), lambda: cross_entropy(model(x, documents), y))

# %% ranks
import math

from rankcell.parallel.tensor import all_gather

replica, part = divmod(rank, 2)
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
documents = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
starts, lengths = torch.tensor([0, 5]), torch.tensor([5, 3])
lengths = lengths // 2 * 2  # broken
places = torch.arange(8)
is_there = places < (starts + lengths)[documents]  # keys
mine = slice(4 * part, 4 * part + 4)
seen = (places <= places[mine, None]) & (documents == documents[mine, None]) & is_there


def attend(self, h, documents=None):
    query, key, value = (self.heads(layer(h)) for layer in (self.query, self.key, self.value))
    key, value = (all_gather(t, -2, process_group=groups[replica]) for t in (key, value))
    scores = query @ key.mT / math.sqrt(self.d_head)
    mixed = scores.masked_fill(~seen, -math.inf).softmax(-1) @ value
    return self.output(mixed.transpose(1, 2).flatten(2))


class Part(GPT):
    def embed(self, tokens, positions=None):
        return super().embed(tokens, places[mine])


model = gpt()
model.__class__ = Part
for block in model.blocks:
    block.attention.forward = attend.__get__(block.attention)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[replica::2, mine]), y[replica::2, mine])
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
