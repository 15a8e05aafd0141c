"""A whole benchmark: engines side by side, unit by unit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from vllm_specblock.bench.config import BenchConfig, BenchError
from vllm_specblock.bench.engine_arguments import common_arguments
from vllm_specblock.bench.machine import describe_machine
from vllm_specblock.bench.methods import Method, resolve
from vllm_specblock.bench.process import COMMAND, EngineFailed, EngineProcess, end_all
from vllm_specblock.bench.questions import Reader, Sets, fingerprint, read_sets, seed_of
from vllm_specblock.bench.schedule import Unit, groups, rotated, units
from vllm_specblock.bench.store import Answer, Store
from vllm_specblock.engine.metrics.acceptance import STEPS
from vllm_specblock.engine.offline.answering import DRAFTING
from vllm_specblock.train.data.chat_tokens import ChatTokens
from vllm_specblock.train.target.features import load_tokenizer
from vllm_specblock.train.target.target_info import describe_target


@dataclass
class Bench:
    """The checked inputs of `measure`.

    Attributes:
        methods: by name, plain vLLM first.
        common: arguments of all engines.
        command: of an engine's process.
        warm_up_tokens: per question, at every temperature, before an engine's first turn.
        failures: by method, why it gave no more answers in this call.
    """

    config: BenchConfig
    methods: dict[str, Method]
    sets: Sets
    reader: Reader
    common: dict[str, Any]
    store: Store
    command: Sequence[str] = COMMAND
    warm_up_tokens: int = 32
    failures: dict[str, str] = field(default_factory=dict)


def prepare(config: BenchConfig, fresh: bool = False) -> Bench:
    """Check everything that is known before an engine is made.

    Raises:
        BenchError, CheckpointError, TrainError: one sentence says what does not fit.
    """
    methods, sets = resolve(config), read_sets(config)
    plain = [method for method in methods.values() if method.plain]
    groups(plain, [method for method in methods.values() if not method.plain], config.at_once)
    target = describe_target(config.target)
    tokens = ChatTokens(
        load_tokenizer(config.target), target.vocab_size, frozenset(), config.template_options
    )
    reader = Reader(tokens, config.raw)
    machine = describe_machine()
    length = reader.needed(sets, config.max_new_tokens)
    common = common_arguments(config, length, machine["gpu"] is not None)
    settings = config.must_match() | {
        "target": {
            "name": config.target.resolve().name,
            "config": hashlib.sha256((config.target / "config.json").read_bytes()).hexdigest()[:12],
            "bytes": str(sum(p.stat().st_size for p in config.target.glob("*.safetensors"))),
        },
        "machine": machine,
        "methods": {name: method.as_json() for name, method in methods.items()},
        "sets": fingerprint(sets),
    }
    return Bench(config, methods, sets, reader, common, Store(config.out, settings, fresh))


def measure(bench: Bench, say: Callable[[str], None] = tqdm.write) -> None:
    """Let the engines answer everything that is missing.

    Raises:
        EngineFailed: plain vLLM gave no answer to compare with.
    """
    plain = [method for method in bench.methods.values() if method.plain]
    todo = list(units(bench.config, bench.sets))
    names = [method.name for method in plain]
    lacking = {name for unit in todo for name in bench.store.missing(unit, bench.methods, names)}
    others = [m for m in bench.methods.values() if not m.plain and m.name in lacking]
    if not lacking:
        return
    for group in groups(plain, others, bench.config.at_once):
        compared = [method.name for method in group if not method.plain] or names
        ours = [unit for unit in todo if bench.store.missing(unit, compared, names)]
        if ours:
            _measure_group(bench, group, ours, compared, say)


def available_memory() -> int:
    """Return the bytes of host memory that new processes may take."""
    import psutil

    return int(psutil.virtual_memory().available)


class Room:
    """Host memory for one more engine, by what the engines before have taken."""

    def __init__(self) -> None:
        self.left, self.most = available_memory(), 0

    def check(self, alive: int) -> None:
        """Check before an engine is made.

        Raises:
            BenchError: the machine would swap.
        """
        before, self.left = self.left, available_memory()
        if not alive:
            return
        self.most = max(self.most, before - self.left)
        if self.left < self.most:
            raise BenchError(
                f"{alive} engines are alive, {self.left / 2**30:.1f} GiB of memory are left, and "
                f"one takes up to {self.most / 2**30:.1f}: give --at-once {alive}."
            )


def _measure_group(
    bench: Bench,
    group: Sequence[Method],
    todo: Sequence[Unit],
    compared: Sequence[str],
    say: Callable[[str], None],
) -> None:
    engines: dict[str, EngineProcess] = {}
    plain = {method.name for method in group if method.plain}

    def failed(name: str, error: EngineFailed) -> None:
        if name in plain:
            raise error
        bench.failures[name] = str(error)
        say(f"{error} The others go on.")
        if name in engines:
            end_all([engines.pop(name)])

    room = Room()
    try:
        with tqdm(group, "engines", unit="engine") as bar:
            for method in bar:
                bar.set_postfix_str(method.name)
                room.check(len(engines))
                try:
                    engines[method.name] = _start(bench, method, todo[0])
                except EngineFailed as error:
                    failed(method.name, error)
        turns = tqdm(todo, "answers", unit="turn")
        for number, unit in enumerate(turns):
            alive = [name for name in compared if name in engines]
            # Methods that have answered are skipped; plain vLLM answers again beside the others.
            asked = {*bench.store.missing(unit, alive, plain)} | plain
            if asked <= plain and {*compared} - plain:
                continue
            turns.set_postfix_str(f"{unit.set}, T = {unit.temperature:g}", refresh=False)
            answers: dict[str, Answer] = {}
            for name in rotated([name for name in engines if name in asked], number):
                try:
                    answers[name] = _answer(bench, engines[name], unit)
                except EngineFailed as error:
                    failed(name, error)
            bench.store.add(unit, answers)
    finally:
        end_all(engines.values())


def _start(bench: Bench, method: Method, unit: Unit) -> EngineProcess:
    """Start an engine and warm it up."""
    config, logs = bench.config, bench.config.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if config.in_process else "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **method.env,
    }
    arguments = method.arguments(bench.common)
    engine = EngineProcess(method.name, arguments, env, logs / f"{method.name}.log", bench.command)
    try:
        bench.store.note_engine(method.name, engine.facts)
        prompts = [bench.reader.prompt(each, []) for each in unit.questions]
        most = min(bench.warm_up_tokens, config.max_new_tokens)
        for temperature in config.temperature:
            _ask(config, engine, prompts, [0] * len(prompts), temperature, most)
    except BaseException:
        end_all([engine])
        raise
    return engine


def _ask(
    config: BenchConfig,
    engine: EngineProcess,
    prompts: list[list[int]],
    seeds: list[int],
    temperature: float,
    max_tokens: int,
) -> dict[str, Any]:
    """Return an engine's answer to a job of `engine/offline/answering.py`."""
    job = {"prompts": prompts, "seeds": seeds, "temperature": temperature}
    return engine.ask(job | {"max_tokens": max_tokens, "ignore_eos": config.ignore_eos})


def _answer(bench: Bench, engine: EngineProcess, unit: Unit) -> Answer:
    """Return what the store keeps of an engine's answer to a unit."""
    config, before = bench.config, bench.store.answers_before(unit, engine.name)
    prompts = [bench.reader.prompt(q, said) for q, said in zip(unit.questions, before)]
    seeds = [seed_of(unit.set, q, unit.turn, config.seed) for q in unit.questions]
    answer = _ask(config, engine, prompts, seeds, unit.temperature, config.max_new_tokens)
    ids, counters = answer["ids"], answer["counters"]
    nanoseconds, steps = (counters.get(name, 0) for name in DRAFTING)
    return Answer(
        tokens=sum(map(len, ids)),
        wall=answer["wall"],
        cpu=answer["cpu"],
        steps=counters.get(STEPS, 0),
        draft_ns=nanoseconds,
        draft_steps=steps,
        digests=[hashlib.sha256(json.dumps(each).encode()).hexdigest()[:16] for each in ids],
        texts=[] if unit.last else [*map(bench.reader.tokens.said, ids)],
        ids=[] if unit.temperature else ids,
    )
