"""How the site colours cells and errors: lexers for Pygments."""

import re

from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import RegexLexer, bygroups, using
from pygments.lexers.python import PythonLexer
from pygments.token import Generic, Keyword, Operator, Text


class RankCellLexer(IPython3Lexer):
    """IPython's lexer shows all that follows an unknown cell magic as plain text. Ours is Python below."""

    name, aliases, filenames, mimetypes = "IPython with rank cells", ["ipython3"], [], []
    tokens = IPython3Lexer.tokens | {
        "root": [
            (
                r"(?s)\A(%%)(ranks|time|timeit|capture)\b([^\n]*\n)(.*)",
                bygroups(Operator, Keyword, Text, using(PythonLexer)),
            ),
            (
                r"(?s)\A(%%)(slurm)\b([^\n]*\n)(.*)",  # lines that begin with ! go to a shell
                bygroups(Operator, Keyword, Text, using(IPython3Lexer)),
            ),
            *IPython3Lexer.tokens["root"],
        ]
    }


class CellErrorLexer(RegexLexer):
    """The name of the error and the line that raised it stand out; a rank's error is prose, not Python."""

    name, aliases = "Error of a cell", ["cell-error"]
    flags = re.MULTILINE
    tokens = {  # noqa: RUF012  (Pygments reads a class attribute)
        "root": [
            (r"^\w*(Error|Exception|Timeout|Lost|Deadlock|Interrupt)\b", Generic.Strong),
            (r"^-+> ?\d+.*\n", Generic.Strong),
            (r".*\n", Text),
        ]
    }
