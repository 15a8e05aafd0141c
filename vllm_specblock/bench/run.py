"""A whole benchmark: engines side by side, unit by unit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

from vllm_specblock.bench.config import BenchConfig, BenchError, MethodSpec
from vllm_specblock.bench.methods import resolve
from vllm_specblock.bench.process import (
    COMMAND,
    EngineFailed,
    EngineProcess,
    end_all,
    job_of,
    shared_arguments,
)
from vllm_specblock.bench.questions import Reader, Sets, Unit, read_sets, units
from vllm_specblock.bench.store import Answer, Store
from vllm_specblock.config import METHOD
from vllm_specblock.drafters.detect import check_configs
from vllm_specblock.engine.metrics.acceptance import STEPS
from vllm_specblock.engine.offline.answering import DRAFTING
from vllm_specblock.train.data.chat_tokens import ChatTokens
from vllm_specblock.train.target.features import load_tokenizer
from vllm_specblock.train.target.target_info import describe_target
from vllm_specblock.train.target.target_rows import fingerprint

_WEIGHTS = ".safetensors", ".bin", ".pt"


@dataclass
class Bench:
    """The checked inputs of `measure`.

    Attributes:
        methods: by name, plain vLLM first.
        common: arguments of all engines.
        command: starts an engine's process.
        warm_up_tokens: per question and temperature, before an engine's first turn.
        failures: by method, why it stopped answering in this call.
    """

    config: BenchConfig
    methods: dict[str, MethodSpec]
    sets: Sets
    reader: Reader
    common: dict[str, Any]
    store: Store
    command: Sequence[str] = COMMAND
    warm_up_tokens: int = 32
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def plain(self) -> list[str]:
        """Names of the methods that are plain vLLM."""
        return [name for name, method in self.methods.items() if not method.speculative]


def describe_machine() -> dict[str, Any]:
    """Return the processor, the cores and threads of this process, and the GPU (None: none)."""
    gpu, affinity, linux = None, getattr(os, "sched_getaffinity", None), Path("/proc/cpuinfo")
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    named = linux.exists() and re.search(r"model name\s*:\s*(.+)", linux.read_text())
    return {
        "cpu": named[1] if named else platform.machine(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "gpu": gpu,
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def prepare(config: BenchConfig) -> Bench:
    """Check all inputs before the first engine starts.

    Raises BenchError, CheckpointError or TrainError, each with one sentence on the wrong input.
    """
    methods, sets = resolve(config), read_sets(config)
    vocab_size, tokenizer = describe_target(config.target).vocab_size, load_tokenizer(config.target)
    reader = Reader(ChatTokens(tokenizer, vocab_size, config.template_options), config.raw)
    length = reader.needed(sets, config.max_new_tokens)
    wanted = config.max_model_len or length
    common = shared_arguments(config.target, config.dtype, wanted, config.batch)
    if length > common["max_model_len"]:
        raise BenchError(
            f"The longest chat may take {length} tokens, but there is room for "
            f"{common['max_model_len']}: lower --max-new-tokens or drop long questions."
        )
    settings = config.must_match() | {
        "target": config.target.resolve().name,
        "target_files": fingerprint(config.target),
        "machine": describe_machine(),
    }
    for name, method in methods.items():
        if method.speculative.get("method") == METHOD:
            check_configs(method.speculative)
        settings[f"method {name}"] = method.model_dump(exclude={"base"})
    for name, folder in config.drafter.items():
        weights = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
        settings[f"drafter {name}"] = _digest(path.read_bytes() for path in weights)
    for name, questions in sets.items():
        settings[f"set {name}"] = _digest(json.dumps([q.id, q.turns]).encode() for q in questions)
    store = Store(config.out, units(config, sets), settings)
    return Bench(config, methods, sets, reader, common | config.engine, store)


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:12]


def measure(bench: Bench, say: Callable[[str], None] = tqdm.write) -> None:
    """Run the engines on all missing units; raises EngineFailed if plain vLLM gives no answer."""
    plain, store = bench.plain, bench.store
    compared = [name for name in bench.methods if name not in plain] or plain
    # Methods that have answered are skipped; plain vLLM answers again beside the others.
    wanted = {unit: store.missing(unit, compared, plain) for unit in store.units.values()}
    todo = [unit for unit, names in wanted.items() if names]
    needed = {name for unit in todo for name in (*plain, *wanted[unit])}
    engines: dict[str, EngineProcess] = {}

    @contextmanager
    def left_out_if_it_fails(name: str) -> Iterator[None]:
        try:
            yield
        except EngineFailed as error:
            if name in plain:
                raise
            bench.failures[name] = str(error)
            say(f"{error} The others go on.")
            if name in engines:
                end_all([engines.pop(name)])

    left: list[int] = []
    names = [name for name in bench.methods if name in needed]
    try:
        for name in (bar := tqdm(names, "engines", unit="engine", disable=not todo)):
            bar.set_postfix_str(name)
            left.append(psutil.virtual_memory().available)
            most = max((a - b for a, b in pairwise(left)), default=0)
            if left[-1] < most:  # one more engine would make the machine swap
                raise BenchError(
                    f"{len(engines)} engines are alive, {left[-1] / 2**30:.1f} GiB of memory are "
                    f"left, and one takes up to {most / 2**30:.1f}: give fewer --method; later "
                    "calls may add others."
                )
            with left_out_if_it_fails(name):
                engines[name] = _start(bench, name)
                _warm_up(bench, engines[name], todo[0])
        for number, unit in enumerate(tqdm(todo, "answers", unit="turn", disable=not todo)):
            if engines.keys().isdisjoint(wanted[unit]):
                continue
            answers: dict[str, Answer] = {}
            asked = [name for name in engines if name in {*wanted[unit], *plain}]
            first = number % len(asked)  # another one each time, so that the order is fair
            for name in [*asked[first:], *asked[:first]]:
                with left_out_if_it_fails(name):
                    answers[name] = _answer(bench, engines[name], unit)
            store.add(unit, answers)
    finally:
        end_all(engines.values())


def _start(bench: Bench, name: str) -> EngineProcess:
    method, logs = bench.methods[name], bench.config.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    arguments = bench.common | method.engine | {"speculative_config": method.speculative or None}
    return EngineProcess(name, arguments, method.env, logs / f"{name}.log", bench.command)


def _warm_up(bench: Bench, engine: EngineProcess, unit: Unit) -> None:
    engine.wait()
    bench.store.note_engine(engine.name, engine.facts)
    prompts = [bench.reader.prompt(each, []) for each in unit.questions]
    most = min(bench.warm_up_tokens, bench.config.max_new_tokens)
    for temperature in bench.config.temperature:
        engine.ask(job_of(prompts, most, temperature, ignore_eos=bench.config.ignore_eos))


def _answer(bench: Bench, engine: EngineProcess, unit: Unit) -> Answer:
    """Return an engine's answers to a unit, as the store keeps them."""
    config, found = bench.config, Counter[str]()
    ids: list[list[list[int]]] = [[] for _ in unit.questions]
    for turn in range(len(unit.questions[0].turns)):
        prompts = [bench.reader.prompt(*each) for each in zip(unit.questions, ids)]
        # The same for all methods and rounds.
        names = (f"{unit.set}/{question.id}/{turn}".encode() for question in unit.questions)
        seeds = [(zlib.crc32(name) + config.seed) % 2**31 for name in names]
        job = job_of(prompts, config.max_new_tokens, unit.temperature, seeds, config.ignore_eos)
        answer = engine.ask(job)
        for before, new in zip(ids, answer["ids"]):
            before.append(new)
        found.update(answer["counters"] | {key: answer[key] for key in ("wall", "cpu")})
    return Answer(
        ids=ids,
        wall=found["wall"],
        cpu=found["cpu"],
        steps=found[STEPS],
        draft_ns=found[DRAFTING[0]],
        draft_steps=found[DRAFTING[1]],
    )
