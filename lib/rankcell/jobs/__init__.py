"""The verdict of a rank cell for jobs that no notebook started: `rankcell run`, `rankcell attach`, `rankcell explain`.

    command     the sub-commands
    hook/       on the PYTHONPATH of a job: waits there for torch.distributed, and for an exception
    inside      in the process of a rank: the recorder of rank cells, and a thread that answers the runner
    run         starts the command, asks its ranks what they do, prints the verdict once, ends the job
    attach      processes that were started without it: their stacks, torch's flight recorder
    explain     a folder of dumps and logs -> records; as a notebook
    flight, stacks, logs, traces    what torch, py-spy, nccl and Kineto write -> records and Events
    records     what is known of one rank, as data and as a file
    apart       which of several ranks has left the order of calls, from the last operations of each
    verdict     records -> who is to blame, in words; a pure function, with engine/diagnose and errors

Whatever the source is, it becomes a `records.Record` for each rank, and `verdict.judge` reads those.
"""
