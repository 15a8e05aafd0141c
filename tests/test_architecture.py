"""The rules of the house that a reader of the source can check."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("vllm_specblock/**/*.py"), *ROOT.glob("triton_kernels/**/*.py")])

# Imports go one way: a room may import from itself and from those before it.
ROOMS = [
    {"triton_kernels", "versions"},
    {"tree", "candidates", "options"},
    {"config", "drafters", "combine", "verify", "commit", "feedback"},
    {"train"},
    {"triton_interpreter", "engine"},
    {"cpu", "adapt"},
    {"bench"},
    {"plugin", "cli"},
    {"__main__"},
]


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "triton_kernels" if parts[0] == "triton_kernels" else parts[1]


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
        if room_of(path) not in ("engine", "cpu", "plugin") and not layers:
            for module in imported_modules(path):
                assert module.split(".")[0] != "vllm", f"{path} imports {module}"


def test_imports_go_one_way():
    level = {room: index for index, rooms in enumerate(ROOMS) for room in rooms}
    for path in SOURCES:
        here = room_of(path)
        if here == "__init__":
            continue
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] == "vllm_specblock" and len(parts) > 1 and parts[1] in level:
                assert level[parts[1]] <= level[here], f"{path} imports {module}"


# Offline engines are the vLLM side of `train`.
LEAVES = ("train", "adapt", "bench", "cli", "cpu", "engine.offline")


def test_the_core_imports_no_leaf_room():
    """The core finds leaf rooms by what they register, or by name where an option asks for one."""
    found = set()
    for path in SOURCES:
        file = path.relative_to(ROOT).as_posix().removeprefix("vllm_specblock/")
        here = file.removesuffix(".py").replace("/", ".")
        if here.startswith((*(f"{leaf}." for leaf in LEAVES), "plugin", "__main__")):
            continue
        for module in imported_modules(path):
            name = module.removeprefix("vllm_specblock.")
            found |= {(file, leaf) for leaf in LEAVES if f"{name}.".startswith(f"{leaf}.")}
    assert not found, sorted(found)


def test_combine_and_verify_know_trees_not_drafters():
    for path in SOURCES:
        if room_of(path) in ("combine", "verify"):
            for module in imported_modules(path):
                assert not module.startswith("vllm_specblock.drafters"), f"{path} imports {module}"


def test_no_import_loads_vllms_cpu_worker():
    """It replaces vLLM's copies to a device and Triton's barrier in the whole process."""
    names = [
        name for name in names_of("vllm_specblock", "vllm_specblock") if "__main__" not in name
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "print([name for name in sys.modules if name.startswith('vllm.v1.worker.cpu')])"
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def names_of(folder: str, package: str) -> dict[str, Path]:
    """Modules of a folder by the names under which they are imported."""
    found = {}
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(part for part in (package, *parts) if part)] = path
    return found


@pytest.mark.parametrize("folder", ["vllm_specblock", "benchmarks", "research"])
def test_nothing_imports_in_a_circle(folder):
    """Nor by way of an import inside a function."""
    modules = names_of("vllm_specblock", "vllm_specblock")
    modules |= names_of("triton_kernels", "vllm_specblock.triton_kernels")
    if folder != "vllm_specblock":
        modules |= names_of(folder, "")
    left = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        asked = set(imported_modules(path)) | set(relative_imports(path, package))
        left[name] = {module for module in asked if module in modules} - {name}
    assert sum(map(len, left.values())) > 300
    while free := [name for name, asked in left.items() if not asked & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"


def relative_imports(path: Path, package: str):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def test_kernels_are_not_importable_by_their_folder(tmp_path):
    """vLLM prefers any top-level `triton_kernels` over the MoE kernels that it ships."""
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "-w", tmp_path, str(ROOT)], check=True)
    (built,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(built).namelist()
    assert "vllm_specblock/triton_kernels/attention/tree_attention.py" in names
    assert {"vllm_specblock/py.typed", "vllm_specblock/engine/vllm_hooks.txt"} <= {*names}
    assert not [name for name in names if name.startswith("triton_kernels/")]
    find = "import importlib.util as u, vllm_specblock.triton_kernels as k; print(k.__name__);"
    code = find + "print(u.find_spec('triton_kernels'))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["vllm_specblock.triton_kernels", "None"]


def test_every_package_is_shipped():
    """An editable install finds those that are not listed, too."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    modules = names_of("vllm_specblock", "vllm_specblock")
    modules |= names_of("triton_kernels", "vllm_specblock.triton_kernels")
    packages = {name for name, path in modules.items() if path.name == "__init__.py"}
    assert sorted(listed) == sorted(packages)


def test_supported_versions_stand_in_the_readme():
    from vllm_specblock.versions import SUPPORTED_VLLM

    readme = (ROOT / "README.md").read_text()
    for minor, where in SUPPORTED_VLLM.items():
        assert f"| {minor}.x | {where} |" in readme
