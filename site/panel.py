"""What the planner's panel on the static site computes with: models, GPUs and a stack, as Python has them.

The formulas stand once more in _static/planner.js, for 16 bits and the stack STACK. conf.py puts the panel in place
of the widgets of a cell with the tag `planner-panel`, which need a kernel.
"""

import dataclasses
import json

from rankcell.planner import chips, communication, shapes, stacks

STACK = stacks.STACKS["megatron-core"]
MODELS = (
    "llama3.2-1b", "llama3-8b", "llama3-70b", "llama3-405b", "qwen2.5-7b", "qwen2.5-32b", "gpt3-13b", "gpt3-175b",
    "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3",
)  # fmt: skip
GPUS = ("A100-40", "A100-80", "H100-80", "H200", "B200", "GB200", "MI300X")


def tables() -> dict:
    """Models, GPUs and the stack's numbers, as JSON can hold them. Bytes, seconds and operations per second."""

    def plain(value):
        return int(value) if isinstance(value, bool) else value

    models = {name: dataclasses.asdict(shapes.MODELS[name]) for name in MODELS}
    gpus = {}
    for name in GPUS:
        chip = chips.CHIPS[name]
        keys = ("memory_bytes", "hbm", "bus", "ring", "network", "node", "alpha", "alpha_across")
        gpus[name] = {key: getattr(chip, key) for key in keys} | {
            "peak": chip.peak("bf16"),
            "rate": chip.peak("bf16") * stacks.efficiency(chip, "bf16"),
            "fp8": int("fp8" in chip.peaks),
        }
    assert (STACK.split, STACK.kept_whole, STACK.norm_copies, STACK.one_copy) == ("even", 0, 0, True)
    numbers = {k: plain(v) for k, v in dataclasses.asdict(STACK).items() if not isinstance(v, str)}
    shown = {name: {k: plain(v) for k, v in fields.items() if k != "name"} for name, fields in models.items()}
    return {"models": shown, "chips": gpus, "stack": numbers, "port": communication.PORT}


def script() -> str:
    """The line of JavaScript that gives the panel its numbers."""
    return "window.PLANNER=" + json.dumps(tables())
