"""Reads one published run, as a row of a table, and predicts it: what the planner is fitted and scored through.

A row is a dictionary of strings or numbers with the columns of tests/data/planner_2.csv. Blank or missing
columns get a documented default (`parse`). What cannot be understood raises a `RowError` that names the column.
"""

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from rankcell.planner import chips, memory, seconds, shapes, stacks
from rankcell.planner.layout import (
    FULL,
    GPIPE,
    NONE,
    ONE_F_ONE_B,
    SELECTIVE,
    ZB_2P,
    ZB_V,
    ZERO_BUBBLE,
    Job,
    Layout,
)  # fmt: skip

_BLANK = {"", "nan", "none", "null", "n/a", "na", "-", "unknown"}
# field of a Shape: the column that says it, if it is not called so, and the least it may be
_SIZES = {"layers": ("layers", 1), "hidden": ("hidden", 1), "heads": ("heads", 1), "ffn": ("ffn", 0),
          "vocab": ("vocab", 1), "head_dim": ("head_dim", 0), "experts": ("n_experts", 0), "top_k": ("top_k", 0),
          "expert_ffn": ("moe_ffn", 0), "shared_ffn": ("shared_ffn", 0)}  # fmt: skip
_GATED = {"gpt": (False,), "llama": (True,), "moe": (True,), "mixtral": (True,), "mla": (True,)}  # by `arch`
_SCHEDULES = {"gpipe": GPIPE, "afab": GPIPE, "zb-2p": ZB_2P, "zb-h2": ZB_2P, "zb-1p": ZERO_BUBBLE,
              "zb-h1": ZERO_BUBBLE, "zb-v": ZB_V}  # fmt: skip
_FULL = r"full|uniform|block|all|true"
_SELECTIVE = r"select|attn|attention|op|mla|moe|norm|mlp|act|partial"
_FORMATS = {"bf16": "bf16", "fp16": "bf16", "fp32": "tf32", "tf32": "tf32", "fp8": "fp8", "fp4": "fp4"}
# Which stack a published run belongs to, by what its source or its notes say; the first that is found
_CLUES = (
    ("nanotron", "nanotron"), ("playbook", "nanotron"), ("foundry", "llm-foundry"), ("mosaic", "llm-foundry"),
    ("titan", "torchtitan"), ("fsdp", "torchtitan"), ("simumax", "megatron-plain"), ("zero_bubble", "zero-bubble"),
    ("mlm_golden", "megatron-tests"), ("golden", "megatron-tests"), ("dlperf", "megatron-2020"),
    ("megatron20", "megatron-2020"), ("megatron21", "megatron-2021"), ("korthikanti", "megatron-2021"),
    ("bloom", "megatron-deepspeed"), ("bigscience", "megatron-deepspeed"), ("deepspeed", "megatron-deepspeed"),
    ("mlperf", "megatron-mlperf"), ("mbridge", "megatron-core"), ("nemo", "megatron-core"),
    ("dgxc", "megatron-core"), ("mcore", "megatron-core"), ("megatron", "megatron-core"),
)  # fmt: skip
Row = Mapping[str, Any]


class RowError(ValueError):
    """A row that cannot be understood: the message names the column, what it holds and what would do."""


def text(row: Row, column: str) -> str:
    """What a column holds as text; "" where it is blank or missing."""
    found = row.get(column)
    found = "" if found is None else str(found).strip()
    return "" if found.lower() in _BLANK and column != "recompute" else found


def number(row: Row, column: str, default: float, *, least: float = 1) -> float:
    """The number in a column, `default` where it is blank. Raises RowError: it is none, or below `least`."""
    if not (found := text(row, column)):
        return default
    try:
        value = float(found.replace(",", "").replace("_", ""))
    except ValueError:
        raise RowError(f"The column {column!r} holds {found!r}, which is no number.") from None
    if not math.isfinite(value) or value < least:
        raise RowError(f"The column {column!r} holds {found}; it must be a number of at least {least:g}.")
    return value


def count(row: Row, column: str, default: float, *, least: int = 1) -> int:
    """A whole number in a column, as `number`."""
    value = number(row, column, default, least=least)
    if value != int(value):
        raise RowError(f"The column {column!r} holds {value:g}; it must be a whole number.")
    return int(value)


@cache
def _plain(name: str) -> str:
    """`name` without what differs from writer to writer: "Llama-3.1 70B" -> "llama370b"."""
    text = re.sub(r"\(.*?\)|\bcut to\b.*|pretrain|instruct|\bmeta\b", "", name.lower())
    text = re.sub(r"llama-?_? ?3[._p]?[13]\b|llama31(?=\D)|llama3[.]?1(?=[ _-])", "llama3", text)
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(?<=\d)\.(?=\d)", "p", text))  # 1.3b is not 13b


