"""`%%ranks` and `%ranks` in a bare IPython shell."""

import os

import nbformat
import pytest
import torch

from rankcell import RankError, Run, doctor, errors, magics, source, versions
from rankcell.errors import (
    AllocationError,
    CellSyntaxError,
    OptionError,
    PullError,
    PushError,
    WorldSizeError,
)


@pytest.fixture
def cell(shell):
    """Run one rank cell: `cell("4 -o run", "rank")`."""
    return lambda line, source: shell.run_cell_magic("ranks", line, source)


def test_the_value_of_a_cell_is_a_run(cell):
    run = cell("4", "rank")
    assert isinstance(run, Run) and run.values == [0, 1, 2, 3]


def test_out_names_the_run(cell, shell):
    run = cell("4 -o kept", "print(rank)")
    assert shell.user_ns["kept"].ranks == run.ranks and run.ranks[2].stdout == "2\n"


def test_push_and_pull(cell, shell):
    shell.user_ns["here"] = torch.ones(2)
    cell("4 --push here --pull there", "there = here.sum().item() + rank")
    assert shell.user_ns["there"] == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(("text", "ranks"), [("2", [2]), ("0,2", [0, 2]), ("1-3", [1, 2, 3])])
def test_only_some_ranks(cell, text, ranks):
    assert cell(f"4 --only {text}", "rank").values == ranks


def test_fresh_ranks_know_no_names(cell):
    cell("2", "old = 1")
    assert cell("2 --fresh", "'old' in globals()").values == [False, False]


def test_magics_and_shell_lines_inside_a_rank_cell(cell):
    assert cell("4", "!echo hi from $((1 + 1))\n%pwd").ranks[1].stdout == "hi from 2\n"


def test_lines_count_as_the_notebook_shows_them(cell):
    with pytest.raises(RankError, match=r"line 3, in <module>\n    1 / 0"):
        cell("4", "x = 1\n1 / 0")


def test_the_ranks_names_do_not_enter_the_notebook(cell, shell):
    cell("4", "only_there = 1")
    assert "only_there" not in shell.user_ns and "rank" not in shell.user_ns


def test_completion_inside_a_rank_cell(cell, shell):
    cell("4", "momentum_buffer = 3\nmodel = torch.nn.Linear(2, 2)")
    with __import__("IPython").core.completer.provisionalcompleter():

        def complete(text):
            return [c.text for c in shell.Completer.completions(text, len(text))]

        assert "world_size" in complete("%%ranks 4\nworld_s")
        assert "momentum_buffer" in complete("%%ranks 4\nx = momentum_b")
        assert any(c.endswith("weight") for c in complete("%%ranks 4\nmodel.wei"))
        assert "momentum_buffer" not in complete("x = momentum_b")


def test_completion_of_the_options(shell):
    with __import__("IPython").core.completer.provisionalcompleter():

        def complete(text):
            return [c.text for c in shell.Completer.completions(text, len(text))]

        assert complete("%%ranks 4 --st") == ["--step"]
        assert {"--local", "--only", "-o"} <= set(complete("%%ranks 4 -")) <= set(source.option_strings())
        assert "--step" not in complete("%%ranks 4\nx --st")


def test_shift_tab_knows_the_modules_of_the_ranks(shell):
    assert "async_op" in shell.object_inspect_mime("dist.all_reduce")["text/plain"]
    assert "dist" not in shell.user_ns
    with pytest.raises(KeyError):
        shell.object_inspect_mime("no_such_name")
    shell.user_ns["dist"] = "mine"
    try:
        assert "mine" in shell.object_inspect_mime("dist")["text/plain"]
    finally:
        del shell.user_ns["dist"]


@pytest.mark.parametrize("option, wanted", [("--step", "NAMES"), ("--out", "NAME"), ("--device", "DEVICE")])
def test_an_option_without_its_value_says_what_it_needs(cell, option, wanted):
    with pytest.raises(OptionError, match=f"^{option} needs {wanted} behind it"):
        cell(f"2 {option}", "x = 1")


