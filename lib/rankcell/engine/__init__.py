"""The engine of rank cells: how a cell gets from the notebook to real processes, and what they did back again.

    both sides       messages   what travels, typed, without torch
                     channel    whole messages over a socket
                     system     what only some operating systems offer;  settings  what ranks follow of the notebook's
                     match      calls that must be alike on several ranks;  stacks  where a process stands or crashed
    notebook side    world      run cells, repair, stop
                     cell       one cell: send, poll, diagnose, free, and what went wrong first
                     diagnose   who waits for whom, and what is to blame: a pure function of  states
                     workers    the processes of a world;  received  what has come from each: a RankResult
                     host       what a place for ranks must do;  local  this machine (elsewhere: nodes)
                     launch     starts ranks, by torch.multiprocessing
                     devices    CPU or GPU, which backend, and why
    rank side        preloaded  what is imported before ranks are forked
                     worker     runs cells;  environment  what they find;  control  the thread that answers meanwhile
                     report     exception or value -> what travels;  stdio, shell
                     groups     process groups and their connections
                     listen     hears of every communication;  record  writes it down as an  operation, and what a
                                program asks for besides (the part `observers` measures)

Imports go from `world` and from `worker` downwards; the two sides meet in what `both sides` lists.
CONTRIBUTING.md follows one cell and one event through these files. It draws nothing and knows nothing of IPython's
magics; where the ranks of a world live otherwise, a part says through `extensions`.
"""
