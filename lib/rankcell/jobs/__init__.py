"""The verdict of a rank cell for jobs that no notebook started: `rankcell run`, `rankcell explain`.

It is no profiler, and no monitor of jobs that go on: a rank that computes is never blamed. It draws nothing. Of
processes that were started without it py-spy prints the stacks; dumps of torch's flight recorder are for torch's own
`torchfrtrace`.
"""