def test_the_line_magic_lists_stops_and_restarts(cell, shell, capsys):
    cell("2", "x = 1")
    shown = repr(shell.run_line_magic("ranks", ""))
    assert "2 ranks on cpu (gloo)" in shown and "pids" in shown
    shell.run_line_magic("ranks", "restart")
    assert "Started anew: " in capsys.readouterr().out
    assert cell("2", "'x' in globals()").values == [False, False]
    shell.run_line_magic("ranks", "stop")
    assert "The next %%ranks cell starts new ranks." in capsys.readouterr().out
    assert repr(shell.run_line_magic("ranks", "")) == "No ranks are alive. A `%%ranks 4` cell starts four."


def test_help_lists_every_option(shell, capsys):
    shell.run_cell("%%ranks?")
    text = capsys.readouterr().out
    for option in ("--only", "--push", "--pull", "--out", "--timeout", "--device", "--fresh", "--values"):
        assert option in text


BAD_LINES = {
    "4 --onyl 2": "%%ranks has no option --onyl. Did you mean --only? Its options are: --against, --as, --device",
    "": "how many ranks? Write for example `%%ranks 4`.",
    "four": "'four' is no number of ranks. Write for example `%%ranks 4`.",
    "0": "'0' is no number of ranks.",
    "4 --only two": "'two' names no ranks. Write 2, or 0,2, or 0-2.",
    "4 --only 7": "rank 7 cannot run the cell: this world has ranks 0-3.",
    "4 --timeout soon": "'soon' is no time. Write a number of seconds above 0, such as 60.",
    "4 --device gpu": "device 'gpu' does not exist. Choose cpu, cuda or auto.",
    "4 --push a b": "'b' is one word too many in the `%%ranks` line.",
    "4 --push 1a": "'1a' is no list of names. Write x or x,y.",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_says_what_is_possible(cell, line):
    with pytest.raises((OptionError, ValueError)) as caught:
        cell(line, "1")
    assert BAD_LINES[line] in str(caught.value)


def test_a_line_magic_with_a_number_says_how_to_run_a_cell(shell):
    with pytest.raises(OptionError, match=r"To run a cell on the ranks, begin it with `%%ranks 4`"):
        shell.run_line_magic("ranks", "4")
    with pytest.raises(OptionError, match=r"%ranks has no option stpo\. Did you mean stop"):
        shell.run_line_magic("ranks", "stpo")


def test_a_syntax_error_is_shown_once_with_its_line(cell):
    with pytest.raises(CellSyntaxError) as caught:
        cell("4", "x = 1\nif x\n    pass")
    assert str(caught.value) == "expected ':', line 3\n    if x\n        ^\nNo rank has run."


def test_a_world_too_large_for_the_machine(cell):
    with pytest.raises(
        WorldSizeError, match=r"100000 ranks do not fit on this machine: .* It has room for \d+ ranks"
    ):
        cell("100000", "1")


def test_what_cannot_be_pushed(cell, shell):
    with pytest.raises(PushError, match="nowhere cannot be pushed: the notebook has no such name"):
        cell("4 --push nowhere", "1")
    shell.user_ns["generator"] = (i for i in range(3))
    with pytest.raises(PushError, match=r"generator cannot be sent to the ranks: .* No rank has run"):
        cell("4 --push generator", "1")
    assert cell("4", "rank").values == [0, 1, 2, 3]


def test_what_cannot_be_pulled_leaves_the_rest(cell, shell):
    with pytest.raises(PullError, match="nothing on ranks 0-3: no such name") as caught:
        cell("4 --pull some,nothing", "some = rank")
    assert shell.user_ns["some"] == [0, 1, 2, 3] and caught.value.run.values == [None] * 4


def test_input_on_a_rank_says_what_to_do(cell):
    with pytest.raises(RankError, match=r"input\(\) does not work on a rank"):
        cell("4", "name = input('name? ')")
    assert cell("4", "rank").values == [0, 1, 2, 3]


def test_export_writes_the_named_notebook_as_a_script(shell, tmp_path, monkeypatch, capsys):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%%ranks 2\nrank")])
    nbformat.write(notebook, tmp_path / "mine.ipynb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    with pytest.raises(OptionError, match="which notebook"):
        shell.run_line_magic("ranks", "export")
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "mine.ipynb"))
    shell.run_line_magic("ranks", "export --to job")
    assert "1 cell for 2 ranks" in capsys.readouterr().out
    assert any((tmp_path / "job").glob("*.py"))


