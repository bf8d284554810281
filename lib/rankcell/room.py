"""`rankcell room`: a page for the instructor that shows who is where, and which check fails most.

Fed by what students share of their own will (`progress.py`), through a shared folder or an address with a key. The page
has a key of its own: who sends does not see. One process of the standard library, plain HTML that asks for nothing from
elsewhere and loads itself again every 5 s; it keeps what it hears in memory and forgets it when it ends. The network is
not encrypted: names and messages can be read by others on it.
"""

import contextlib
import html
import json
import secrets
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from . import progress
from .engine import system

PORT = 8765
_MOST_BYTES = 1 << 18  # of one student's progress
_MOST_STUDENTS = 500


class Room:
    """What students have shared, newest first heard."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._heard: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def hear(self, message: bytes) -> bool:
        """Take in one student's progress; False if it is none."""
        found = understood(message)
        if found is None:
            return False
        with self._lock:
            if found["name"] not in self._heard and len(self._heard) >= _MOST_STUDENTS:
                return False
            self._heard[found["name"]] = found
        return True

    def students(self) -> list[dict[str, Any]]:
        """Everybody's progress, by name: from the address, and from the folder where that is newer."""
        with self._lock:
            found = dict(self._heard)
        paths = sorted(self.folder.glob("*.json"))[:_MOST_STUDENTS] if self.folder else []
        for path in paths:
            with contextlib.suppress(OSError):
                if path.stat().st_size <= _MOST_BYTES and (one := understood(path.read_bytes())):
                    if one["at"] >= found.get(one["name"], one)["at"]:
                        found[one["name"]] = one
        return [found[name] for name in sorted(found, key=str.casefold)]


def understood(message: bytes) -> dict[str, Any] | None:
    """One student's progress as `progress` sends it, with nothing else in it; None if it is something else."""
    if len(message) > _MOST_BYTES:
        return None
    try:
        said = json.loads(message)
        if not progress.NAME.fullmatch(said["name"]):
            return None
        lessons = {
            str(lesson)[:100]: {
                str(text)[:200]: {
                    "state": one["state"] if one["state"] in progress.MARKS else "",
                    "tries": int(one["tries"]),
                    "last": str(one["last"])[:200],
                    "at": int(one["at"]),
                }
                for text, one in exercises.items()
            }
            for lesson, exercises in said["lessons"].items()
        }
        return {"name": said["name"], "at": int(said["at"]), "lessons": lessons}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def page(students: list[dict[str, Any]], now: float) -> str:
    """The instructor's page."""
    rows, stuck, said = [], Counter[tuple[str, str]](), {}
    for one in students:
        each = [(e["at"], lesson, text, e) for lesson, of in one["lessons"].items() for text, e in of.items()]
        at, lesson, text, latest = max(each, key=lambda found: found[0], default=(one["at"], "", "", {}))
        solved = sum(e["state"] == progress.SOLVED for *_, e in each)
        for _, its_lesson, its_text, e in each:
            if e["state"] == progress.TRIED:
                stuck[its_lesson, its_text] += 1
                said.setdefault((its_lesson, its_text), Counter())[e["last"]] += 1
        mark = progress.MARKS[latest["state"]] if latest else ""
        minutes = max(0, int(now - at) // 60)
        where = f"{lesson}, {text}" if lesson else "has joined"
        cells = (one["name"], f"{mark} {where}", f"{minutes} min ago", f"{solved}", latest.get("last", ""))
        rows.append(_row(cells))
    most = [
        _row((f"{lesson}, {text}", str(count), said[lesson, text].most_common(1)[0][0]))
        for (lesson, text), count in stuck.most_common(10)
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>The room</title>'
        '<meta http-equiv="refresh" content="5"><meta name="viewport" content="width=device-width">'
        "<style>body{font:16px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;"
        "color-scheme:light dark}table{border-collapse:collapse;width:100%;margin-bottom:2em}"
        "th,td{text-align:left;padding:.3em .8em .3em 0;border-bottom:1px solid #8886;vertical-align:top}"
        "td:last-child{overflow-wrap:anywhere}</style></head><body>"
        f"<h1>{len(students)} in the room</h1>"
        + _table(("Who", "Where", "Since", "Solved", "Last message"), rows)
        + "<h2>Which check fails most</h2>"
        + (
            _table(("Exercise", "How many are stuck", "Most often"), most)
            if most
            else "<p>Nobody is stuck.</p>"
        )
        + "</body></html>"
    )


def _table(heads: tuple[str, ...], rows: list[str]) -> str:
    return f"<table><thead>{_row(heads, 'th')}</thead><tbody>{''.join(rows)}</tbody></table>"


def _row(cells: tuple[str, ...], kind: str = "td") -> str:
    scope = ' scope="col"' if kind == "th" else ""
    return f"<tr>{''.join(f'<{kind}{scope}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"


class Server(ThreadingHTTPServer):
    """Serves a room: the page under one key, and takes in progress under another."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], room: Room) -> None:
        self.room = room
        self.page_key, self.join_key = secrets.token_urlsafe(16), secrets.token_urlsafe(9)
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10  # seconds that a connection may stay silent
    server_version, sys_version = "rankcell", ""

    def _asks(self, key: str) -> bool:
        path = self.path.split("?")[0].strip("/")
        return secrets.compare_digest(path.encode(), key.encode())

    def do_GET(self) -> None:
        """The instructor's page."""
        if not self._asks(self.server.page_key):
            return self._say(404, "There is nothing here. Is the address whole, key included?")
        return self._say(200, page(self.server.room.students(), time.time()), "text/html")

    def do_POST(self) -> None:
        """A student's progress."""
        if not self._asks(self.server.join_key):
            return self._say(404, "There is no such room.")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            return self._say(413, f"At most {_MOST_BYTES} bytes.")
        if not self.server.room.hear(self.rfile.read(int(length))):
            return self._say(400, "This is no progress.")
        return self._say(200, "ok")

    def _say(self, status: int, text: str, kind: str = "text/plain") -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(data)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Addresses hold keys: they are not written down."""


def add_command(commands: Any) -> None:
    """Add `room` to the sub-commands of an argument parser."""
    command = commands.add_parser(
        "room",
        help="a page that shows where the students of a workshop are",
        description="Open a page that shows who is where and which check fails most, of students who share it: "
        "`%ranks progress share ADDRESS NAME` in a notebook.",
    )
    command.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="a shared folder that students share to"
    )
    command.add_argument(
        "--host",
        default="",
        metavar="ADDRESS",
        help="listen at this address only (all; 127.0.0.1: this machine)",
    )
    command.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"the port ({PORT}; 0: any that is free)"
    )
    command.set_defaults(run=run)


def run(options: Any) -> int:
    """Serve until Ctrl-C; the number for the shell."""
    if options.folder is not None and not options.folder.is_dir():
        print(f"rankcell room: {options.folder} is no folder.")
        return 2
    try:
        server = Server((options.host, options.port), Room(options.folder))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        print(f"rankcell room: port {options.port} cannot be opened ({reason}). Try `--port 0`.")
        return 2
    port = server.server_address[1]
    hosts = [options.host] if options.host else [*system.addresses(), "127.0.0.1"]
    print(f"Your page:  http://{hosts[-1]}:{port}/{server.page_key}")
    print(f"Students:   %ranks progress share http://{hosts[0]}:{port}/{server.join_key} NAME")
    if options.folder:
        print(f"     or:    %ranks progress share {options.folder.resolve()} NAME")
    print(
        "Ctrl-C ends it. Whoever has your page's address sees it; the network is not encrypted.", flush=True
    )
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0
