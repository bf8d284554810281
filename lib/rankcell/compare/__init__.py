"""Which tensor of a parallel run went wrong first: what several ranks computed, against what one process does.

On a rank a trace puts its entries into `recorder.trace`, and they come with the cell's result; the core knows no more
of this part. It does not run anything on ranks, and it knows no strategy: layouts are found, not told.
"""
