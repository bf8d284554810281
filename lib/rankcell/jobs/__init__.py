"""The verdict of a rank cell for jobs that no notebook started: `rankcell run`, `rankcell attach`, `rankcell explain`.

    command     the sub-commands
    hook/       on the PYTHONPATH of a job: waits there for torch.distributed
    inside      in the process of a rank: a thread that answers the runner;  recording   the recorder there
    watch       the ranks of a job, as they answer;  run   starts the command, prints the verdict once, ends the job
    attach      processes that were started without it: their stacks
    explain     a folder of reports, or of stacks;  stacks   of this process, and what py-spy prints
    records     what is known of one rank, as data, message and file
    mismatch, divergence    whose calls do not match; which rank called something else: by their last operations
    verdict     records -> who is to blame, in words; a pure function, with engine/diagnose and errors

Whatever the source is, it becomes a `records.RankRecord` for each rank; `verdict.judge` reads those that number their
operations, `explain` compares mere stacks. It is no profiler, and no monitor of jobs that go on: a rank that computes
is never blamed. It draws nothing; `explain.read` gives the run that `rankcell.draw` takes. Dumps of torch's flight
recorder are for torch's own `torchfrtrace`.
"""