_MODELS = {_plain(name): shape for name, shape in shapes.MODELS.items()}


def model_called(name: str) -> shapes.Shape | None:
    """The model of the table called `name`, however it is spelt, or the longest name inside it; None without any."""
    inside = [key for key in _MODELS if key in _plain(name)]
    return _MODELS[max(inside, key=len)] if inside else None


def chip_called(name: str) -> chips.Chip:
    """The GPU called `name`: "h100", "H100 SXM 80GB", "NVIDIA A100". Raises ValueError."""
    text = re.sub(r"nvidia|amd|instinct|tesla|dgx|hgx|sxm\d?|hbm\d?e?|pcie", " ", name.lower())
    text = re.sub(r"(?<=h100)[ -]nvl$", "-94", text)
    text = re.sub(r"(\d)\s*gi?b\b", r"\1", text)
    text = re.sub(r"[^a-z0-9]+", "-", text).strip("-")
    text = re.sub(r"(?<=-96)-.*500w?$|-500w$", lambda m: "" if "-96" in text else "-96", text)
    family, *rest = text.split("-")
    sizes = [chip for chip in chips.CHIPS.values() if chip.name.lower().split("-")[0] == family]
    fits = [chip for chip in sizes if chip.name.split("-")[-1] in rest]
    return (fits or [chips.find(family if sizes else text)])[0]


def format_called(name: str) -> str:
    """The format in which `name` multiplies matrices: "float16", "FP8-MX". Raises ValueError."""
    text = re.sub(
        r"b?float", lambda m: {"b": "bf"}.get(m[0][0], "fp"), re.sub(r"[^a-z0-9]", "", name.lower())
    )
    if found := re.search("|".join(_FORMATS), text):
        return _FORMATS[found[0]]
    raise ValueError(f"There is no number format {name!r} here. There are {', '.join(_FORMATS)}.")


def stack_of(source: str, notes: str = "") -> stacks.Stack:
    """The stack of a run, from where it was published; `megatron-core` where nothing is recognised."""
    for said in (source.lower(), notes.lower()):
        for clue, name in _CLUES:
            if clue in said:
                return stacks.STACKS[name]
    return stacks.STACKS["megatron-core"]


def shape_of(row: Row) -> shapes.Shape:
    """The model of a row: its own sizes, and from the table of models what it leaves blank.

    Whether the MLP is gated and the embedding tied is what comes nearest to `params_b`, where `arch` does not
    say it. A model that is not in the table has the proportions of GPT-3, heads of 128 elements and a vocabulary
    of 51200 entries where its row does not say otherwise.
    """
    name = text(row, "model")
    known = model_called(name) or _counted(row, name)
    if count(row, "hidden", known.hidden) != known.hidden:
        known = _counted(row, name)  # another model of that name
    sizes: dict[str, Any] = {
        field: count(row, column, getattr(known, field), least=least)
        for field, (column, least) in _SIZES.items()
    }
    kv = known.kv_heads if known.heads == sizes["heads"] else sizes["heads"]
    shape = replace(known, **sizes, kv_heads=count(row, "kv_heads", kv), moe_layers=0)
    if shape.experts:
        moe = min(count(row, "moe_layers", known.moe_layers or shape.layers, least=0), shape.layers)
        ffn = shape.expert_ffn or shape.ffn
        shape = replace(shape, moe_layers=moe, top_k=max(1, shape.top_k), expert_ffn=ffn)
    target = number(row, "params_b", 0, least=0) * 1e9
    gates = _GATED.get(text(row, "arch").lower(), (True, False))
    if not target:
        plain = len(gates) == 2 and shape.ffn == 4 * shape.hidden
        return replace(shape, gated=False if plain else shape.gated if len(gates) == 2 else gates[0])
    choices = [replace(shape, gated=g, tied=t) for g in gates for t in (True, False)]
    return min(choices, key=lambda c: abs(c.params - target))


