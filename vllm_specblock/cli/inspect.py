"""`specblock inspect`: contents of a drafter directory, or the draft tree after a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_specblock.cli.options import Chat, Device, DrafterDir, Precision, TargetDir, TreeNodes


def inspect(
    directory: DrafterDir,
    prompt: Annotated[
        str | None, typer.Option(help="Show the draft tree after this prompt instead of the files.")
    ] = None,
    target: TargetDir = None,
    chat: Chat = None,
    nodes: TreeNodes = None,
    svg: Annotated[Path | None, typer.Option(dir_okay=False, help="SVG file of the tree.")] = None,
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

    import torch
    from rich.console import Console

    from vllm_specblock.cli import draft_tree
    from vllm_specblock.train.data.prompts import prompt_ids
    from vllm_specblock.train.distributed import usable_device
    from vllm_specblock.train.eval.loaded import load_drafter, pair
    from vllm_specblock.train.target.answers import continue_prompts
    from vllm_specblock.train.target.features import load_target, load_tokenizer

    if not prompt:
        raise OptionError("The prompt is empty: there is nothing to draft after.")
    if prompt.encode(errors="replace").decode() != prompt:  # a tokenizer takes no half of a pair
        raise OptionError("--prompt is not valid UTF-8: give it in this encoding.")
    where = usable_device(device)
    pairing = pair(directory, target)
    tokenizer = load_tokenizer(pairing.target)
    ids = torch.tensor(prompt_ids(prompt, tokenizer, chat))
    model = load_target(pairing.target, precision, where)
    nodes = nodes or default_nodes(on_cpu=where.type == "cpu")
    drafter = load_drafter(pairing, model.dtype, where, nodes)
    # A step commits depth + 1 tokens at most; the root comes from the prompt's own forward.
    (text,) = continue_prompts(model, [ids], drafter.depth + 2)
    step = next(draft_tree.steps_of_text(model, drafter, text, len(ids)), None)
    if step is None:
        raise OptionError("The target's answer ends before anything is drafted.")
    console = Console(highlight=False)
    console.print(tokenizer.decode([*ids.tolist(), step.token[0]]), markup=False)
    drawing = draft_tree.drawing(step, tokenizer, drafter.forward_name)
    console.print(drawing, soft_wrap=True)
    typer.echo(
        f"{step.nodes} nodes, drafter forwards: {max(step.forward)}, accepted tokens: "
        f"{step.accepted_length}"
    )
    if svg is not None:
        title = f"draft tree, {step.accepted_length} of {step.nodes} accepted"
        draft_tree.save_svg(svg, title, drawing)
        typer.echo(f"The tree is in {svg}.")


def _show_files(directory: Path) -> None:
    import torch

    from vllm_specblock.drafters.common.hub import drafter_folder
    from vllm_specblock.drafters.detect import reader_of

    directory = drafter_folder(directory)
    files = reader_of(directory)
    config = files.read_config(directory)
    tensors = files.read_tensors(directory, config)
    typer.echo(config.model_dump_json(indent=2))
    for name, tensor in sorted(tensors.items()):
        typer.echo(f"{name:48}  {str(tensor.dtype).removeprefix('torch.'):8}  {[*tensor.shape]}")
    weights = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    typer.echo(f"parameters: {weights:,}")
    covered, total = config.draft_vocab_size, config.vocab_size
    mapped = torch.arange(covered) + tensors.get("d2t", 0)
    typer.echo(
        f"draft vocabulary: {covered:,} of {total:,} target tokens ({covered / total:.1%}), "
        f"ids {mapped[0]} to {mapped[-1]}"
    )
