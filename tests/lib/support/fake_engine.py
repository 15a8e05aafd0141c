"""Stands in for `vllm_specblock.engine.offline.answering`: its pipe and its manners, without an
engine.

What it does is said by keys of `speculative_config`, which the real one would refuse:

    refuses    a sentence: it does not start
    dies_at    ends with this job, as if killed
    seconds    per token, instead of 1
    sleep      seconds that it really takes for a job
    shift      added to every token
    step       tokens that it says at once, each time after 50 ms of work
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

COMMAND = (sys.executable, __file__)


def main() -> None:
    arguments = json.loads(sys.stdin.readline())
    how = arguments.get("speculative_config") or {}
    if "refuses" in how:
        print(json.dumps({"error": how["refuses"]}), flush=True)
        raise SystemExit(1)
    runner = "V2" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else "V1"
    print(json.dumps({"runner": runner, "dtype": "float32", "compiled": "NONE"}), flush=True)
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        if number == how.get("dies_at"):
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        time.sleep(how.get("sleep", 0))
        seconds = how.get("seconds", 1.0 if runner == "V1" else 2.0)
        count = job["max_tokens"]
        ids = [
            [(sum(prompt) + how.get("shift", 0) + place) % 1000 + 3 for place in range(count)]
            for prompt in job["prompts"]
        ]
        for first in range(0, count if "step" in how else 0, how.get("step", 1)):
            # A sleep would go on while it is stopped. CPU time may run faster than the clock.
            until = time.process_time() + 0.052
            while time.process_time() < until:
                pass
            said = [0, ids[0][first : first + how["step"]]]
            print(json.dumps({"said": said}), flush=True)
        tokens = count * len(ids)
        counters = {}
        if how:
            counters = {
                "vllm:inter_token_latency_seconds": len(ids),
                "vllm:specblock_drafting_nanoseconds": 4_000_000 * tokens,
                "vllm:specblock_drafting_steps": 2 * tokens,
            }
        with Path(os.environ["FAKE_JOURNAL"]).open("a") as journal:
            journal.write(json.dumps({"pid": os.getpid(), "method": how.get("name"), **job}) + "\n")
        answer = {"ids": ids, "wall": seconds * tokens, "cpu": 3 * seconds * tokens}
        print(json.dumps({**answer, "counters": counters}), flush=True)


if __name__ == "__main__":
    main()
