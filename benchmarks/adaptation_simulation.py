"""Streams of requests served by replay, each with every policy: the command `simulate` of
`adaptation.py`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_specblock.cli.options import DrafterDir, TargetDir, UpdateRate

if TYPE_CHECKING:
    from lib.simulation import Simulated
    from lib.simulation_figures import Figures

    from vllm_specblock.train.learner import EvalSequence


def simulate(
    drafter: DrafterDir,
    home: Annotated[
        Path,
        typer.Option(
            help="Prompts like those that the drafter was trained on; see `eval`'s --data."
        ),
    ],
    away: Annotated[list[Path], typer.Option(help="Prompts of another kind. Repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for the JSON, the table and the plots.")],
    target: TargetDir = None,
    stream: Annotated[
        list[str] | None,
        typer.Option(
            help="switch, mixed, ordered, stationary, gradual or passes. Repeatable. Default: "
            "switch."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="frozen, always (OSD), full every 8, full every 64, heads every 8, paper, "
            "gain, or paper or gain without an arm or the bandit: see docs/adaptation.md. "
            "Repeatable. Default: frozen, always, paper, gain."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of each stream.")] = 96,
    held_out: Annotated[
        int,
        typer.Option(min=0, help="Prompts of each kind, after the stream's, judged by at last."),
    ] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt at most.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer, greedy.")] = 96,
    lr: UpdateRate = None,
    anchor: Annotated[float, typer.Option(min=0, help="Weight of the KL to the start.")] = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="Records of a batch, half of them new.")] = 2,
    rehearsal: Annotated[
        bool, typer.Option(help="Half of each batch is from earlier requests.")
    ] = True,
    memory: Annotated[float, typer.Option(help="MiB for recorded rows.")] = 512,
    nodes: Annotated[
        int, typer.Option(min=0, max=256, help="Nodes of a tree; 0: as in serving.")
    ] = 0,
    step_seconds: Annotated[float, typer.Option(help="Of a target step with its drafts.")] = 0.025,
    update_seconds: Annotated[
        str, typer.Option(metavar="HEADS,FULL", help="That an update takes from serving.")
    ] = "0.1,0.2",
    swap_seconds: Annotated[
        str, typer.Option(metavar="HEADS,FULL", help="That a swap takes from serving.")
    ] = "0.0003,0.0014",
    window: Annotated[int, typer.Option(min=1, help="Requests of a point in the plots.")] = 64,
    seed: Annotated[int, typer.Option(help="Of streams, samples and exploration.")] = 0,
) -> None:
    """Serve streams of requests by replay, each with every policy, and compare them.

    The target writes every text once. Updates, judging and policies are those of serving; time is
    what the options say. Figures are kept after every policy, in simulation.json.
    """
    # Here and not above: torch and transformers take seconds, `--help` should not.
    import torch
    from lib.policies import make_policy
    from lib.simulation import CostModel, Simulation, SimulationConfig
    from lib.simulation import simulate as serve
    from lib.simulation_figures import draw, figures, markdown
    from lib.streams import make_stream, texts_needed
    from tqdm import tqdm

    from vllm_specblock.adapt.learning.train_batches import RecordTeacher
    from vllm_specblock.adapt.learning.update import rate_for
    from vllm_specblock.drafters.specblock import checkpoint
    from vllm_specblock.train.data.prompts import read_prompts
    from vllm_specblock.train.data.shards import replace
    from vllm_specblock.train.eval.evaluate import sequences_from
    from vllm_specblock.train.eval.loaded import pair_specblock
    from vllm_specblock.train.provenance import provenance
    from vllm_specblock.train.target import target_rows
    from vllm_specblock.train.target.features import load_target, load_tokenizer

    costs = CostModel.of(step_seconds, _pair(update_seconds), _pair(swap_seconds))
    names = list(dict.fromkeys(policy or ["frozen", "always", "paper", "gain"]))
    for name in names:
        make_policy(name, seed)  # fails before the target writes anything
    files = [home, *away]
    streams = {name: make_stream(name, requests, seed, len(files)) for name in stream or ["switch"]}
    pairing = pair_specblock(drafter, target)
    model = load_target(pairing.target, "fp32", torch.device("cpu"))
    tokenizer = load_tokenizer(pairing.target)
    texts: list[list[EvalSequence]] = []
    last: list[list[EvalSequence]] = []
    for path, needed in zip(files, texts_needed(list(streams.values()), len(files))):
        wanted = needed + held_out
        if not wanted:
            texts.append([])
            last.append([])
            continue
        found = read_prompts(
            path,
            tokenizer,
            wanted,
            prompt_tokens=prompt_tokens,
            vocab_size=pairing.vocab_size,
            report=lambda line: typer.echo(line, err=True),
        )
        check_prompts(path, len(found), wanted)
        found = [prompt[:prompt_tokens] for prompt in found]
        sequences = sequences_from(model, found, new_tokens, layer_ids=pairing.layer_ids)
        kept = list(tqdm(sequences, f"texts of {path.stem}", total=wanted, unit="text"))
        texts.append(kept[:needed])
        last.append(kept[needed:])
    weights = checkpoint.load(pairing.drafter, torch.float32, "cpu")
    draft_ids = weights.target_ids(torch.arange(weights.config.draft_vocab_size))
    teacher = RecordTeacher(
        target_rows.embedding_rows(pairing.target),
        target_rows.head_rows(pairing.target, draft_ids),
    )
    config = SimulationConfig(
        cost=costs,
        lr=lr,
        anchor=anchor,
        memory=memory,
        batch=batch,
        rehearsal=rehearsal,
        nodes=nodes,
        seed=seed,
    )
    out.mkdir(parents=True, exist_ok=True)
    whole: dict[str, Any] = {
        "drafter": str(drafter),
        "target": str(pairing.target),
        "prompts": [str(path) for path in files],
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "seconds": {"step": step_seconds, "update": costs.update, "swap": costs.swap},
        "options": {
            "lr": rate_for(weights) if lr is None else lr,
            "anchor": anchor,
            "batch": batch,
            "rehearsal": rehearsal,
            "memory": memory,
            "nodes": nodes,
            "seed": seed,
        },
        "results": {},
        **provenance(),
    }
    for stream_name, places in streams.items():
        frozen: Simulated | None = None
        results: dict[str, Figures] = {}
        whole["results"][stream_name] = results
        for name in names:
            simulation = Simulation(weights, teacher, make_policy(name, seed), config)
            with tqdm(total=len(places), desc=f"{stream_name}, {name}", unit="request") as bar:
                served = serve(simulation, places, texts, last if held_out else (), bar.update)
            frozen = served if name == "frozen" else frozen
            results[name] = figures(served, frozen, window)
            content = json.dumps(whole, indent=1) + "\n"
            replace(
                out / "simulation.json",
                partial(Path.write_text, data=content, encoding="utf-8"),
            )
        if not draw(results, f"{stream_name} stream", out / f"tau_{stream_name}.png"):
            typer.echo("matplotlib is not installed: there are no plots.", err=True)
    table = markdown(whole["results"])
    (out / "simulation.md").write_text(table, encoding="utf-8")
    typer.echo(table)


def check_prompts(path: Path, found: int, wanted: int) -> None:
    """Raises TrainError where a stream reads more prompts than there are."""
    from vllm_specblock.train.config import TrainError

    if found < wanted:
        raise TrainError(
            f"{path} holds {found} prompts, but the streams and --held-out need {wanted}: give "
            "fewer --requests, or more prompts."
        )


def _pair(text: str) -> tuple[float, float]:
    """Parse "0.1,0.2"."""
    try:
        heads, full = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not two numbers of seconds with a comma between them, such as 0.1,0.2."
        ) from None
    return heads, full
