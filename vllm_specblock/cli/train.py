"""`specblock train`: the command line of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_specblock.cli.options import LayerIds, OutDir, TargetName


def train(
    target: Annotated[Path, typer.Option(help="Folder of the frozen target model.")],
    data: Annotated[
        Path,
        typer.Option(
            help="A folder of text files, a .jsonl with a text or input_ids in each line, or a "
            ".safetensors with tokens and lengths."
        ),
    ],
    out: OutDir,
    init: Annotated[
        Path | None, typer.Option(help="Drafter to start from; default: fresh weights.")
    ] = None,
    target_name: TargetName = None,
    steps: Annotated[int, typer.Option(help="Updates in all.")] = 10000,
    batch: Annotated[int, typer.Option(help="Sequences of one update.")] = 8,
    length: Annotated[int, typer.Option(help="Longest sequence, tokens.")] = 512,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 5e-5,
    blocks: Annotated[int, typer.Option(help="Blocks drafted one after the other.")] = 2,
    rank_from: Annotated[int, typer.Option(help="First update with the rank loss.")] = 2000,
    loss_floor: Annotated[
        float,
        typer.Option(help="Share of the rows that eq. 6 divides by at the least; paper: 0."),
    ] = 0.25,
    mask_restart: Annotated[
        bool, typer.Option("--mask-restart", help="Ablation: the mask starts anew in each block.")
    ] = False,
    block_size: Annotated[int, typer.Option(help="K of a fresh drafter.")] = 4,
    layers: Annotated[int, typer.Option(help="Decoder layers of a fresh drafter.")] = 2,
    draft_vocab_size: Annotated[
        int, typer.Option(help="Most frequent tokens that a fresh drafter can name.")
    ] = 32000,
    layer_ids: LayerIds = None,
    seed: Annotated[int, typer.Option(help="Seeds weights, shuffling and cuts.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    precision: Annotated[str, typer.Option(help="fp32 or bf16 arithmetic.")] = "fp32",
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    save_every: Annotated[int, typer.Option(help="Updates between two saves.")] = 200,
    resume: Annotated[
        bool, typer.Option(help="Go on from the state in --out, if there is one.")
    ] = True,
) -> None:
    """Train a SpecBlock drafter for a frozen target, on one device.

    The drafter in --out is what vLLM loads; the state to resume from lies in OUT/training.
    """
    # Here and not above: torch and transformers take seconds, `--help` should not.
    from vllm_specblock.train.config import parse
    from vllm_specblock.train.loop import train as run

    run(
        parse(
            target=target,
            data=data,
            out=out,
            init=init,
            target_name=target_name,
            block_size=block_size,
            num_layers=layers,
            draft_vocab_size=draft_vocab_size,
            layer_ids=layer_ids,
            steps=steps,
            batch=batch,
            length=length,
            lr=lr,
            num_blocks=blocks,
            rank_from=rank_from,
            loss_floor=loss_floor,
            mask_restart=mask_restart,
            seed=seed,
            device=device,
            precision=precision,
            compiled=compiled,
            save_every=save_every,
        ),
        resume=resume,
    )
    typer.echo(f"The drafter is in {out}.")
