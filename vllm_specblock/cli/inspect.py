"""`specblock inspect`: contents of a drafter directory, or the draft tree after a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_specblock.cli.options import Chat, Device, DrafterDir, Precision, TargetDir, TreeNodes


def inspect(
    directory: DrafterDir,
    prompt: Annotated[
        str | None, typer.Option(help="Show the draft tree after this prompt instead.")
    ] = None,
    target: TargetDir = None,
    chat: Chat = None,
    nodes: TreeNodes = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=32,
            help="Drafter forwards: SpecBlock's blocks, EAGLE-3's levels. Default: as in serving.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Verification steps before the one that is shown.")
    ] = 0,
    svg: Annotated[Path | None, typer.Option(help="Draw the tree into this file too.")] = None,
    device: Device = "cpu",
    precision: Precision = "fp32",
) -> None:
    """Check a drafter and print its config, tensors, size and vocabulary coverage.

    With a prompt: draft the tree that serving would, verify it greedily and print it, each node
    in the colour of the drafter forward that proposed it.
    """
    from vllm_specblock.config import OptionError, default_nodes

    if prompt is None:
        if svg is not None:
            raise OptionError("--svg draws the tree after a prompt: give one with --prompt.")
        return _show_files(directory)
    if svg is not None and svg.is_dir():
        raise OptionError(f"--svg {svg} is a folder: name a file in it.")

    from rich.console import Console

    from vllm_specblock.cli import draft_tree
    from vllm_specblock.train.config import TrainError
    from vllm_specblock.train.distributed import usable_device
    from vllm_specblock.train.eval.loaded import load_drafter, pair
    from vllm_specblock.train.target.features import load_target, load_tokenizer

    where = usable_device(device)
    pairing = pair(directory, target)
    tokenizer = load_tokenizer(pairing.target)
    ids = draft_tree.prompt_tensor(prompt, tokenizer, chat)
    model = load_target(pairing.target, precision, where)
    nodes = nodes or default_nodes(on_cpu=where.type == "cpu")
    drafter = load_drafter(pairing, model.dtype, where, nodes, blocks)
    found = draft_tree.steps_of_prompt(model, drafter, ids, steps + 1)
    if len(found) <= steps:
        raise TrainError(
            f"The target's answer ends after {len(found)} steps: nothing is drafted in step "
            f"{steps + 1}; give fewer --steps."
        )
    step, name = found[steps], drafter.forward_name
    console = Console(highlight=False)
    console.print(f"Step {steps + 1}, after:", style="dim")
    # A bonus token is the next step's root.
    committed = [each.token[node] for each in found[:steps] for node in each.accepted]
    before = [*ids.tolist(), *committed, step.token[0]]
    console.print(tokenizer.decode(before), markup=False)
    draft_tree.print_step(console, step, tokenizer, name)
    typer.echo(
        f"{step.nodes} nodes, drafter forwards: {max(step.forward)}, accepted tokens: "
        f"{step.accepted_length}"
    )
    if svg is not None:
        tree = draft_tree.terminal_tree(step, tokenizer, name)
        legend = draft_tree.legend_line(max(step.forward), name)
        title = f"draft tree, {step.accepted_length} of {step.nodes} accepted"
        draft_tree.save_svg(svg, title, tree, legend)
        typer.echo(f"The tree is in {svg}.")


def _show_files(directory: Path) -> None:
    import torch

    from vllm_specblock.drafters.common.hub import drafter_folder
    from vllm_specblock.drafters.detect import kind_of
    from vllm_specblock.drafters.registry import drafter_kind

    directory = drafter_folder(directory)
    files = drafter_kind(kind_of(directory)).load_checkpoint_module()
    config = files.read_config(directory)
    tensors = files.read_tensors(directory, config)
    typer.echo(config.model_dump_json(indent=2))
    width = max(map(len, tensors))
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        typer.echo(f"{name:{width}}  {dtype:8}  {list(tensor.shape)}")
    weights = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    typer.echo(f"parameters: {weights:,}")
    covered, total = config.draft_vocab_size, config.vocab_size
    mapped = torch.arange(covered) + tensors.get("d2t", 0)
    typer.echo(
        f"draft vocabulary: {covered:,} of {total:,} target tokens ({covered / total:.1%}), "
        f"ids {mapped[0]} to {mapped[-1]}"
    )
