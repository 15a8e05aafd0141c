"""Adaptation while serving: simulated streams, attacked streams, and a stream that vLLM serves.

    python benchmarks/adaptation.py simulate|streams|attacks|serve [--help]

By default the pair is the example pair with the drafter of code, and tables are the other domain
(`examples/two_heads/README.md` makes both files of prompts). `simulate`, `streams` and `attacks`
replay: nothing is served. `serve` runs engines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from adaptation_serving import LEARNERS, Serving
from adaptation_serving import serve as serve_all
from adaptation_serving import tables as tables_of_served
from adaptation_simulation import check_prompts, simulate
from lib.policies import POLICIES
from lib.results_store import ROOT, markdown_table
from lib.streams import STREAMS

from vllm_specblock.cli.main import OneSentenceErrors

FOLDER = ROOT / "runs/two_heads"
AWAY = FOLDER / "tables.jsonl"
DRAFTER, TARGET = ROOT / "examples/two_heads/code", ROOT / "examples/tiny_pair/target"
LINES = 1 << 20
"""Of a file of prompts that are read at most."""
PROMPT, ANSWER, LOOP = 64, 96, 24
"""Tokens of a prompt, of an answer, and of what a loop repeats: more than a tenth of its text,
below which the book refuses it."""

app = typer.Typer(cls=OneSentenceErrors, help=__doc__, no_args_is_help=True, add_completion=False)
app.command()(simulate)
Drafter = Annotated[Path, typer.Option(help="That knows home.")]
Target = Annotated[Path, typer.Option(help="Its target.")]
Home = Annotated[Path, typer.Option(help="Prompts of code.")]


def table(seeds: Sequence[dict[str, Any]]) -> str:
    """A row per stream and policy: means over the seeds, and for tokens/s their range.

    seeds: `results` of simulation.json, one per seed, all of the same streams and policies.
    """
    rows = [["stream", "policy", "τ", "tokens/s", "× frozen", "training", "swaps", "returns"]]
    for stream, policies in seeds[0].items():
        for policy in policies:
            found = [seed[stream][policy] for seed in seeds]
            speeds = [each["tokens_per_second"] for each in found]
            base = [seed[stream].get("frozen", {}).get("tokens_per_second") for seed in seeds]
            times = [speed / other for speed, other in zip(speeds, base) if other]
            rows.append(
                [
                    *(stream, policy, f"{fmean(each['tau'] for each in found):.3f}"),
                    f"{fmean(speeds):.1f} ({min(speeds):.1f} – {max(speeds):.1f})",
                    f"{fmean(times):.3f}" if times else "–",
                    f"{100 * fmean(each['training_share'] for each in found):.1f} %",
                    f"{fmean(each['swaps'] for each in found):.1f}",
                    f"{fmean(len(each['returns']) for each in found):.1f}",
                ]
            )
    return markdown_table(rows)


@app.command()
def streams(
    drafter: Drafter = DRAFTER,
    target: Target = TARGET,
    home: Home = FOLDER / "code.jsonl",
    away: Annotated[
        list[Path] | None, typer.Option(help="Prompts of another domain. Default: of tables.")
    ] = None,
    stream: Annotated[list[str] | None, typer.Option(help="Default: all.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Default: all.")] = None,
    requests: Annotated[int, typer.Option(help="Of each stream.")] = 768,
    seeds: Annotated[int, typer.Option(min=1, help="How many, from 0 on.")] = 3,
    lr: Annotated[float | None, typer.Option(help="Of every policy. Default: serving's.")] = None,
    nodes: Annotated[int, typer.Option(help="Of every tree.")] = 60,
    step_seconds: Annotated[float, typer.Option(help="Of a step.")] = 0.025,
    update_seconds: Annotated[
        str, typer.Option(help="Heads, full; 0,0: on a second device.")
    ] = "0.1,0.2",
    out: Annotated[Path, typer.Option(help="Folder.")] = ROOT / "runs/adaptation",
) -> None:
    """Simulate, and print one table over all seeds. A seed's figures are kept in a folder of its
    own, and one that is there already is not run again."""
    found = []
    for seed in range(seeds):
        folder = out / f"seed{seed}"
        if not (folder / "simulation.md").exists():  # written last
            simulate(
                drafter,
                home,
                away or [AWAY],
                folder,
                target=target,
                stream=stream or list(STREAMS),
                policy=policy or list(POLICIES),
                requests=requests,
                held_out=24,
                lr=lr,
                nodes=nodes,
                step_seconds=step_seconds,
                update_seconds=update_seconds,
                seed=seed,
            )
        found.append(json.loads((folder / "simulation.json").read_text())["results"])
    print(table(found))


@app.command()
def attacks(
    drafter: Drafter = DRAFTER,
    target: Target = TARGET,
    home: Home = FOLDER / "code.jsonl",
    policy: Annotated[list[str] | None, typer.Option(help="Default: always, gain.")] = None,
    requests: Annotated[int, typer.Option(min=10, help="A fifth of them per attack.")] = 320,
    lr: Annotated[float | None, typer.Option(help="Of every policy. Default: serving's.")] = None,
    seed: Annotated[int, typer.Option(help="Of samples and exploration.")] = 0,
) -> None:
    """What clean requests keep of their speed while every other request attacks.

    Asked for: 98 % of τ with a frozen drafter, and no loss for more than three windows of 8 clean
    requests.
    """
    import torch
    from lib import attacks as attack
    from lib.policies import make_policy
    from lib.simulation import Simulation, SimulationConfig
    from lib.simulation import simulate as serve

    from vllm_specblock.adapt.learning.train_batches import RecordTeacher
    from vllm_specblock.drafters.specblock import checkpoint
    from vllm_specblock.train.data.prompts import read_prompts
    from vllm_specblock.train.eval.evaluate import sequences_for, sequences_from
    from vllm_specblock.train.eval.loaded import pair_specblock
    from vllm_specblock.train.target import target_rows
    from vllm_specblock.train.target.features import load_target, load_tokenizer

    pairing = pair_specblock(drafter, target)
    model, vocab = load_target(target, "fp32", torch.device("cpu")), pairing.vocab_size
    stream = attack.attacked(requests)
    needed = [1 + max(each.text for each in stream if each.domain == n) for n in range(4)]
    found = read_prompts(
        home, load_tokenizer(target), needed[0] + needed[3], prompt_tokens=PROMPT, vocab_size=vocab
    )
    draw, layers = torch.Generator().manual_seed(seed), pairing.layer_ids
    clean = list(sequences_from(model, [each[:PROMPT] for each in found], ANSWER, layer_ids=layers))
    nonsense = [torch.randint(vocab, (PROMPT,), generator=draw) for _ in range(needed[1])]
    loops = [
        each[:LOOP].repeat(-(-(PROMPT + ANSWER) // LOOP))[: PROMPT + ANSWER]
        for each in found[: needed[2]]
    ]
    texts = [
        clean[: needed[0]],
        list(sequences_from(model, nonsense, ANSWER, temperature=2.0, seed=seed, layer_ids=layers)),
        list(sequences_for(model, layers, loops, [PROMPT] * len(loops))),
        [attack.scaled(each) for each in clean[needed[0] :]],
    ]
    weights = checkpoint.load(drafter, torch.float32, "cpu")
    ids = weights.target_ids(torch.arange(weights.config.draft_vocab_size))
    teacher = RecordTeacher(target_rows.embedding_rows(target), target_rows.head_rows(target, ids))
    config = SimulationConfig(lr=lr, seed=seed)
    rows, frozen = [], None
    for name in ["frozen", *(policy or ["always", "gain"])]:
        simulation = Simulation(weights, teacher, make_policy(name, seed), config)
        served = serve(simulation, stream, texts)
        if frozen is None:
            frozen = served
            continue
        kept = attack.kept(served.served, frozen.served)
        rows.append(
            [
                *(name, f"{100 * kept.share:.1f} %"),
                *(f"{100 * each:.1f} %" for each in kept.by_phase.values()),
                *(str(kept.longest), json.dumps(served.books), str(served.refused)),
            ]
        )
    phases = list(dict.fromkeys(each.phase for each in stream if each.phase.startswith("clean")))
    head = ["policy", "τ of clean, of frozen's", *phases, "windows of loss in a row"]
    print(markdown_table([[*head, "records", "refused versions"], *rows]))


@app.command()
def serve(
    drafter: Drafter = DRAFTER,
    target: Target = TARGET,
    home: Home = FOLDER / "code.jsonl",
    away: Annotated[
        list[Path] | None, typer.Option(help="Prompts of another domain. Default: of tables.")
    ] = None,
    learner: Annotated[
        list[str] | None, typer.Option(help=f"Default: frozen, gain. Of {', '.join(LEARNERS)}.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of each other domain.")] = 256,
    at_home: Annotated[int, typer.Option(min=1, help="Requests before.")] = 32,
    window: Annotated[int, typer.Option(min=1, help="Requests of a turn.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Of every tree.")] = 12,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 512,
    chat: Annotated[bool, typer.Option(help="Prompts are a user's turn.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the engines.")] = "float32",
    lr: Annotated[float | None, typer.Option(help="Of learners. Default: serving's.")] = None,
    pause: Annotated[
        float, typer.Option(min=0, help="Seconds behind a learner's turn for its trainer.")
    ] = 0.0,
    out: Annotated[Path, typer.Option(help="Folder.")] = ROOT / "runs/adaptation_serving",
) -> None:
    """Serve a stream that leaves home for good, by engines that take turns, and print tables."""
    learners, others = list(dict.fromkeys(learner or ["frozen", "gain"])), away or [AWAY]
    if unknown := [name for name in learners if name not in LEARNERS]:
        raise typer.BadParameter(f"There is no {unknown[0]}, but {', '.join(LEARNERS)}.")
    if at_home % window or requests % (4 * window):
        raise typer.BadParameter(
            f"A turn is {window} requests: --at-home must be a multiple of that, --requests of "
            f"{4 * window}."
        )
    domains = tuple((path.name.split(".")[0], requests) for path in others)
    serving = Serving(at_home, domains, window, batch, nodes, new_tokens, dtype, lr, pause)
    prompts = read(target, home, at_home, prompt_tokens, chat)
    for path in others:
        prompts += read(target, path, requests, prompt_tokens, chat)
    print(tables_of_served(serve_all(drafter, target, prompts, learners, serving, out), serving))


def read(target: Path, path: Path, wanted: int, most: int, chat: bool) -> list[list[int]]:
    """Token ids of the first prompts of a file that have `most` tokens at most."""
    from vllm_specblock.train.data.prompts import read_prompts
    from vllm_specblock.train.target.features import load_tokenizer

    found = read_prompts(path, load_tokenizer(target), LINES, prompt_tokens=most, chat=chat)
    short = [each.tolist() for each in found if len(each) <= most]
    check_prompts(path, len(short), wanted)
    return short[:wanted]


if __name__ == "__main__":
    app()
