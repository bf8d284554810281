"""An epoch ends in the middle of an accumulation: one micro-batch is left for the last update, and its loss is divided
by two as if there were two.

source: https://github.com/modelscope/ms-swift/pull/10084
mesh: dp 4
steps: 2
first: head grad_output | the model grad_output | head.weight grad
side: backward
"""

# %% one process
rows = torch.randint(0, 49, (12, 9), generator=generator(0, "rows"))
model = llama()
optimizer = adam(model)
windows = [rows[:8], rows[8:]]
done = 0


def step():
    global done
    window = windows[done % 2]
    done += 1
    optimizer.zero_grad()
    loss = cross_entropy(model(window[:, :-1]), window[:, 1:])
    loss.backward()
    optimizer.step()
    return loss.item()


# %% ranks
rows = torch.randint(0, 49, (12, 9), generator=generator(0, "rows"))
mine = rows[rank::4].split(1)  # three micro-batches


class Trainer:
    accumulate = 2

    def __init__(self, model):
        self.model, self.optimizer, self.place = model, adam(model), 0

    def window(self):
        """The micro-batches of the next update."""
        found = mine[self.place : self.place + self.accumulate]
        self.place = (self.place + len(found)) % len(mine)
        return found

    def step(self):
        self.optimizer.zero_grad()
        window, total = self.window(), 0.0
        for batch in window:
            loss = cross_entropy(self.model(batch[:, :-1]), batch[:, 1:])
            loss = loss / self.accumulate  # broken
            loss = loss / len(window)  # mended
            loss.backward()
            total += loss.item()
        average(self.model)
        self.optimizer.step()
        return total


model = llama()
step = Trainer(model).step
