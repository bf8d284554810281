"""A panel of sliders and menus above a picture, for a running kernel: each move draws the picture anew. On a page
without a kernel it stands still, so put a slider over some chosen pictures (`svg.Frames`) beside it.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """Pictures and tables under one another, shown as one."""

    parts: tuple[Any, ...]

    def _repr_html_(self) -> str:
        return "\n".join(part._repr_html_() for part in self.parts)


def panel(draw: Callable[..., Any], choices: Mapping[str, Sequence[Any]], *, start: Mapping[str, Any]) -> Any:
    """`draw(**chosen)` under one control per entry of `choices`: a menu for words, a slider for numbers.

    panel(draw, {"ranks": [2, 4, 8], "algorithm": ["ring", "tree"]}, start={"ranks": 4})

    A ValueError of `draw` is shown in the picture's place. `start` is what is chosen at first where it is not the
    first value.
    """
    import ipywidgets  # a heavy import, which only this function needs

    controls: dict[str, Any] = {}
    look = {"style": {"description_width": "8em"}, "layout": {"width": "min(30em, calc(100% - 8px))"}}
    for name, values in choices.items():
        kind = ipywidgets.Dropdown if any(isinstance(v, str) for v in values) else ipywidgets.SelectionSlider
        options = [(f"{v:g}" if isinstance(v, float) else str(v), v) for v in values]
        controls[name] = kind(options=options, value=start.get(name, values[0]), description=name, **look)
    picture = ipywidgets.HTML()

    def show(_: Any = None) -> None:
        try:
            picture.value = draw(**{name: control.value for name, control in controls.items()})._repr_html_()
        except ValueError as error:
            picture.value = f"<p>{html.escape(str(error))}</p>"

    for control in controls.values():
        control.observe(show, names="value")
    show()
    note = ipywidgets.HTML("<small>These controls work where the notebook runs in a kernel.</small>")
    return ipywidgets.VBox([*controls.values(), picture, note])
