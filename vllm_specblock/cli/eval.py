"""`specblock eval`: τ and α of a drafter for its target, measured without serving."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specblock.cli.options import (
    Chat,
    Device,
    DrafterDir,
    NewTokens,
    Precision,
    PromptTokens,
    TargetDir,
)


def evaluate(
    drafter: DrafterDir,
    data: Annotated[
        Path,
        typer.Option(
            help="Prompts: a .jsonl file of lines with a prompt, a text or a conversation, or a "
            "folder made by `specblock data`."
        ),
    ],
    target: TargetDir = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts, from the first.")] = 64,
    prompt_tokens: PromptTokens = 64,
    chat: Chat = None,
    new_tokens: NewTokens = 160,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            min=0, help="Temperature of the texts; 0 is greedy. Repeatable. Default: 0 and 1."
        ),
    ] = None,
    nodes: Annotated[
        list[int] | None,
        typer.Option(min=1, max=256, help="Nodes of a tree. Repeatable. Default: 60, as on a GPU."),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, max=8, help="M, blocks of a tree. Default: 2, as on a GPU.")
    ] = None,
    calibrate_drafts: Annotated[
        bool, typer.Option(help="Calibrate scores by accepted tokens, as in serving.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Sampling seed of the texts.")] = 0,
    device: Device = "cpu",
    precision: Precision = "fp32",
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="File for all figures.")
    ] = None,
) -> None:
    """Draft along texts that the target generates, and print τ and α.

    τ is the mean number of tokens per step; α the share of correct first choices after correct
    ones; β the factor on the drafter's logits. Drafting is as in serving, one text at a time. On a
    GPU, add --device cuda --precision bf16.
    """
    import torch
    from tqdm import tqdm

    from vllm_specblock.config import DEFAULT_NODES, parse_drafter
    from vllm_specblock.drafters.specblock import checkpoint
    from vllm_specblock.train.data.prompts import read_prompts
    from vllm_specblock.train.data.shards import write_json
    from vllm_specblock.train.distributed import usable_device
    from vllm_specblock.train.eval import evaluate as figures_of
    from vllm_specblock.train.eval.loaded import pair
    from vllm_specblock.train.provenance import provenance
    from vllm_specblock.train.target.features import load_target, load_tokenizer

    where = usable_device(device)
    pairing = pair(drafter, target, ["specblock"])
    found = read_prompts(
        data,
        load_tokenizer(pairing.target),
        prompts,
        prompt_tokens=prompt_tokens,
        chat=chat,
        vocab_size=pairing.vocab_size,
        report=lambda line: typer.echo(line, err=True),
    )
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
    model = load_target(pairing.target, precision, where)
    weights = checkpoint.load(pairing.drafter, model.dtype, where)
    given = {} if blocks is None else {"num_blocks": blocks}
    options = parse_drafter(given | {"calibrate_drafts": calibrate_drafts}, "specblock")
    budgets = list(dict.fromkeys(nodes or [DEFAULT_NODES]))
    shapes = figures_of.shapes_of(weights, options, budgets)

    results = []
    for heat in dict.fromkeys(temperature or [0.0, 1.0]):
        sequences = figures_of.sequences_from(
            model, found, new_tokens, temperature=heat, seed=seed, layer_ids=pairing.layer_ids
        )
        bar = tqdm(sequences, f"temperature {heat:g}", total=len(found), unit="text")
        learns = heat if options.calibrate_drafts else None
        figures = figures_of.evaluate(weights, bar, shapes, options.num_blocks, learns)
        results.append({"temperature": heat, **figures.as_json()})
    whole = {
        "drafter": str(drafter),
        "target": str(pairing.target),
        "data": str(data),
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompts": len(found),
        "prompt_tokens": sum(map(len, found)),
        "chat": chat,
        "max_new_tokens": new_tokens,
        "seed": seed,
        "options": options.model_dump(),
        "results": results,
        **provenance(),
    }
    print_tables(whole)
    if json_file is not None:
        write_json(json_file, whole)
        typer.echo(f"All figures are in {json_file}.")


def print_tables(whole: dict[str, Any]) -> None:
    """Print τ, α and the rank head at each temperature; `whole` is what --json writes."""
    from vllm_specblock.bench.results import markdown_table

    def show(title: str, head: list[str], rows: list[list[str]]) -> None:
        typer.echo(f"\n{title}\n\n{markdown_table([head, *rows])}")

    typer.echo("{prompts} prompts, {device}, {dtype}, seed {seed}".format(**whole))
    for result in whole["results"]:
        heat, chain = f"T = {result['temperature']:g}", result["chain"]
        row = "{tau:.3f} ± {error:.3f}|{steps:,}|{nodes:.1f}|{sharpness:.2f}"
        rows = [[name, *row.format(**of).split("|")] for name, of in result["trees"].items()]
        show(f"τ at {heat}, ± its standard error", ["drafted", "τ", "steps", "nodes", "β"], rows)
        size = chain["block_size"]
        rows = [
            [f"{k + 1} = {k // size + 1},{k % size + 1}", _percent(share)]
            for k, share in enumerate(chain["alpha"])
        ]
        show(f"α at {heat}: right first choices after right ones", ["k = m,j", "α_m,j"], rows)
        names = "1", "2–4", "5–10", "beyond"
        rows = [[n, *map(_percent, each.values())] for n, each in zip(names, chain["rank"])]
        title = f"rank head at {heat}, {chain['rank_positions']:,} positions"
        show(title, ["rank", "frequency", "precision", "recall", "F1"], rows)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
