"""`specblock inspect`: what a drafter directory holds, or what it drafts after a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_specblock.cli.options import Precision

if TYPE_CHECKING:
    from vllm_specblock.train.eval.steps import Step


def inspect(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Folder or hub id of a SpecBlock drafter in either layout, or of another kind."
        ),
    ],
    prompt: Annotated[
        str | None, typer.Option(help="Show the draft tree after this prompt instead.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="The same after the text of a file.")
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(help="Folder or hub id of the target. Default: as the drafter names it."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt through the target's chat template, or take it as it stands. "
            "Default: --chat where there is a template.",
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=256, help="Nodes of the tree. Default: as in serving.")
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=32,
            help="Drafter forwards: SpecBlock's blocks, EAGLE-3's levels. Default: as in serving.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Verification steps to take before the one shown.")
    ] = 0,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the tree into this file too (.svg, .png, .pdf).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    precision: Annotated[
        Precision, typer.Option(help="Arithmetic of target and drafter.")
    ] = Precision.FP32,
) -> None:
    """Check a drafter and print its config, tensors, size and vocabulary coverage.

    With a prompt: draft the tree that serving would, verify it greedily and print it, each node
    in the colour of the drafter forward that proposed it.
    """
    from vllm_specblock.config import OptionError

    if prompt is not None and prompt_file is not None:
        raise OptionError("--prompt and --prompt-file were both given: drop one of them.")
    if prompt_file is not None:
        prompt = _read(prompt_file)
    if prompt is not None:
        _show_tree(
            directory, prompt, target, chat, nodes, blocks, steps, svg, device, precision.value
        )
    elif svg is not None:
        raise OptionError("--svg draws the tree after a prompt: give one with --prompt.")
    else:
        _show_files(directory)


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
    mapped = torch.arange(covered) + tensors["d2t"]
    typer.echo(
        f"draft vocabulary: {covered:,} of {total:,} target tokens ({covered / total:.1%}), "
        f"ids {mapped[0]} to {mapped[-1]}"
    )


def _show_tree(
    directory: Path,
    prompt: str,
    target: Path | None,
    chat: bool | None,
    nodes: int | None,
    forwards: int | None,
    before: int,
    svg: Path | None,
    device: str,
    precision: str,
) -> None:
    from rich.console import Console

    from vllm_specblock.bench.figures import terminal_tree as terminal
    from vllm_specblock.bench.figures import tree_picture as pictures
    from vllm_specblock.bench.figures.style import pyplot
    from vllm_specblock.cli.report.prompt_steps import prompt_tensor, steps_of_prompt
    from vllm_specblock.config import DEFAULT_NODES
    from vllm_specblock.train.config import TrainError
    from vllm_specblock.train.distributed import usable_device
    from vllm_specblock.train.eval.loaded import load_drafter, pair
    from vllm_specblock.train.target.features import load_target, load_tokenizer

    if svg is not None:
        pyplot()  # so that it is not found missing after all the work
    where = usable_device(device)
    pairing = pair(directory, target)
    tokenizer = load_tokenizer(pairing.target)
    ids = prompt_tensor(prompt, tokenizer, chat)
    model = load_target(pairing.target, precision, where)
    drafter = load_drafter(pairing, model.dtype, where, nodes or DEFAULT_NODES, forwards)
    found = steps_of_prompt(model, drafter, ids, before + 1)
    if len(found) <= before:
        raise TrainError(
            f"The target's answer ends after {len(found)} steps: nothing is drafted in step "
            f"{before + 1}; give fewer --steps."
        )
    step, name = found[before], drafter.forward_name
    used = max(step.forward)
    console = Console(highlight=False)
    committed = [*ids.tolist(), *_answer(found[:before]), step.token[0]]
    console.print(f"Step {before + 1}, after:", style="dim")
    console.print(tokenizer.decode(committed), markup=False)
    console.print(terminal.terminal_tree(step, tokenizer, name), soft_wrap=True)
    console.print(terminal.legend_line(used, name), soft_wrap=True)
    bonus = "" if step.bonus is None else " and the bonus token"
    committed = [*_answer([step])[1:], *([] if step.bonus is None else [step.bonus])]
    console.print(
        f"{step.nodes} nodes, drafter forwards: {used}, accepted tokens: {step.accepted_length}; "
        f"they{bonus}: {tokenizer.decode(committed)!r}",
        markup=False,
        soft_wrap=True,
    )
    if svg is not None:
        legend = pictures.forward_legend(used, name)
        pictures.save_tree(pictures.picture_of(step, tokenizer), legend, svg)
        typer.echo(f"The tree is in {svg}.")


def _answer(steps: list[Step]) -> list[int]:
    """Roots and accepted tokens of steps one after the other; a bonus is the next one's root."""
    return [step.token[node] for step in steps for node in step.accepted]


def _read(path: Path) -> str:
    from vllm_specblock.config import OptionError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--prompt-file {path} cannot be read: {error}.") from None
