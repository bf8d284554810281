"""`%%ranks` and `%ranks` in a bare IPython shell."""

import functools
import gc
import logging
import os
import weakref

import numpy as np
import pytest
import torch
from IPython.core.completer import provisionalcompleter

from rankcell import RankError, Run, doctor, errors, magics, source
from rankcell.engine import settings
from rankcell.errors import OptionError, PullError, PushError


@pytest.fixture
def cell(shell):
    """Run one rank cell: `cell("4 -o run", "rank")`."""
    return lambda line, source: shell.run_cell_magic("ranks", line, source)


def test_a_cell_gives_a_run_and_moves_names(cell, shell, monkeypatch):
    ended = []
    monkeypatch.setattr(magics._Live, "end", lambda live: ended.append(live.shown))
    shell.user_ns["here"] = torch.ones(2)
    run = cell("4 --push here --pull there -o kept", "there = here.sum().item() + rank\nonly = 1\nrank")
    assert isinstance(run, Run) and run.values == [0, 1, 2, 3] and shell.user_ns["kept"].ranks == run.ranks
    assert shell.user_ns["there"] == [2.0, 3.0, 4.0, 5.0] and ended
    assert cell("4 --only 0,2-3", "rank").values == [0, 2, 3]
    assert "only" not in shell.user_ns and "rank" not in shell.user_ns
    assert cell("4", "!echo hi from $((1 + 1))\n%pwd").ranks[1].stdout == "hi from 2\n"


def test_completion_inside_a_rank_cell(cell, shell):
    cell("4", "momentum_buffer = 3\nmodel = torch.nn.Linear(2, 2)")
    with provisionalcompleter():

        def complete(text):
            return [c.text for c in shell.Completer.completions(text, len(text))]

        assert "world_size" in complete("%%ranks 4\nworld_s")
        assert "momentum_buffer" in complete("%%ranks 4\nx = momentum_b")
        assert any(c.endswith("weight") for c in complete("%%ranks 4\nmodel.wei"))
        assert "momentum_buffer" not in complete("x = momentum_b")
        assert complete("%%ranks 4 --tim") == ["--timeout"] != complete("%%ranks 4\n--tim")
        assert {"--only", "-o"} <= set(complete("%%ranks 4 -")) <= set(source.option_strings())
    assert "async_op" in shell.object_inspect_mime("dist.all_reduce")["text/plain"]  # what Shift+Tab asks
    assert "dist" not in shell.user_ns


