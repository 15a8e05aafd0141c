"""The example pair; scripts that are no package's, as modules; commands in this process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from typer import Typer
from typer.testing import CliRunner, Result

from vllm_specblock.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
TARGET, SPECBLOCK = ROOT / "examples/tiny_pair/target", ROOT / "examples/tiny_pair/drafter"
EAGLE3 = ROOT / "examples/two_heads/eagle3"


def load_script(path: Path) -> ModuleType:
    """A new module of the file at `path`, named after it and its folder; not in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def specblock(*words: object, **how: Any) -> Result:
    """`specblock` with these words; how: `input` that it reads, and `env`."""
    return CliRunner().invoke(app, [*map(str, words)], **how)


def command(function: Callable[..., Any], *words: object) -> Result:
    """A script's main function with the words of a command line."""
    script = Typer()
    script.command()(function)
    return CliRunner().invoke(script, [*map(str, words)])
