"""Hold what the plugin leans on against a vLLM that need not be installed.

    python tools/contract.py             # the one that is
    python tools/contract.py 0.33.0      # pip unpacks its wheel (a gigabyte), nothing is run
    python tools/contract.py FOLDER      # a folder `vllm` of sources, or the folder above it

Says which hooks are not as they have to be; exit status 1 if there are any.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from vllm_specblock.engine.compat import PACKAGE, broken, hooks, installed

KEPT = Path(__file__).resolve().parent.parent / "build" / "contract"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "what", nargs="?", help="a release, or a folder; default: what is installed"
    )
    what = parser.parse_args(arguments).what
    troubles = list(broken(folder_of(what)))
    for trouble in troubles:
        print(trouble)
    count = len(hooks())
    print(f"{count - len(troubles)} of {count} hooks hold in {what or 'the installed vLLM'}.")
    return 1 if troubles else 0


def folder_of(what: str | None) -> Path:
    """The folder `vllm` that is meant."""
    if not what:
        root = installed()
        if root is None:
            raise SystemExit("vLLM is not installed: name a release, such as 0.33.0, or a folder.")
        return root
    given = Path(what)
    if given.is_dir():
        below = given / PACKAGE
        return below if below.is_dir() else given
    kept = KEPT / what
    if not (kept / PACKAGE).is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        how = ["--no-deps", "--no-compile", "--only-binary=:all:", "--target", kept]
        if subprocess.run([*pip, *how, f"{PACKAGE}=={what}"]).returncode:
            raise SystemExit(f"pip could not install {PACKAGE}=={what}; its message is above.")
    return kept / PACKAGE


if __name__ == "__main__":
    sys.exit(main())
