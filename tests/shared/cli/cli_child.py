"""A service for the tests of `penstock up`: `cli_child.py NAME PORT DIARY [habit ...]`.

It writes what happens to it into the diary, a file that all children of a test share. Habits:
`dies` at once, `stubborn` to SIGTERM, `sick` (fails /livez), `never-ready`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

name, port, diary, *habits = sys.argv[1:]


def note(event: str) -> None:
    with open(diary, "a") as file:
        file.write(f"{name} {event}\n")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def leave(*_: object) -> None:
    note("stopped")
    os._exit(0)


class Probes(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            say(json.dumps({"level": "error", "event": "it.hurts", "reason": "asked to"}))
            os._exit(7)
        bad = {"/readyz": "never-ready" in habits and 503, "/livez": "sick" in habits and 500}.get(self.path)
        self.send_response(bad or 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


signal.signal(signal.SIGTERM, (lambda *_: note("ignored")) if "stubborn" in habits else leave)
note(f"started {os.getpid()}")
if "dies" in habits:
    say(json.dumps({"level": "error", "event": "no.way", "reason": "cannot"}))
    say("Traceback: plain text")
    sys.exit(3)
say(json.dumps({"event": "engine.listening"}))
say(json.dumps({"event": "core.progress", "stage": "warming up"}))
HTTPServer(("127.0.0.1", int(port)), Probes).serve_forever()