def test_nodes_need_an_allocation(cell, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(AllocationError, match="2 nodes need a Slurm allocation"):
        cell("4 --nodes 2", "rank")
    with pytest.raises(OptionError, match="'two' is no number of nodes"):
        cell("4 --nodes two", "rank")


def test_pulled_values_are_held_by_their_names_alone(cell, shell):
    import gc
    import weakref

    shell.run_cell("%%ranks 4 --pull big\nbig = torch.zeros(1 << 10)\nbig")
    held = weakref.ref(shell.user_ns["big"][0])
    assert held() is not None
    del shell.user_ns["big"]
    gc.collect()
    assert held() is None


def test_runs_that_nobody_named_keep_little(cell, shell):
    from rankcell.magics import KEPT

    first = cell("4", "dist.barrier(); print('said'); rank")
    named = cell("4 -o mine", "dist.barrier()")
    for _ in range(KEPT):
        cell("4", "rank")
    assert first.events == () and first.ranks[1].stdout == "said\n" and first.values == [0, 1, 2, 3]
    assert named.events == () and len(shell.user_ns["mine"].events) == 4


@pytest.mark.parametrize("line", ["²", "4 --only 7", "4 --only 2-"])
def test_odd_numbers_are_explained_without_a_traceback(shell, line):
    with pytest.raises(errors.OptionError):
        shell.run_cell_magic("ranks", line, "1")


def test_threads_that_wait_sleep_so_that_the_ranks_get_the_cores(shell, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    shell.run_line_magic("reload_ext", "rankcell")
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


def test_doctor_looks_at_this_machine(shell, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "gather", lambda: doctor.Facts(host="here"))
    shell.run_line_magic("ranks", "doctor")
    assert capsys.readouterr().out.startswith("rankcell doctor on here\n")


def test_a_torch_of_the_future_is_named_once(cell, shell, capsys, monkeypatch):
    monkeypatch.setattr(versions, "NEWEST", (2, 5))
    monkeypatch.setattr(shell.find_magic("ranks", "cell").__self__, "_warned", False)
    shell.run_line_magic("ranks", "stop")
    cell("1", "rank")
    assert (
        "is newer than those on which the course was tried, 2.11 to 2.5. It goes on"
        in capsys.readouterr().out
    )
    cell("1 --fresh", "rank")
    shell.run_line_magic("ranks", "stop")
    cell("1", "rank")
    assert "is newer" not in capsys.readouterr().out
    shell.run_line_magic("ranks", "stop")


def test_while_a_cell_runs_its_seconds_are_shown_once_each(monkeypatch):
    shown = []
    monkeypatch.setattr(magics, "display", lambda data, raw: shown.append(data["text/plain"].strip()))
    monkeypatch.setattr(magics, "clear_output", lambda wait: None)
    live = magics._Live()
    for seconds in (1.0, 1.2, 2.1):
        live.update(Run("x", (), seconds=seconds), "ranks 0-3 computing")
    assert shown == ["running for 1 s: ranks 0-3 computing", "running for 2 s: ranks 0-3 computing"]


def test_a_first_cell_says_what_it_waits_for(monkeypatch):
    shown, cleared = [], []
    monkeypatch.setattr(magics, "display", lambda data, raw: shown.append(data["text/plain"]))
    monkeypatch.setattr(magics, "clear_output", lambda wait: cleared.append(len(shown)))
    monkeypatch.setattr(magics.world, "warm_up", lambda on_wait: [on_wait(s) for s in (1.0, 2.0, 3.1)])
    magics.RankMagics._wait_for_torch(None, 4)
    assert [text.split()[0] + text[-5:] for text in shown] == [
        "starting(1 s)",
        "starting(2 s)",
        "starting(3 s)",
    ]
    assert "4 ranks" in shown[0] and cleared == [
        1,
        2,
        3,
    ]  # each takes the place of the one before, and then none stands
