"""Run every family: plain vLLM, draft trees, and trees whose mask is wrong on purpose.

    python tests/targets/sweep.py                 # all; continues a run that was interrupted
    python tests/targets/sweep.py --only Llama    # these again, in the results that are there

Each engine has a forked process of its own, generates greedy and seeded tokens in float32, and
has the same random weights. Verdicts:

    identical     the tokens are plain vLLM's
    refused       one sentence before any weight is loaded
    cannot start  plain vLLM fails on a CPU, and so do trees
    different     other tokens
    no reference  other tokens, but plain vLLM's differ between a batch and a request alone
    fails         plain vLLM serves it, and trees raise something else than a refusal
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from families import FAMILIES, Family

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "lib"))
RESULTS = HERE / "results.json"
BUILD = HERE.parents[1] / "build/targets"
UNFINISHED = BUILD / "unfinished.json"
LIMIT_S = 240
NO_REFERENCE = "plain vLLM gives a request other tokens in a batch than alone"
FORK = multiprocessing.get_context("fork")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FAMILIES, metavar="FAMILY")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    store = options.results if options.only else UNFINISHED
    results = read(store)
    names = options.only or [name for name in FAMILIES if name not in results]
    if not options.only and results:
        print(f"continues a run: {len(results)} families are done; delete {store} to start over")
    _import_engines()
    for name in names:
        start = time.monotonic()
        results[name] = run(name, FAMILIES[name])
        write(store, results)
        entry, took = results[name], time.monotonic() - start
        said = " ".join(str(entry[key]) for key in ("verdict", "reason") if key in entry)
        print(f"{name:28} {said} ({took:.0f} s)", flush=True)
    gc.unfreeze()
    if not options.only:
        write(options.results, results)
        UNFINISHED.unlink()
    return int(any(entry["verdict"] in ("different", "fails") for entry in results.values()))


def run(name: str, family: Family) -> dict[str, Any]:
    """The verdict on one family, and what it rests on."""
    from family_engine import generate

    log = BUILD / f"{re.sub('[^a-zA-Z0-9]+', '_', name)}.log"
    log.write_text("")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(family.config))

        def engine(mode: str) -> dict[str, Any]:
            return in_child(log, generate, family, Path(folder), mode)

        trees = engine("trees")
        plain = {} if "refused" in trees else engine("plain")
        entry = {"class": family.config["architectures"][0], **judge(plain, trees)}
        if entry["verdict"] == "different" and plain["tokens"] != engine("alone").get("tokens"):
            entry |= {"verdict": "no reference", "reason": NO_REFERENCE}
        if entry["verdict"] == "identical":
            entry["drafter"] = judge(plain, engine("drafter"))
    return entry


def judge(plain: dict[str, Any], trees: dict[str, Any]) -> dict[str, Any]:
    """Compare an engine that drafts with plain vLLM."""
    if "refused" in trees:
        return {"verdict": "refused", "reason": trees["refused"]}
    if "error" in plain:
        return {"verdict": "cannot start", "reason": _first_line(plain["error"])}
    if "error" in trees:
        return {"verdict": "fails", "reason": _first_line(trees["error"])}
    about = {"accepted": trees["accepted"], "drafted": trees["drafted"]}
    if plain["tokens"] == trees.get("control"):
        about["control"] = "identical"  # this family would not notice a wrong mask
    if plain["tokens"] == trees["tokens"]:
        return {"verdict": "identical"} | about
    same = sum(want == got for want, got in zip(plain["tokens"], trees["tokens"], strict=True))
    reason = f"{same} of {len(plain['tokens'])} answers are the same"
    return {"verdict": "different", "reason": reason} | about


def _first_line(error: str) -> str:
    """What is short enough for a table: pydantic's error has its own first line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return lines[1 if lines[0].startswith("ValidationError") else 0][:200]


def in_child(log: Path, work: Any, *arguments: Any) -> dict[str, Any]:
    """What `work` returns in a forked process, whose output goes to `log`."""
    receive, send = FORK.Pipe(duplex=False)

    def target() -> None:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        send.send(work(*arguments))

    child = FORK.Process(target=target)
    child.start()
    send.close()
    try:
        if receive.poll(LIMIT_S):
            return receive.recv()
        return {"error": f"no result in {LIMIT_S} s, see {log.name}"}
    except EOFError:
        child.join()
        return {"error": f"the process ended with {child.exitcode}, see {log.name}"}
    finally:
        child.kill()
        child.join()


def _import_engines() -> None:
    """Import and compile what every engine needs, once for all children."""
    import torch
    from vllm.plugins import load_general_plugins

    torch.set_num_threads(1)
    load_general_plugins()
    for module in (
        "support.engines",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.gpu.model_runner",
        "vllm_specblock.engine.runner.speculator",
    ):
        importlib.import_module(module)
    from vllm_specblock.triton_kernels.attention.cpu_packing import packing_of
    from vllm_specblock.triton_kernels.warm_up import compile_attention

    query, cache = torch.zeros(1, 4, 32), torch.zeros(2, 2, 32, 64)
    table = torch.zeros(1, 2, dtype=torch.int32)
    compile_attention(query, cache, table, 1, 13, 64, packing=packing_of(cache, amx=False))
    gc.freeze()  # vLLM collects garbage ten times in an engine's start


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, results: dict[str, Any]) -> None:
    ordered = {name: results[name] for name in sorted(results, key=str.lower)}
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
