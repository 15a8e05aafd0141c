"""One `vllm serve` and the client of `vllm bench serve`, behind a line of JSON each way.

`bench_serve.py` starts it as an `EngineProcess`, so that server and client are one process group,
which stands still while another has its turn:

    {"vllm": [WORDS], "serve": [ARGUMENTS], "port": P, "log": FILE}   →  {"seconds": until healthy}
    {"bench": [ARGUMENTS], "result": FILE}                            →  what FILE then has
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START = 900.0
"""Seconds until a server must be healthy; the first one of a target compiles it."""


def main() -> None:
    given = json.loads(sys.stdin.readline())
    with Path(given["log"]).open("w") as log:
        began = time.monotonic()
        server = subprocess.Popen(
            [*given["vllm"], "serve", *given["serve"]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            say(healthy(server, given["port"], given["log"], began))
            for line in sys.stdin:
                say(bench(given["vllm"], json.loads(line)))
        finally:
            server.terminate()
            server.wait()


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def healthy(server: subprocess.Popen, port: int, log: str, began: float) -> dict[str, Any]:
    """How long it took; or how it failed."""
    while time.monotonic() < began + START:
        if server.poll() is not None:
            words = Path(log).read_text(errors="replace").strip().splitlines()
            return {"error": f"the server ended, after: {words[-1] if words else 'nothing'}"}
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return {"seconds": round(time.monotonic() - began, 1)}
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    return {"error": f"the server was not healthy in {START:g} s (its log is {log})"}


def bench(vllm: list[str], job: dict[str, Any]) -> dict[str, Any]:
    """What `vllm bench serve` leaves in its result's file; or how it failed."""
    result = Path(job["result"])
    result.unlink(missing_ok=True)
    done = subprocess.run(
        [*vllm, "bench", "serve", *job["bench"]], capture_output=True, text=True, check=False
    )
    if done.returncode or not result.is_file():
        words = (done.stderr or done.stdout).strip().splitlines()
        return {"error": f"vllm bench serve: {words[-1] if words else done.returncode}"}
    return json.loads(result.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
