"""Adaptation while serving: simulated streams, attacked streams, and a stream that vLLM serves.

    python benchmarks/adaptation.py streams|attacks|serve [--help]

By default the pair is the example pair with the drafter of code, and tables are the other domain
(`examples/two_heads/README.md` makes both files of prompts). `streams` and `attacks` replay:
nothing is served. `serve` runs engines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from adaptation_serving import LEARNERS, LONGEST, WINDOW, Serving
from adaptation_serving import serve as serve_all
from adaptation_serving import tables as tables_of_served
from lib import attacks as attack
from lib.options import known
from lib.policies import POLICIES
from lib.results_store import ROOT, ResultsStore, from_root, markdown_table
from lib.simulation import Simulation, SimulationConfig, figures, simulate, table
from lib.streams import STREAMS, texts_needed
from tqdm import tqdm

from vllm_specblock.adapt.learning.train_batches import RecordTeacher
from vllm_specblock.cli.main import OneSentenceErrors
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.prompts import read_prompts
from vllm_specblock.train.eval.evaluate import sequences_for, sequences_from
from vllm_specblock.train.eval.loaded import pair
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.target import target_rows
from vllm_specblock.train.target.features import load_target, load_tokenizer

FOLDER = ROOT / "runs/two_heads"
AWAY = FOLDER / "tables.jsonl"
DRAFTER, TARGET = ROOT / "examples/two_heads/code", ROOT / "examples/tiny_pair/target"
LINES = 1 << 20
"""Most lines of a file of prompts."""
PROMPT, ANSWER, LOOP = 64, 96, 24
"""Tokens of a prompt, an answer, and a loop: more than a tenth of its text, or it is refused."""

app = typer.Typer(cls=OneSentenceErrors, help=__doc__, no_args_is_help=True, add_completion=False)
Drafter = Annotated[Path, typer.Option(help="That knows home.")]
Target = Annotated[Path, typer.Option(help="Its target.")]
Home = Annotated[Path, typer.Option(help="Prompts of code.")]
Away = Annotated[
    list[Path] | None, typer.Option(help="Prompts of another domain. Default: of tables.")
]


class Pair:
    """A drafter and its target, as simulations need them."""

    def __init__(self, drafter: Path, target: Path) -> None:
        self.pairing = pair(drafter, target, ["specblock"])
        folder, self.layers = self.pairing.target, self.pairing.layer_ids
        self.model = load_target(folder, "fp32", torch.device("cpu"))
        self.weights = checkpoint.load(self.pairing.drafter, torch.float32, "cpu")
        ids = torch.arange(len(self.weights.d2t)) + self.weights.d2t
        self.teacher = RecordTeacher(
            target_rows.embedding_rows(folder), target_rows.head_rows(folder, ids)
        )

    def prompts(self, path: Path, wanted: int) -> list[torch.Tensor]:
        given = {"prompt_tokens": PROMPT, "vocab_size": self.pairing.vocab_size}
        tokenizer = load_tokenizer(self.pairing.target)
        found = [each[:PROMPT] for each in read_prompts(path, tokenizer, wanted, **given)]
        return check_prompts(path, found, wanted)

    def answered(
        self, prompts: Sequence[torch.Tensor], tokens: int = ANSWER, **sampling: float
    ) -> list[EvalSequence]:
        found = sequences_from(self.model, prompts, tokens, layer_ids=self.layers, **sampling)
        return list(tqdm(found, "texts", total=len(prompts), unit="text"))


@app.command()
def streams(
    drafter: Drafter = DRAFTER,
    target: Target = TARGET,
    home: Home = FOLDER / "code.jsonl",
    away: Away = None,
    stream: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(STREAMS)}. Default: all.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"{'; '.join(POLICIES)}. Default: all.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of each stream.")] = 768,
    seeds: Annotated[int, typer.Option(min=1, help="How many, from 0 on.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer, greedy.")] = ANSWER,
    nodes: Annotated[int, typer.Option(min=1, max=256, help="Of every tree.")] = 60,
    out: Annotated[Path, typer.Option(help="Folder.")] = ROOT / "runs/adaptation",
) -> None:
    """Replay streams of requests, each with every policy, and print one table over all seeds.

    The target writes every text once. Updates, judging and policies are those of serving; times are
    simulated. A killed run resumes.
    """
    names = known("policy", policy, POLICIES)
    files = [home, *(away or [AWAY])]
    planned = {
        (name, seed): STREAMS[name](requests, seed, len(files))
        for name in known("stream", stream, STREAMS)
        for seed in range(seeds)
    }
    pair, needed = Pair(drafter, target), texts_needed(list(planned.values()), len(files))
    prompts = [pair.prompts(path, count) if count else [] for path, count in zip(files, needed)]
    texts = [pair.answered(each, new_tokens) for each in prompts]
    settings = {
        "drafter": from_root(drafter),
        "target": from_root(target),
        "prompts": [from_root(path) for path in files],
        "requests": requests,
        "new_tokens": new_tokens,
        "nodes": nodes,
    }
    store = ResultsStore(out / "streams.json", settings)
    for (name, seed), places in planned.items():
        config = SimulationConfig(nodes=nodes, seed=seed)
        for each in names:
            key = f"{name}, seed {seed}: {each}"
            if key not in store:
                simulation = Simulation(pair.weights, pair.teacher, POLICIES[each](seed), config)
                with tqdm(total=len(places), desc=key, unit="request") as bar:
                    store.add(key, figures(simulate(simulation, places, texts, bar.update)))
    print(table(store.results))


@app.command()
def attacks(
    drafter: Drafter = DRAFTER,
    target: Target = TARGET,
    home: Home = FOLDER / "code.jsonl",
    policy: Annotated[list[str] | None, typer.Option(help="Default: always, gain.")] = None,
    requests: Annotated[int, typer.Option(min=10, help="A fifth of them per attack.")] = 320,
) -> None:
    """What clean requests keep of their speed while every other request attacks.

    Asked for: 98 % of τ with a frozen drafter, and no loss for more than three windows of 8 clean
    requests.
    """
    pair, stream = Pair(drafter, target), attack.attacked(requests)
    needed = texts_needed([stream], 1 + len(attack.ATTACKS))
    found = pair.prompts(home, needed[0] + needed[3])
    clean, draw = pair.answered(found), torch.Generator().manual_seed(0)
    vocab = pair.pairing.vocab_size
    nonsense = [torch.randint(vocab, (PROMPT,), generator=draw) for _ in range(needed[1])]
    length = PROMPT + ANSWER
    loops = [each[:LOOP].repeat(-(-length // LOOP))[:length] for each in found[: needed[2]]]
    texts = [
        clean[: needed[0]],
        pair.answered(nonsense, temperature=2.0, seed=0),
        list(sequences_for(pair.model, pair.layers, loops, [PROMPT] * len(loops))),
        [attack.scaled(each) for each in clean[needed[0] :]],
    ]
    served = {}
    for name in ["frozen", *known("policy", policy or ["always", "gain"], POLICIES)]:
        simulation = Simulation(pair.weights, pair.teacher, POLICIES[name](0))
        served[name] = simulate(simulation, stream, texts)
    frozen, phases = served.pop("frozen"), dict.fromkeys(each.phase for each in stream)
    head = ["policy", "τ of clean, of frozen's", *(p for p in phases if p.startswith("clean"))]
    rows = [[*head, "windows of loss in a row", "records", "refused versions"]]
    for name, each in served.items():
        kept = attack.kept(each.requests, frozen.requests)
        shares = [f"{100 * share:.1f} %" for share in (kept.share, *kept.by_phase.values())]
        rows.append([name, *shares, str(kept.longest), json.dumps(each.books), str(each.refused)])
    print(markdown_table(rows))


@app.command()
def serve(
    drafter: Drafter = DRAFTER,
    target: Target = TARGET,
    home: Home = FOLDER / "code.jsonl",
    away: Away = None,
    learner: Annotated[
        list[str] | None, typer.Option(help=f"Default: frozen, gain. Of {', '.join(LEARNERS)}.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of each other domain.")] = 256,
    at_home: Annotated[int, typer.Option(min=1, help="Requests before.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 128,
    chat: Annotated[bool, typer.Option(help="Prompts are a user's turn.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the engines.")] = "float32",
    pause: Annotated[
        float, typer.Option(min=0, help="Seconds behind a learner's turn for its trainer.")
    ] = 0.0,
    out: Annotated[Path, typer.Option(help="Folder.")] = ROOT / "runs/adaptation_serving",
) -> None:
    """Serve a stream that leaves home for good, by engines that take turns, and print tables."""
    learners, others = known("learner", learner or ["frozen", "gain"], LEARNERS), away or [AWAY]
    if at_home % WINDOW or requests % (4 * WINDOW):
        raise typer.BadParameter(
            f"A turn is {WINDOW} requests: --at-home must be a multiple of that, --requests of "
            f"{4 * WINDOW}."
        )
    domains = tuple((path.name.split(".")[0], requests) for path in others)
    serving = Serving(at_home, domains, new_tokens, dtype, pause)
    prompts = []
    for path, wanted in [(home, at_home), *((path, requests) for path in others)]:
        tokenizer = load_tokenizer(target)
        found = read_prompts(path, tokenizer, LINES, prompt_tokens=LONGEST, chat=chat)
        short = [each.tolist() for each in found if len(each) <= LONGEST]
        prompts += check_prompts(path, short, wanted)[:wanted]
    print(tables_of_served(serve_all(drafter, target, prompts, learners, serving, out), serving))


def check_prompts(path: Path, found: list[Any], wanted: int) -> list[Any]:
    """Return the prompts; raise TrainError if there are fewer than a stream reads."""
    if len(found) < wanted:
        raise TrainError(
            f"{path} holds {len(found)} prompts, but {wanted} are needed: give fewer --requests, "
            "or more prompts."
        )
    return found


if __name__ == "__main__":
    app()
