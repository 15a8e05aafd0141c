"""`specblock`: one command per file in this folder.

Commands import what they need when they run, so that `specblock --help` is fast.
"""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperGroup

from vllm_specblock.cli.adapt import adapt
from vllm_specblock.cli.bench import bench
from vllm_specblock.cli.chat import chat
from vllm_specblock.cli.convert import convert, init
from vllm_specblock.cli.data import data
from vllm_specblock.cli.doctor import doctor
from vllm_specblock.cli.eval import evaluate
from vllm_specblock.cli.features import features
from vllm_specblock.cli.inspect import inspect
from vllm_specblock.cli.train import train


class OneSentenceErrors(TyperGroup):
    """Prints errors that are written for users as one sentence, without a traceback."""

    def invoke(self, ctx: Any) -> Any:  # a Context of click, or of the copy in newer typers
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            said = "this command needs vLLM, which is not installed here."
        except ValueError as error:
            from vllm_specblock.bench.config import BenchError
            from vllm_specblock.config import OptionError
            from vllm_specblock.drafters.common.config import CheckpointError
            from vllm_specblock.train.config import TrainError

            if not isinstance(error, BenchError | CheckpointError | OptionError | TrainError):
                raise
            said = str(error)
        except OSError as error:
            path = error.filename2 or error.filename
            if not isinstance(path, str | os.PathLike):  # not of a file that the user named
                raise
            said = f"{os.fspath(path)} cannot be used: {error.strerror}."
        typer.echo(f"Error: {said}", err=True)
        raise typer.Exit(1)


app = typer.Typer(
    cls=OneSentenceErrors,
    help="Train, measure and inspect drafters for draft trees in vLLM.",
    no_args_is_help=True,
    add_completion=False,
)
for command in (init, convert, data, inspect, features, train, bench, chat, doctor):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(adapt, name="adapt")