def test_a_module_that_was_edited_is_told_once_unless_a_rank_loads_it_anew(
    cell, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "helper_of_mine.py"
    here = f"import importlib, os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, '')\nimport helper_of_mine"
    says = "helper_of_mine.py has changed since this rank loaded it: `importlib.reload(helper_of_mine)`"
    for time, text, told in (
        (1, here, False), (1, "sys.modules['odd'] = type('Odd', (), {'__file__': 3})()", False),
        (2, "helper_of_mine.n", True), (2, "1", False),
        (3, "importlib.reload(helper_of_mine)", False),
    ):  # fmt: skip
        file.write_text(f"n = {time}")
        os.utime(file, (time, time))
        cell("2", text)
        assert (says in capsys.readouterr().out) == told, text


def test_a_module_that_only_the_notebook_finds_is_told_with_its_folder(cell, shell, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def f(): return 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    shell.run_cell("import only_here")
    with pytest.raises(RankError, match=f"found only_here in {tmp_path}: `sys.path.append"):
        cell("2", "import only_here")


def test_a_model_comes_back_as_a_list_and_a_class_of_the_notebook_is_asked_for(cell, shell, tmp_path, capsys):
    shell.run_cell("import torch\nclass Net(torch.nn.Linear): pass\nnet = Net(1, 1)")
    save = f"torch.save(net, '{tmp_path}/net')"
    with pytest.raises(RankError, match="--push Net"):
        cell("2 --push net", save)
    cell("2 --push net,Net --pull net", save)
    assert "`net` is a list now, with the value of each rank: `net[0]`" in capsys.readouterr().out


def test_a_figure_of_a_rank_is_not_shown_again_below(cell):
    """matplotlib's backend for notebooks shows what is open when a cell ends, and a figure that arrives is open."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    own = pyplot.figure().number
    assert len(cell("2", "import matplotlib.pyplot as plt\nplt.figure()").values) == 2
    assert pyplot.get_fignums() == [own]
    pyplot.close(own)


def test_the_line_magic_lists_stops_and_restarts(cell, shell, capsys):
    cell("2", "x = 1")
    cell("1", "rank")
    assert "1 rank talks over gloo" in capsys.readouterr().out
    shell.run_line_magic("ranks", "")
    shown = capsys.readouterr().out
    assert "2 ranks on cpu (gloo)" in shown and "pids" in shown
    shell.run_line_magic("ranks", "restart")
    assert "Started anew: " in capsys.readouterr().out
    assert cell("2", "'x' in globals()").values == [False, False]
    shell.run_line_magic("ranks", "stop")
    assert "The next %%ranks cell starts new ranks." in capsys.readouterr().out
    shell.run_line_magic("ranks", "")
    assert capsys.readouterr().out == "No ranks are alive. A `%%ranks 4` cell starts four.\n"
    with pytest.raises(OptionError, match=r"To run a cell on the ranks, begin it with `%%ranks 4`"):
        shell.run_line_magic("ranks", "4")
    below = shell.run_cell("# a comment\n%%ranks 4\nrank").error_in_exec
    assert str(below).startswith("`%%ranks 4` must be the first line of its cell: ")
    with pytest.raises(OptionError, match=r"%ranks has no option stpo\. Did you mean stop"):
        shell.run_line_magic("ranks", "stpo")
    shell.run_cell("%%ranks?")
    text = capsys.readouterr().out
    assert [option for option in source.option_strings() if option not in text] == []


# fmt: off
BAD_LINES = {
    "4 --onyl 2": (OptionError, "%%ranks has no option --onyl. Did you mean --only? Its options are: --device, "),
    "": (OptionError, "how many ranks? Write for example `%%ranks 4`."),
    "0": (OptionError, "'0' is no number of ranks."),
    "100000": (errors.WorldSizeError, "100000 ranks do not fit on this machine: "),
    "4 --only two": (OptionError, "'two' names no ranks. Write 2, or 0,2, or 0-2."),
    "4 --only 7": (OptionError, "rank 7 cannot run the cell: this world has ranks 0-3."),
    "4 --timeout soon": (OptionError, "'soon' is no time. Write a number of seconds above 0, such as 60."),
    "4 --timeout 0": (OptionError, "'0' is no time."),
    "4 --device gpu": (OptionError, "device 'gpu' does not exist. Choose cpu, cuda or auto."),
    "4 --push 1a": (OptionError, "'1a' is no list of names. Write x or x,y."),
    "4 -o a,b": (OptionError, "'a,b' are 2 names, and one Run needs one."),
    "4 --out": (OptionError, "--out needs NAME behind it"),
    "4 --push 'x": (OptionError, "`%%ranks 4 --push 'x`: No closing quotation."),
    "4 x": (OptionError, "'x' is one word too many in the `%%ranks` line."),
    "4 --nodes two": (OptionError, "'two' is no number of nodes"),
    "4 --nodes 2": (errors.AllocationError, "2 nodes need a Slurm allocation"),
    "4 --push nowhere": (PushError, "nowhere cannot be pushed: the notebook has no such name"),
    "4 --push generator": (PushError, "generator cannot be sent to the ranks: "),
}
# fmt: on


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_says_what_is_possible(cell, shell, monkeypatch, line):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    shell.user_ns["generator"] = (i for i in range(3))
    kind, text = BAD_LINES[line]
    with pytest.raises(kind) as caught:
        cell(line, "1")
    assert text in str(caught.value)


def test_errors_count_lines_as_the_notebook_shows_them(cell, shell, monkeypatch):
    with pytest.raises(errors.CellSyntaxError) as caught:
        cell("4", "x = 1\nif x\n    pass")
    assert str(caught.value) == "expected ':', line 3\n    if x\n        ^\nNo rank has run."
    with pytest.raises(RankError, match=r"line 3, in <module>\n    1 / 0"):
        cell("4", "x = 1\n1 / 0")
    shell.user_ns |= {"rate": 3, "np": torch}
    with pytest.raises(
        RankError, match=r"The notebook has rate: `--push rate` in the `%%ranks` line copies it"
    ):
        cell("4  # a comment --push rate", "rate + 1")
    with pytest.raises(
        RankError, match=r"The notebook has imported np; the ranks have not: import it in a rank"
    ):
        cell("4", "np.ones(1)")
    monkeypatch.setenv("SET_LATER", "1")
    with pytest.raises(RankError, match=r"set it in a rank cell, or in the notebook before `%ranks restart`"):
        cell("4", "import os\nos.environ['SET_LATER']")
    cell("4", "max, filter = rank, lambda x: x")
    with pytest.raises(RankError, match=r"`max` is of type int here, which hides Python's `max`: `del max`"):
        cell("4", "max(1, 2)")
    with pytest.raises(RankError) as other:
        cell("4", "filter(1)(2)")  # callable, and what it gives is not
    assert "hides" not in str(other.value)
    cell("4", "del max, filter")
    cell("4", "dist, device = torch.ones(2), 'cuda:7'")
    with pytest.raises(
        RankError, match=r"A cell has set `dist`: it is of type Tensor now, no longer torch\.dis"
    ):
        cell("4", "dist.all_reduce(torch.ones(1))")
    with pytest.raises(
        RankError, match=r"A cell has set `device`: it is of type str now, no longer torch\.device"
    ):
        cell("4", "torch.ones(1).to(device)")
    for innocent in (
        "dist.view(3)",
        "dist.view(2) + 'a'.of",
        "def f(dist): dist.to_the_left()\nf(rank)",
        "torch.ones(2, device='meta').to('cpu'), device",
        "device_mesh(device)",
    ):
        with pytest.raises(RankError) as other:
            cell("4", innocent)
        assert "has set" not in str(other.value)
    cell("4", "del dist, device")
    assert cell("4", "dist.all_reduce(x := torch.ones(1, device=device))\nx.item()").values == [4.0] * 4
    with pytest.raises(RankError, match="A rank has no keyboard, so the debugger cannot ask"):
        cell("4", "import IPython\nIPython.embed()")
    with pytest.raises(RankError) as other:
        cell("4", "settings = {}\nsettings['SET_LATER']")
    assert "os.environ" not in str(other.value)
    with pytest.raises(RankError, match="`group_src` and `group_dst` count within the group"):
        cell("4", "g = dist.new_group([2, 3])\nif rank > 1: dist.broadcast(torch.ones(1), 0, group=g)")
    with pytest.raises(RankError, match=r"input\(\) does not work on a rank"):
        cell("4", "name = input('name? ')")
    shell.user_ns["nothing"] = "mine"
    with pytest.raises(PullError, match="nothing on ranks 0-3: no such name") as missing:
        cell("4 --pull some,nothing", "some = rank")
    assert shell.user_ns["some"] == [0, 1, 2, 3] and missing.value.run.values == [None] * 4
    assert shell.user_ns["nothing"] == "mine"
    with pytest.raises(PullError, match="one on ranks 1-3: no such name"):
        cell("4 --pull one", "if rank == 0: one = 1")
    assert str(shell.user_ns["one"]) == f"[1{', <no such name>' * 3}]"
    if not torch.cuda.is_available():
        with pytest.raises(RankError, match="This torch finds no GPU") as no_gpu:
            cell("4", "torch.cuda.set_device(rank)")
        assert "Did you mean" not in str(no_gpu.value)
    cell("4", "%cd ..")


def test_ranks_follow_the_notebook_into_another_folder(shell, tmp_path, monkeypatch):
    where = "%%ranks 4\nimport os\nos.getcwd()"
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        assert shell.run_cell(where).result.values == [str(tmp_path / folder)] * 4
    shell.run_cell("%%ranks 4\nif rank == 1: os.chdir('/')")  # where a rank goes by itself it stays
    assert shell.run_cell(where).result.values[1] == "/"


def test_ranks_follow_the_notebook_to_another_default_dtype(shell):
    def makes(setting=""):
        return shell.run_cell(f"%%ranks 4\n{setting}\nstr(torch.ones(1).dtype)[6:]").result.values

    assert makes() == ["float32"] * 4
    try:
        torch.set_default_dtype(torch.float64)
        assert makes() == ["float64"] * 4
        # what a rank sets by itself stays
        assert makes("if rank == 1: torch.set_default_dtype(torch.float16)")[:2] == ["float64", "float16"]
        assert makes()[:2] == ["float64", "float16"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert makes() == ["float32"] * 4


def test_ranks_follow_how_the_notebook_prints_and_logs(shell):
    shows = "import logging, numpy as np\nlogging.getLogger('training').info('a loss')\n"
    shows += "f'{torch.ones(1) / 3} {np.ones(1) / 3} {torch.get_float32_matmul_precision()}'"

    def shown(setting=""):
        rank = shell.run_cell(f"%%ranks 4\n{setting}\n{shows}").result.ranks[1]
        return rank.stderr + rank.value

    assert shown() == "tensor([0.3333]) [0.33333333] highest"
    before = settings.read()
    try:
        logging.root.setLevel(logging.INFO)
        torch.set_printoptions(precision=2)
        np.set_printoptions(precision=3)
        torch.set_float32_matmul_precision("high")
        assert shown() == "a loss\ntensor([0.33]) [0.333] high"
        # what a rank sets by itself stays
        assert shown("torch.set_printoptions(precision=1)") == "a loss\ntensor([0.3]) [0.333] high"
        assert shown() == "a loss\ntensor([0.3]) [0.333] high"
    finally:
        settings.follow(before, settings.read())
        logging.lastResort.setLevel(logging.WARNING)
    assert shown() == "tensor([0.3333]) [0.33333333] highest"


def test_a_precision_that_torch_does_not_tell_stops_no_cell(shell):
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert shell.run_cell("%%ranks 4\nrank").result.values == [0, 1, 2, 3]
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")


def test_what_cannot_be_pushed_is_named_inside_of_an_object(shell):
    class Trainer:
        def __init__(self):
            self.rate, self.loader = 0.1, Loader()

    class Loader:
        def __init__(self):
            self.size, self.batches = 4, {"train": [(i for i in range(3))]}

    shell.user_ns["trainer"] = Trainer()
    with pytest.raises(
        PushError, match=r"because of trainer.loader.batches\['train'\]\[0\]: TypeError: cannot pickle"
    ):
        shell.run_cell("%%ranks 4 --push trainer\n1").raise_error()
    shell.user_ns["loops"] = functools.partial(min, shell.user_ns["trainer"])
    shell.run_cell("def later(step): return loops() if step else later(1)")
    with pytest.raises(PushError, match=r"because it uses loops.args\[0\].loader.batches"):
        shell.run_cell("%%ranks 4 --push later\n1").raise_error()


def test_what_cannot_be_pulled_is_named_inside_of_an_object(shell):
    with pytest.raises(
        PullError, match=r"because of kept\['group'\]: TypeError: .* `weights = model.state_dict\(\)`"
    ):
        shell.run_cell("%%ranks 4 --pull kept\nkept = {'group': dist.new_group([0, 1, 2, 3])}").raise_error()


def test_a_function_reads_names_that_came_with_it_and_the_cell_sets_others(shell, capsys):
    shell.run_cell("scale = 1.0\ndef scaled(x): return x * scale").raise_error()
    told = (
        "On ranks 0-3: `scaled` reads the `scale` of the notebook, which came with it, and not the one that"
    )
    assert shell.run_cell("%%ranks 4 --push scaled\nscale = 10.0\nscaled(2)").result.values == [2.0] * 4
    assert told in capsys.readouterr().out
    # set in an earlier cell, or the same, or taken away
    for push, does in (
        ("scaled", ""),
        ("scaled,scale", ""),
        ("scaled", "scale = 0.5 + 0.5"),
        ("scaled", "del scale"),
    ):
        shell.run_cell(f"%%ranks 4 --push {push}\n{does}\nscaled(2)").raise_error()
        assert told not in capsys.readouterr().out


def test_the_name_of_the_run_is_in_the_notebook_and_not_on_the_ranks(shell):
    with pytest.raises(RankError, match="`-o found` names what came of the cell, in the notebook"):
        shell.run_cell("%%ranks 4 -o found\nfound.values").raise_error()


def test_an_object_that_asks_itself_for_ever_while_it_is_read_is_told_in_a_few_lines(shell):
    source = "class Wraps:\n    def __init__(self, inner):\n        self._inner = inner\n"
    source += (
        "    def __getattr__(self, name):\n        return getattr(self._inner, name)\nstore = Wraps([1])"
    )
    shell.run_cell(source).raise_error()
    with pytest.raises(RankError, match="RecursionError") as caught:
        shell.run_cell("%%ranks 4 --push store\nstore").raise_error()
    said = str(caught.value)
    assert "let it raise AttributeError" in said and "times" in said and len(said.splitlines()) < 20
    assert shell.run_cell("%%ranks 4\nrank").result.values == [0, 1, 2, 3]


def test_a_function_with_a_cache_can_be_pushed(shell):
    """By its name alone, as pickle would send it, no rank knows it; it may call itself."""
    source = "@lru_cache(maxsize=None)\ndef steps(n):\n    return n if n < 2 else steps(n - 1) + steps(n - 2)"
    shell.run_cell(f"from functools import lru_cache\n{source}").raise_error()
    run = shell.run_cell("%%ranks 4 --push steps\nsteps(20 + rank), steps.cache_info().maxsize").result
    assert run.values == [(6765, None), (10946, None), (17711, None), (28657, None)]


def test_what_cannot_be_read_on_the_ranks_is_named(shell, monkeypatch):
    """A class that was made at run time inside a module, as deap does: the module of the ranks lacks it."""
    made = type("Individual", (list,), {"__module__": "textwrap"})
    monkeypatch.setattr("textwrap.Individual", made, raising=False)
    shell.user_ns["population"] = [made([1, 2])]
    with pytest.raises(RankError, match="Can't get attribute 'Individual'") as caught:
        shell.run_cell("%%ranks 4 --push population\n1").raise_error()
    said = " ".join(str(caught.value).split())
    assert (
        "population came and could not be read here. Does this rank lack something that it is made of?"
        in said
    )
    assert "Run in a rank cell, too, what has made that in the notebook." in said


def test_a_model_of_a_group_is_no_value_for_the_notebook(shell, capsys):
    assert not shell.run_cell(
        "%%ranks 4 --pull model\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))"
    ).success
    told = capsys.readouterr()
    assert "as a model in DDP does: pull what is in it, its `.module`" in " ".join(told.out.split())
    assert "put `%%ranks 4`" not in told.err


def test_a_model_of_which_ranks_trained_copies(shell, capsys):
    """The notebook is told when it uses its own one, once; not if nothing was trained, or it was loaded."""
    cell = "%%ranks 4 --push model,still\nstill(torch.ones(1, 2))\n"
    train = cell + "with torch.no_grad(): model.weight += 1"
    shell.user_ns |= {"model": torch.nn.Linear(2, 2), "still": torch.nn.Linear(2, 2)}
    for first, second, times in (
        (train, "model.bias", 1),
        (train, "still.bias", 0),
        (cell, "model.bias", 0),
        (train, "model.load_state_dict(model.state_dict())", 0),
        (train.replace("still\n", "still --pull model\n"), "model[0].bias", 0),
    ):
        shell.run_cell(first)
        shell.run_cell(second)
        shell.run_cell(second)
        assert capsys.readouterr().err.count("The ranks have trained copies of `model`") == times, (
            first,
            second,
        )


def test_plain_things_of_which_ranks_changed_copies(shell, capsys):
    """The notebook is told of lists, dicts and its own instances; not of what was read, or has another value here."""
    shell.run_cell("""
class Trainer:
    def __init__(self): self.metrics = {}
    def __eq__(self, other): raise NotImplementedError
""")
    for options, cell, use, times in (
        ("", "trainer.metrics['loss'] = 1.0", "trainer", 1),
        ("", "seen['loss'].append(2.0)", "len(seen)", 1),
        ("", "seen['weight'] += 1", "seen", 1),
        ("", "if rank == 2: seen['loss'] = None", "seen", 1),
        ("", "dict(trainer.metrics), [*seen['loss']], seen['weight'] * 2", "trainer, seen", 0),
        ("", "seen, x = {}, x.add_(1)", "seen, x", 0),
        ("", "trainer.metrics['loss'] = 1.0", "trainer.metrics = {'loss': 1.0}", 0),
        (" --pull seen", "seen['loss'].append(2.0)", "seen[0]['loss']", 0),
    ):
        shell.run_cell("trainer = Trainer()")
        shell.user_ns |= {"seen": {"loss": [0.0], "weight": torch.ones(2)}, "x": torch.ones(2)}
        assert shell.run_cell(f"%%ranks 4 --push trainer,seen,x{options}\n{cell}").success
        shell.run_cell(use)
        shell.run_cell(use)
        assert capsys.readouterr().err.count("The ranks have changed copies of `") == times, (cell, use)


def test_marks_of_what_was_read_stay_and_run_no_code():
    class Reader:
        def __init__(self):
            self.rows = [*range(5000)]

        def __getattr__(self, name):
            raise NotImplementedError

        __len__ = __iter__ = __eq__ = __bool__ = __getattr__

        @functools.cached_property
        def sorted(self):
            return sorted(self.rows)

    Reader.__module__ = "__main__"
    reader = Reader()
    before = source.marks(reader)
    assert reader.sorted[0] == 0 and source.marks(reader)[0] == before[0] and len(before[0]) <= 1000
    reader.rows.append(5000)
    assert source.marks(reader)[0] != before[0]


@pytest.mark.parametrize("source", ["rank", "import torch.distributed as dist\ndist.get_rank()", "lr"])
def test_an_ordinary_cell_is_told_what_only_ranks_have(shell, capsys, source):
    assert not shell.run_cell(source).success
    assert ("put `%%ranks 4` on the first line" in capsys.readouterr().err) == (source != "lr")
    shell.user_ns.pop("dist", None)


def test_an_ordinary_cell_is_told_of_names_that_the_ranks_have(cell, shell, capsys):
    cell("2", "def of_ranks(): return 1")
    capsys.readouterr()
    assert not shell.run_cell("of_ranks()").success
    said = capsys.readouterr().err
    assert (
        "Only the ranks have of_ranks: begin the cell with `%%ranks 2`" in said and "--pull of_ranks" in said
    )


def test_figures_are_shown_where_they_were_drawn_and_only_there(cell, shell, monkeypatch):
    """Open figures at the end of a cell, also of one that fails; a figure that is the value is not shown here again."""
    plot = "import matplotlib; matplotlib.use('module://matplotlib_inline.backend_inline')\n"
    plot += "import matplotlib.pyplot as plt\nfig, ax = plt.subplots(); ax.plot([1, 2])\n"
    with pytest.raises(RankError) as caught:
        cell("1", f"{plot}1 / 0")
    assert ["image/png" in d.data for d in caught.value.run.ranks[0].displays] == [True]
    assert len(cell("1", f"{plot}print('end')").ranks[0].displays) == 1
    figure = cell("1", f"{plot}fig").values[0]
    import matplotlib.pyplot as plt

    assert type(figure).__name__ == "Figure" and plt.get_fignums() == []


def test_parts_answer_to_words_of_the_magic(shell, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "findings", lambda: [doctor.Finding("works", "all of it.")])
    shell.run_line_magic("ranks", "doctor")
    assert capsys.readouterr().out.endswith("works    all of it.\n")


def test_what_nobody_named_is_not_kept(cell, shell):
    shell.run_cell("%%ranks 4 --pull big\nbig = torch.zeros(1 << 10)\nbig")
    held = weakref.ref(shell.user_ns.pop("big")[0])
    gc.collect()
    assert held() is None
    first = cell("4", "dist.barrier(); print('said'); rank")
    named = cell("4 -o mine", "dist.barrier()")
    for _ in range(magics.KEPT):
        cell("4", "rank")
    assert first.events == () and first.ranks[1].stdout == "said\n" and first.values == [0, 1, 2, 3]
    assert named.events == () and len(shell.user_ns["mine"].events) == 4


def test_seconds_are_shown_once_each(monkeypatch):
    """While a cell runs; each takes the place of the one before."""
    shown, cleared = [], []
    monkeypatch.setattr(magics, "display", lambda data, raw: shown.append(data["text/plain"].strip()))
    monkeypatch.setattr(magics, "clear_output", lambda wait: cleared.append(len(shown)))
    live = magics._Live()
    for seconds in (1.0, 1.2, 2.1):
        live.update(Run("x", (), seconds=seconds), "ranks 0-3 computing")
    assert shown == ["running for 1 s: ranks 0-3 computing", "running for 2 s: ranks 0-3 computing"]
    live.end()
    assert cleared == [1, 2]
