"""Make an environment with a release's Python over the compiled parts of the installed CPU build.

    .venv/bin/python tools/newer_vllm.py 0.33.0     # a minute; prints the new interpreter

For a release whose CUDA wheel is on PyPI while its CPU wheel is not. It is a build of neither
release, and its metadata says so: tests there say nothing of the newer compiled parts. All other
packages are those of the environment that made it, which therefore has to stay.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from contract import folder_of
from setup_env import import_trouble, write_metadata

from vllm_specblock.engine.compat import PACKAGE, installed

MADE = Path(__file__).resolve().parent.parent / "build"
ALSO = {"orjson"}
"""What vLLM's server imports from 0.33 on: installed beside it."""
SCRIPTS = ("vllm", "specblock")
SCRIPT = """#!{python}
import sys
from importlib.metadata import entry_points

sys.exit(next(iter(entry_points(group="console_scripts", name="{name}"))).load()())
"""


def main(arguments: list[str] | None = None) -> None:
    """Make the environment anew; print its interpreter."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("release", help="of vLLM, e.g. 0.33.0")
    release = parser.parse_args(arguments).release
    folder = MADE / f"{PACKAGE}-{release}"
    base = installed()
    build = version(PACKAGE) if base else "none"
    if base is None or "+cpu" not in build:
        raise SystemExit(
            f"The compiled parts come from an installed CPU build of vLLM, and here is {build}: "
            "call the Python of an environment that `make setup` made on a CPU."
        )
    sources = folder_of(release)
    also = [name for name in ALSO if find_spec(name) is None]
    venv.create(folder, with_pip=False, clear=True, symlinks=True)
    where = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", where))
    python = Path(sysconfig.get_path("scripts", "venv", where)) / "python"
    # Its own .pth files count there as well, such as that of a package installed with `-e`.
    (site / "base.pth").write_text(f"import site; site.addsitedir({str(base.parent)!r})\n")
    shutil.copytree(sources, site / PACKAGE, ignore=shutil.ignore_patterns("*.so"))
    for part in sorted(base.rglob("*.so")):
        link = site / PACKAGE / part.relative_to(base)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(part)
    parts = build.partition("+")[0]
    write_metadata(
        site,
        f"{release}+cpu.parts.of.{parts}",
        f"Summary: Python of vLLM {release} over compiled parts of {build}: for tests of plugins",
        "",
        "Made by tools/newer_vllm.py; a build of neither release.",
    )
    for name in SCRIPTS:
        script = python.with_name(name)
        script.write_text(SCRIPT.format(python=python, name=name))
        script.chmod(0o755)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    if also and subprocess.run([*pip, "install", "--quiet", "--no-deps", *also]).returncode:
        raise SystemExit(f"pip could not install {' '.join(also)}; its message is above.")
    if trouble := import_trouble(python):
        raise SystemExit(f"{folder} was made, but vLLM {release} does not import there: {trouble}")
    print(python)


if __name__ == "__main__":
    main()
