"""Stands for the `vllm` command: a server that is healthy, and a client that writes a result.

    python fake_vllm.py serve TARGET --port P …
    python fake_vllm.py bench serve --port P …

A target called "broken" does not start. The client's figures follow from what it was asked, and
from whether its server was started with a speculative config.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        # What it was started with, for the client to tell.
        self.wfile.write(json.dumps(sys.argv).encode())

    def log_message(self, *args: object) -> None:
        pass


def serve(arguments: list[str]) -> None:
    if arguments[0].endswith("broken"):
        sys.exit("no such target")
    port = int(arguments[arguments.index("--port") + 1])
    HTTPServer(("127.0.0.1", port), Healthy).serve_forever()


def bench(arguments: list[str]) -> None:
    given = dict(pairwise(arguments))
    address = f"http://127.0.0.1:{given['--port']}/health"
    server = json.load(urllib.request.urlopen(address, timeout=20))
    drafts = "--speculative-config" in server
    requests, tokens = int(given["--num-prompts"]), int(given["--sharegpt-output-len"])
    found = {
        "completed": requests,
        "failed": 0,
        "duration": 1.0,
        "total_output_tokens": requests * tokens,
        "output_throughput": 30.0 if drafts else 20.0,
        **dict.fromkeys(("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"), 5.0),
        **dict.fromkeys(("mean_itl_ms", "p99_itl_ms"), 7.0),
        "asked": arguments,
    }
    if drafts:
        steps = requests * (tokens - 1) // 3
        found |= {
            "spec_decode_acceptance_length": 2.0,
            "spec_decode_acceptance_rate": 50.0,
            "spec_decode_num_drafts": steps,
            "spec_decode_draft_tokens": 2 * steps,
            "spec_decode_accepted_tokens": steps,
        }
    path = Path(given["--result-dir"]) / given["--result-filename"]
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    serve(rest) if command == "serve" else bench(rest[1:])
