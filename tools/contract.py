"""Hold what the plugin leans on against a vLLM that need not be installed.

    python tools/contract.py             # the one that is
    python tools/contract.py 0.33.0      # pip downloads its wheel (some 340 MB), nothing is run
    python tools/contract.py FOLDER      # a folder `vllm` of sources, or the folder above it

Says which hooks are not as they have to be; exit status 1 if there are any.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from vllm_specblock.engine.compat import PACKAGE, broken, hooks, installed

KEPT = Path(__file__).resolve().parent.parent / "build" / "contract"
METADATA = ".dist-info/METADATA"
READABLE = {".py", ".json", ".jinja", ".js", ".css"}


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
    if not list((KEPT / what).glob(f"*{METADATA}")):
        download(what, KEPT / what)
    return KEPT / what / PACKAGE


def download(version: str, folder: Path) -> None:
    """The Python sources of a release's wheel, into `folder`."""
    wheels = folder / "wheel"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    done = subprocess.run([*pip, "--quiet", "--dest", str(wheels), f"{PACKAGE}=={version}"])
    if done.returncode:
        raise SystemExit(f"pip could not download {PACKAGE}=={version}; its message is above.")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:  # but for its compiled parts, a gigabyte
        for name in packed.namelist():
            readable = name.startswith(f"{PACKAGE}/") and Path(name).suffix in READABLE
            if readable or name.endswith(METADATA):
                packed.extract(name, folder)
    shutil.rmtree(wheels)


if __name__ == "__main__":
    sys.exit(main())
