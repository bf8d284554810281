"""The verdict of a rank cell for jobs that no notebook started: `rankcell run`, `rankcell explain`.

    command     the sub-commands
    hook/       on the PYTHONPATH of a job: waits there for torch.distributed
    inside      in the process of a rank: a thread that answers the runner;  recording   the recorder there
    watch       the ranks of a job, as they answer;  run   starts the command, prints the verdict once, ends the job
    records     what is known of one rank, as data, message and file;  stacks   of a process, and where it crashed
    divergence  which rank called something else than the others, by their last operations
    verdict     records -> who is to blame, in words; a pure function, with engine/diagnose and errors

It is no profiler, and no monitor of jobs that go on: a rank that computes is never blamed. It draws nothing. Of
processes that were started without it py-spy prints the stacks; dumps of torch's flight recorder are for torch's own
`torchfrtrace`.
"""
