"""Is an engine with draft trees ever slower than plain vLLM, and is it ahead of vLLM's own?

    python benchmarks/never_slower.py --target "$(python examples/smollm2/target.py | tail -n 1)" \
        --drafter examples/smollm2/drafter --questions QUESTIONS --dtype bfloat16

Every engine is a process of its own. All are alive side by side and take turns, prompt batch by
prompt batch; an engine without a turn is stopped, so that load on the machine slows all of them.
Ratios are of the time for the same number of tokens (`ignore_eos`), prompts included: at T > 0
vLLM's own methods give other texts, and so do its two model runners. CPU time is of all threads.

Each cell (batch and temperature) has new engines unless `--keep`. "First" is what they do until
plain vLLM has taken `--first-steps` decode steps, "later" all that comes after. Before, each
answers random tokens for 8 steps, which allocates. A killed run goes on with the next cell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from lib.engines import ENGINES, FIXED
from lib.neighbour import neighbour
from lib.options import numbers
from lib.results_store import MEASURED, ResultsStore
from lib.turns import PLAIN, RANDOM, Record, Turn, random_prompts, records_of, table, turns_of
from tqdm import tqdm
from transformers import AutoConfig

from vllm_specblock.bench.config import BenchConfig, BenchError
from vllm_specblock.bench.engine_arguments import arguments_of, common_arguments
from vllm_specblock.bench.machine import describe_machine
from vllm_specblock.bench.methods import Method, resolve
from vllm_specblock.bench.process import COMMAND, EngineFailed, EngineProcess, end_all
from vllm_specblock.bench.questions import Question, Reader, read_sets
from vllm_specblock.bench.run import Room
from vllm_specblock.bench.schedule import groups, rotated
from vllm_specblock.train.data.chat_tokens import ChatTokens
from vllm_specblock.train.target.features import load_tokenizer

RANDOM_COUNT, RANDOM_TOKENS = 64, 60
WARM_UP = 8
"""Steps before an engine's first turn counts."""


@dataclass
class Engines:
    """Engines side by side, of which one runs at a time.

    Attributes:
        arguments: of vLLM's `LLM`, for all of them.
        beside: what else runs in a turn, by its number.
        failed: by method, why its engine is left out.
    """

    arguments: dict[str, Any]
    logs: Path
    beside: Callable[[int], AbstractContextManager[None]]
    failed: dict[str, str]
    command: Sequence[str] = COMMAND
    alive: dict[str, EngineProcess] = field(default_factory=dict)

    def measure(
        self, cell: str, methods: Sequence[Method], turns: Sequence[Turn], t: float, tokens: int
    ) -> dict[str, list[Record]]:
        """Let each engine answer every turn, another one first each time; start what is missing.

        Returns:
            the records of each engine that answered all turns.
        """
        self._start(methods, turns[0].job(t, WARM_UP))
        records: dict[str, list[Record]] = {name: [] for name in self.alive}
        for turn in tqdm(turns, cell, unit="turn"):
            answers = {}
            for name in rotated([*self.alive], turn.number):
                with self._or_leave_out(name), self.beside(turn.number):
                    answers[name] = self.alive[name].ask(turn.job(t, tokens))
            runners = {name: engine.facts["runner"] for name, engine in self.alive.items()}
            for name, record in records_of(turn, answers, runners).items():
                records[name].append(record)
        return {name: records[name] for name in self.alive}

    def _start(self, methods: Sequence[Method], warm_up: dict[str, Any]) -> None:
        room = Room()
        for method in methods:
            name = method.name
            if name in self.failed or name in self.alive:
                continue
            room.check(len(self.alive))
            env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
            given = arguments_of(method, self.arguments)
            log = self.logs / f"{name}.log"
            with self._or_leave_out(name):
                self.alive[name] = EngineProcess(name, given, env | method.env, log, self.command)
                self.alive[name].ask(warm_up)

    def end(self) -> None:
        end_all(self.alive.values())
        self.alive.clear()

    @contextmanager
    def _or_leave_out(self, name: str) -> Iterator[None]:
        """Go on without an engine that fails, unless it is plain vLLM."""
        try:
            yield
        except EngineFailed as error:
            if name == PLAIN:
                raise
            self.failed[name] = str(error)
            tqdm.write(f"{error} The others go on.")
            end_all([self.alive.pop(name)] if name in self.alive else [])


def default_methods(drafter: Path | None, eagle3: Path | None, fixed: bool) -> list[str]:
    """Names of all engines that the given drafters allow."""
    kinds = ["ngram"]
    kinds += ["specblock", "merged"] if drafter else []
    kinds += ["eagle3"] if eagle3 else []
    names = [PLAIN, "plain-v2", *kinds]
    names += [name for name in FIXED if fixed and name.rpartition("-")[0] in kinds]
    return [*names, "vllm-ngram", "vllm-suffix", *(["vllm-eagle3"] if eagle3 else [])]


