"""Benchmarks of the example target whose engines are stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import COMMAND
from support.scripts import TARGET

from vllm_specblock.bench.config import BenchConfig
from vllm_specblock.bench.process import EngineProcess, end_all
from vllm_specblock.bench.run import Bench, prepare

FAST = {"seconds": 0.5}


@pytest.fixture
def questions(tmp_path) -> Path:
    """A folder of two sets: one of chats, one of single questions."""
    folder = tmp_path / "sets"
    folder.mkdir()
    chats = [{"id": "a", "turns": ["one", "two"]}, {"id": "b", "turns": ["three", "four"]}]
    single = [{"id": f"q{number}", "turns": [f"say {number}"]} for number in range(5)]
    for name, lines in (("chats", chats), ("single", single)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


@pytest.fixture
def journal(tmp_path, monkeypatch) -> Path:
    """Takes a line per job that a stand-in has answered, warm-ups too."""
    path = tmp_path / "journal.jsonl"
    path.touch()
    monkeypatch.setenv("FAKE_JOURNAL", str(path))
    return path


@pytest.fixture
def make_config(tmp_path, questions):
    """Options with stand-ins called by `fakes`: name → `speculative_config`."""

    def make(fakes: dict[str, dict[str, Any]] | None = None, **changes: Any) -> BenchConfig:
        fakes = {"ours": FAST} if fakes is None else fakes
        given = {
            "target": TARGET,
            "set": (str(questions),),
            "raw": True,
            "method": ("plain", "plain-v2", *fakes),
            "define": {
                name: {
                    "speculative": {"method": "specblock", "name": name, **how},
                    "env": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
                }
                for name, how in fakes.items()
            },
            "temperature": (0.0,),
            "max_new_tokens": 4,
            "rounds": 1,
            "out": tmp_path / "out",
        }
        return BenchConfig(**given | changes)

    return make


@pytest.fixture
def make_bench(make_config, journal):
    def make(*arguments: Any, **changes: Any) -> Bench:
        bench = prepare(make_config(*arguments, **changes))
        bench.command = COMMAND
        return bench

    return make


@pytest.fixture
def start(tmp_path, journal):
    """Start a stand-in with these keys, or another command; it ends with the test."""
    started: list[EngineProcess] = []

    def start(speculative=None, command=COMMAND) -> EngineProcess:
        arguments, log = {"speculative_config": speculative}, tmp_path / f"{len(started)}.log"
        started.append(EngineProcess("it", arguments, {}, log, command))
        started[-1].wait()
        return started[-1]

    yield start
    end_all(started)
