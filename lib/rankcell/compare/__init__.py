"""Which tensor of a parallel run went wrong first: what several ranks computed, against what one process does.

    trace       hooks that keep what a model computes
    reference   one tensor as it is kept: that of one process, and a rank's piece of it
    layouts     where pieces lie in it, or add up to it;  coverage  whether they make up all of it
    judge       a row for each tensor;  blame  the first that went wrong;  beside  why, by optimizers and buffers
    clues       what tells more of it, where and how;  wording  what is said of it;  comparison  what comes out

On a rank a trace puts its entries into `recorder.trace`, and they come with the cell's result; the core knows no more
of this part. It does not run anything on ranks, and it knows no strategy: layouts are found, not told.
"""