def _counted(row: Row, name: str) -> shapes.Shape:
    """A GPT of the sizes in the row; what is blank follows from the number of parameters.

    12 l h^2 parameters and layers 128 elements wide for each of their number, as in GPT-3's family.
    """
    size = number(row, "params_b", 0, least=0) * 1e9
    if not size and (found := re.search(r"(\d+(?:\.\d+)?)\s*b(?![a-z])", name.lower())):
        size = float(found[1]) * 1e9
    if not size and not (text(row, "layers") and text(row, "hidden")):
        raise RowError(
            "The columns 'layers', 'hidden' and 'params_b' are blank, and 'model' does not help: there is no model "
            f"called {name!r}."
        )
    layers = count(row, "layers", max(1, round((size / 12 / 128**2) ** (1 / 3))))
    hidden = count(row, "hidden", max(128, round((size / 12 / layers) ** 0.5 / 128) * 128))
    heads = count(row, "heads", max(1, hidden // 128))
    return shapes.Shape(name, layers, hidden, heads, heads, 4 * hidden, 51200, gated=False, tied=True)


def options_of(row: Row) -> dict[str, Any]:
    """The dictionary that the column `opts` holds, its keys in small letters; empty where it holds none."""
    words = {"true": "True", "false": "False", "null": "None"}
    found = re.sub(r"\b(true|false|null)\b", lambda word: words[word[0]], text(row, "opts"))
    try:
        value = ast.literal_eval(found)
    except (ValueError, SyntaxError):
        return {}
    return {str(key).lower(): v for key, v in value.items()} if isinstance(value, dict) else {}


def _yes(value: Any) -> bool:
    return str(value).lower() in ("1", "true", "yes", "1.0")


def parse(row: Row) -> tuple[Job, Layout]:
    """The job and the layout that a row describes.

    Defaults for blanks: tp, pp, dp, cp see `_degrees`; ep, etp, virtual_pp 1; zero_stage 1; recompute as little as
    fits; dtype bf16; gpu H100-80; seq 2048; micro_batch 1, or the whole share where `notes` says so;
    global_batch_seqs one micro-batch per rank and stage; attention flash, unless `notes` says unfused; sequence
    parallelism as the stack has it, unless `opts` or `notes` say otherwise.

    Raises:
        RowError: a column cannot be understood, or the degrees do not fit the number of GPUs.
    """
    shape, notes, opts = shape_of(row), text(row, "notes"), options_of(row)
    chip = _known("gpu", chip_called, text(row, "gpu") or "H100-80")
    number_format = _known("dtype", format_called, text(row, "dtype") or "bf16")
    n_gpus, tp, pp, cp, dp = _degrees(row)
    stack = stack_of(text(row, "source"), notes)
    if chip.name == "H100-80" and re.search(r"\b500 ?W\b", notes):
        chip = chips.find("H100-96")
    share = number(row, "global_batch_seqs", 0, least=0) / dp
    whole = max(1.0, share) if "=gbs/dp" in notes.replace(" ", "") and pp == 1 else 1.0
    micro = number(row, "micro_batch", whole, least=1e-6)
    batch = number(row, "global_batch_seqs", dp * micro * pp, least=1e-6)
    flash = "unfused" not in notes and str(opts.get("attention-backend", "")) != "unfused"
    if stack.name == "zero-bubble" and "attn=" not in notes:
        flash = False
    keys = ("sp", "seq_parallel", "sequence_parallel", "sequence-parallel")
    said = [opts[key] for key in keys if key in opts] + re.findall(r"\bsp=([01])", notes)
    schedule = re.search(r"schedule=([\w-]+)", notes)
    layout = Layout(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=count(row, "ep", 1), etp=count(row, "etp", 1),
        chunks=count(row, "virtual_pp", 1), micro_batch=micro, zero=_zero(row), recompute=_recompute(row),
        sequence_parallel=_yes(said[0]) if said else stack.sequence_parallel,
        schedule=_SCHEDULES.get(schedule[1].lower(), ONE_F_ONE_B) if schedule else ONE_F_ONE_B,
    )  # fmt: skip
    stack = _with_options(stack, opts, row, layout)
    fp8_attention = _yes(opts.get("fp8_dot_product_attention", opts.get("fp8_dpa")))
    job = Job(shape, chip, n_gpus, count(row, "seq", 2048), batch, number_format, stack, flash, fp8_attention)
    return job, layout if text(row, "recompute") else _as_needed(job, layout)


def _known(column: str, find: Callable[[str], Any], name: str) -> Any:
    try:
        return find(name)
    except ValueError as error:
        raise RowError(f"In the column {column!r}: {error}") from None


def _degrees(row: Row) -> tuple[int, int, int, int, int]:
    """n_gpus, tp, pp, cp and dp; the first blank one of dp, pp, tp, cp is what n_gpus leaves, the others 1."""
    found = {column: count(row, column, 1) for column in ("dp", "pp", "tp", "cp")}
    n_gpus = count(row, "n_gpus", math.prod(found.values()))
    if blank := [column for column in found if not text(row, column)]:
        found[blank[0]] = max(1, n_gpus // math.prod(found.values()))
    if math.prod(found.values()) != n_gpus:
        degrees = " x ".join(f"{column} {found[column]}" for column in ("tp", "pp", "cp", "dp"))
        raise RowError(
            f"In the column 'n_gpus': {n_gpus} GPUs are not {degrees}, which makes {math.prod(found.values())}."
        )
    return n_gpus, found["tp"], found["pp"], found["cp"], found["dp"]


def _as_needed(job: Job, layout: Layout) -> Layout:
    """The layout with the least recomputation that fits; as it is if none does."""
    tried = [replace(layout, recompute=policy) for policy in (NONE, SELECTIVE, FULL)]
    return next((way for way in tried if memory.fullest(job, way) <= memory.limit(job)), layout)


def _zero(row: Row) -> int:
    """The stage of ZeRO however it is written: 1, zero2, "3-HSDP", "2 (no reshard after forward)", fsdp."""
    said = text(row, "zero_stage").lower()
    names = {"": 1, "ddp": 0, "no": 0, "dist_opt": 1, "distopt": 1, "fsdp": 3, "fsdp2": 3}
    if found := re.match(r"(?:zero-?)?([0-3])(?:\.0)?(?![\d.])", said):
        return int(found[1])
    if said not in names:
        raise RowError(f"The column 'zero_stage' holds {said!r}; it must be 0, 1, 2 or 3.")
    return names[said]


def _recompute(row: Row) -> int:
    policy = text(row, "recompute").lower()
    if policy in _BLANK or policy in ("no", "off", "false", "0"):
        return NONE
    if re.search(_FULL, policy):
        return FULL
    if re.search(_SELECTIVE, policy):
        return SELECTIVE
    raise RowError(f"The column 'recompute' holds {policy!r}. It may be none, selective or full.")


def _with_options(stack: stacks.Stack, opts: Row, row: Row, layout: Layout) -> stacks.Stack:
    """The stack with what the options of this run change."""
    change: dict[str, Any] = {}
    if "full" in str(opts.get("cuda_graph_impl", "")).lower():
        change["floor"] = 0.0
    if _yes(opts.get("moe_a2a_overlap")):
        change["overlap_ep"] = 0.9
    elif "capacity factor" in text(row, "flags"):  # what is above it is dropped: nothing waits for a size
        change["moe_launches"] = 1.0
    experts = number(row, "n_experts", 0, least=0)
    if stack.name == "megatron-tests" and experts:
        change["workspace"] = 0.19e9
    if stack.name == "megatron-core" and experts and "moe_flex_dispatcher_backend" not in opts:
        change["one_copy"] = False  # a plain all-to-all
    if not _yes(opts.get("overlap_grad_reduce", 1)):
        change["overlap_dp"] = 0.0
    if "tp_comm_overlap" in opts:
        change["overlap_tp"] = max(0.8, stack.overlap_tp) if _yes(opts["tp_comm_overlap"]) else 0.0
    if any(_yes(opts.get(key)) for key in ("cross-entropy-loss-fusion", "defer-embedding-wgrad-compute")):
        change["logit_bytes"] = stack.logit_bytes + 4  # one more copy of the logits in 4 bytes
    if any(_yes(opts.get(key)) for key in ("fp32_grad_accum", "grad_reduce_in_fp32")):
        change["gradient_bytes"] = 4.0
    half = text(row, "dtype").lower() == "fp16" and layout.zero == 0
    if half and stack.weight_bytes + stack.gradient_bytes == 6:
        change["gradient_bytes"] = 6.0
    return replace(stack, **change)


def predict(row: Row) -> dict[str, Any]:
    """What a run will do.

    Returns:
        tokens_per_s_per_gpu; step_s; memory_gb, of the rank that holds most, in 10^9 bytes, as torch's
        max_memory_allocated counts; memory_gb_by_stage, a list; fits, whether that is below what the GPU gives.

    Raises:
        RowError: the row cannot be understood; the message names the column.
    """
    job, layout = parse(row)
    total = float(seconds.step(job, layout).total)
    stages = [float(memory.on_stage(job, layout, k).total) / 1e9 for k in range(layout.pp)]
    return {
        "tokens_per_s_per_gpu": float(job.batch * job.seq / job.n_gpus / total),
        "step_s": total,
        "memory_gb": max(stages),
        "memory_gb_by_stage": stages,
        "fits": bool(max(stages) * 1e9 <= memory.limit(job)),
    }
