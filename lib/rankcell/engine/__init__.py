"""The engine of rank cells: how a cell gets from the notebook to real processes, and what they did back again.

    both sides       messages   what travels, typed, without torch
                     channel    whole messages over a socket
                     system     what only some operating systems offer
                     match      calls that must be alike on several ranks
    notebook side    world      start ranks, run cells, repair, stop
                     cell       one cell: send, poll, diagnose, free
                     verdict    what becomes of a cell that is over: a Run, or an error
                     states     what each rank is doing;  diagnose  who waits for whom, and what is to blame
                     mailbox    takes in what ranks say;  parts  what that becomes: a RankResult
                     host       what a world needs of a place:  local  this machine,  nodes  a Slurm allocation
                     forks      the process that ranks are forked from, and  agent  the same on a node
                     devices    CPU or GPU, which backend, and why
    rank side        preload    imports torch, forks
                     worker     names, cells;  control  the thread that answers meanwhile
                     execute    source -> value;  report  exception or value -> what travels;  stdio, shell
                     groups     process groups and their connections
                     listen     hears of every communication;  record  writes it down as an  operation
                     streams    when a GPU is through with one
                     observe    what a program asks for besides:  spans,  meter  of memory

Imports go from `world` and from `worker` downwards; the two sides meet in `messages`, `match` and `system` only.
CONTRIBUTING.md follows one cell and one event through these files.
"""
