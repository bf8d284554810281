"""Pictures of what ranks did: pure functions from Events, Runs and numbers to SVG.

    timeline, streams, schedule     what happened when: ranks, queues of a device, actions of a pipeline
    collectives, messages, waits    who sends what to whom, step by step; who waits for whom
    traffic, mesh                   bytes from rank to rank; groups of ranks along the axes of a mesh
    splits, held, matrices          who holds what
    memory, charts, bars            numbers: bytes by kind, lines, ladders, tables, bars
    sketches                        drawings of what no run shows, kept as SVG under data/sketches
    explorer                        sliders above a picture, in a running kernel
    page                            what stands under a rank cell
    parts, svg                      what they share: axes, keys, marks, and the Figure that all of them return

A `Figure` has an alt text that says the finding, numbers under the mouse, and text that reads on a phone. Nothing here
runs, measures or judges: what is drawn was recorded by the engine or computed elsewhere.
"""
