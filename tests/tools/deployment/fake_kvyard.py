"""Stands in for the command `kvyard` below `up`: members that start at once, answer what `up` asks, and end as told.

FAKE_EXIT=NAME:CODE ends that member at its start; FAKE_DEAF=NAME makes it ignore SIGTERM. GET /die ends it any time.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any

from actors.kernel.process import die_with_parent

TOOL = sys.argv[1]
FLAGS = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[2:] if "=" in argument)
NAME = FLAGS.get("engine-id", TOOL)


def own_report() -> dict[str, Any]:
    secret = FLAGS.get("kv-secret-file")
    return {
        "engine_id": NAME,
        "pid": os.getpid(),
        "transport": "tcp",
        "flags": FLAGS,
        "arguments": sys.argv,
        "api_key": os.environ.get("KVYARD_API_KEY"),
        "omp": [os.environ.get("OMP_WAIT_POLICY"), os.environ.get("OMP_NUM_THREADS")],
        "secret_mode": oct(stat.S_IMODE(os.stat(secret).st_mode)) if secret else None,
    }


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            os._exit(9)
        answers: dict[str, Any] = {
            "/ready": {},
            "/debug/engine": own_report(),
            "/debug/engines": [{"healthy": True}],
            "/v1/models": {"data": [{"id": "fake-model"}]},
        }
        body = json.dumps(answers[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def drain(_: int, __: FrameType | None) -> None:
    if os.environ.get("FAKE_DEAF") == NAME:
        print("deaf", flush=True)
        return
    print("drained", flush=True)
    os._exit(0)


def main() -> None:
    die_with_parent()
    name, _, code = os.environ.get("FAKE_EXIT", "").partition(":")
    if name == NAME:
        print("the reason why", file=sys.stderr, flush=True)
        sys.exit(int(code))
    if TOOL == "fetch-model":
        return
    signal.signal(signal.SIGTERM, drain)
    server = ThreadingHTTPServer(("127.0.0.1", int(FLAGS["port"])), Handler)
    print(f"serving epoch {FLAGS.get('epoch')}", flush=True)
    server.serve_forever()


main()