def read_prompts(config: BenchConfig, characters: int, with_random: bool) -> dict[str, list]:
    """Token ids of the first turns of every set, and of random tokens."""
    vocabulary = AutoConfig.from_pretrained(config.target).vocab_size
    tokens = ChatTokens(load_tokenizer(config.target), vocabulary, frozenset())
    reader = Reader(tokens, raw=not tokens.chat)
    found = {
        name: [reader.prompt(Question(q.id, (q.turns[0][:characters],)), []) for q in questions]
        for name, questions in read_sets(config).items()
    }
    if with_random:
        found[RANDOM] = random_prompts(vocabulary, RANDOM_COUNT, RANDOM_TOKENS)
    return found


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    questions: Annotated[
        list[str], typer.Option(help="NAME=FILE of {id, turns} lines, or a folder of such files.")
    ],
    drafter: Annotated[Path | None, typer.Option(help="A SpecBlock drafter.")] = None,
    eagle3: Annotated[Path | None, typer.Option(help="An EAGLE-3 drafter.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"Engines: {', '.join(ENGINES)}, or of specblock bench. Default: all."),
    ] = None,
    fixed: Annotated[bool, typer.Option(help="Trees of fixed sizes as well.")] = False,
    batches: Annotated[str, typer.Option(help="Requests at a time.")] = "1,2,4,8,16,32",
    temperature: Annotated[list[float], typer.Option(help="0 is greedy.")] = [0.0, 0.8],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=2, help="Generated per request.")] = 64,
    passes: Annotated[int, typer.Option(min=1, help="Over all sets; a batch of each.")] = 2,
    first_steps: Annotated[int, typer.Option(help="Plain steps that count as first.")] = 400,
    characters: Annotated[int, typer.Option(help="Questions are cut to so many.")] = 1500,
    random_tokens: Annotated[bool, typer.Option(help="A set of random tokens as well.")] = True,
    keep: Annotated[bool, typer.Option(help="Keep the engines from cell to cell.")] = False,
    beside: Annotated[
        bool, typer.Option("--neighbour", help="Work in bursts on every core beside each turn.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of all engines.")] = "bfloat16",
    max_model_len: Annotated[int, typer.Option(help="Tokens of a request.")] = 1024,
    engine: Annotated[str, typer.Option(help="More arguments of LLM, of all, as JSON.")] = "{}",
    at_once: Annotated[int | None, typer.Option(help="Engines alive at a time.")] = None,
    out: Annotated[Path, typer.Option(help="JSON of the results.")] = MEASURED
    / "never_slower.json",
) -> None:
    """Measure every engine in every cell, print a table."""
    sizes = numbers(batches, "--batches")
    names = method or default_methods(drafter, eagle3, fixed)
    folders = {"specblock": drafter, "eagle3": eagle3}
    config = BenchConfig(
        target=target,
        set=tuple(questions),
        method=tuple(names),
        drafter={name: folder for name, folder in folders.items() if folder},
        define={name: spec for name, spec in ENGINES.items() if name in names},
        temperature=tuple(temperature),
        max_new_tokens=tokens,
        batch=max(sizes),
        dtype=dtype,
        max_model_len=max_model_len,
        engine=json.loads(engine),
    )
    try:
        methods = resolve(config)
        if PLAIN not in methods:
            raise BenchError(f'Ratios are over "{PLAIN}", which has to be among the methods.')
        sets = read_prompts(config, characters, random_tokens)
        machine = describe_machine()
        longest = max(len(ids) for prompts in sets.values() for ids in prompts)
        arguments = common_arguments(config, longest + tokens, machine["gpu"] is not None)
        others = [each for name, each in methods.items() if name != PLAIN]
        together = groups([methods[PLAIN]], others, at_once)
    except BenchError as error:
        raise SystemExit(f"Error: {error}") from None
    store = ResultsStore(
        out,
        {
            "target": target.resolve().name,
            "methods": {name: each.as_json() for name, each in methods.items()},
            "sets": {name: len(each) for name, each in sets.items()},
            "engine": arguments | {"model": target.resolve().name},
            "machine": machine,
            **{"tokens": tokens, "passes": passes, "first_steps": first_steps},
            **{"characters": characters, "keep": keep, "neighbour": beside},
        },
    )
    logs = out.parent / f"{out.stem}_logs"
    logs.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    for group in together:
        engines = Engines(arguments, logs, neighbour if beside else nullcontext, failed)
        try:
            for t in temperature:
                for size in sizes:
                    cell = f"batch {size}, T = {t:g}"
                    known = store.results.get(cell, {})
                    if {each.name for each in group} <= {*known, *failed}:
                        continue
                    turns = turns_of(sets, size, passes, tokens, first_steps)
                    found = engines.measure(cell, group, [*turns], t, tokens)
                    store.add(cell, found | known)
                    print(f"\n{table({cell: store.results[cell]})}\n", flush=True)
                    if not keep:
                        engines.end()
        finally:
            engines.end()
    print(f"\n{table(store.results)}\n\nResults: {out}")
    for reason in failed.values():
        print(f"Left out: {reason}")


if __name__ == "__main__":
    typer.run(main)
