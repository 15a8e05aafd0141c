"""The rules of the house that a reader of the source can check."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("vllm_specblock/**/*.py"), *ROOT.glob("triton_kernels/**/*.py")])

# Imports go one way: a room may import itself and the rooms of lines before its own.
ROOMS = (
    "triton_kernels versions options committed",
    "tree",
    "candidates",
    "combine verify commit feedback path_trees cache_holes",
    "drafters",
    "engine train",
    "engine.offline",
    "cpu adapt",
    "bench",
    "plugin cli",
    "__main__",
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms.split()}


def room_of(module: str) -> str:
    """Of a module of ours by its full name; options of drafters are parsed in `config`."""
    name = module.removeprefix("vllm_specblock.")
    if name.startswith("engine.offline"):
        return "engine.offline"
    return "drafters" if name == "config" else name.split(".")[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("vllm_specblock", *parts) if parts[0] == "triton_kernels" else parts
    return ".".join(parts).removesuffix(".__init__")


def imported_modules(path: Path):
    """Of a file; what only a type checker imports is no import."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_vllm_is_imported_in_two_folders():
    """And where a drafter's layers are vLLM's."""
    for path in SOURCES:
        layers = path.match("drafters/common/linear.py")
        if room_of(module_of(path)) not in ("engine", "engine.offline", "cpu", "plugin"):
            for module in imported_modules(path):
                assert module.split(".")[0] != "vllm" or layers, f"{path} imports {module}"


def test_imports_go_one_way():
    """Rooms at the end are leaves: others find them by name where an option asks for one."""
    for path in SOURCES:
        here = room_of(module_of(path))
        for module in imported_modules(path):
            there = room_of(module)
            if module.startswith("vllm_specblock.") and there in LEVEL and there != here:
                assert LEVEL[there] < LEVEL[here], f"{path} imports {module}"


def test_every_folder_and_file_is_packaged():
    """tests/engine/test_installed.py builds a wheel of them."""
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {module_of(path.parent / "__init__.py") for path in SOURCES} == {*given["packages"]}
    data = [
        ROOT / package.replace(".", "/") / name
        for package, names in given["package-data"].items()
        for name in names
    ]
    files = {path for path in ROOT.glob("vllm_specblock/**/*.*") if "__pycache__" not in path.parts}
    assert files - {*SOURCES} == {*data}


def test_supported_versions_stand_in_the_readme():
    from vllm_specblock.versions import SUPPORTED_VLLM

    readme = (ROOT / "README.md").read_text()
    for minor, where in SUPPORTED_VLLM.items():
        assert f"| {minor}.x | {where} |" in readme
