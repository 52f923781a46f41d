"""Make `.venv` ready: standard library only, safe to call every time, quick when nothing changed.

usage: bootstrap.py EXTRA [EXTRA ...]      installs rose with these extras of pyproject.toml
Which torch: where PIP_FIND_LINKS holds wheels they are preferred; with an NVIDIA driver the matching CUDA build;
else the CPU build. An interpreter that already has torch >= 2.11 with CUDA lends it (no download).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
_PROBE = (
    "import torch, sys; sys.exit(not (torch.cuda.is_available() and torch.__version__ >= '2.11'))"
)
# Needs Python 3.12 by its metadata but runs on 3.11; an oracle of the tests, never imported by rose.
_IGNORES_PYTHON = ("gpt-oss==0.0.9",)


def main(extras: list[str]) -> int:
    """Create the environment and install; return an exit code."""
    if sys.version_info < (3, 11):
        return _fail(
            f"Python {sys.version.split()[0]} found; rose needs 3.11 or newer; set PYTHON=python3.12"
        )
    wanted = _fingerprint(extras)
    stamp = VENV / "rose-installed"
    if stamp.exists() and wanted in stamp.read_text().split():
        return 0
    lends_torch = _run([sys.executable, "-c", _PROBE], quiet=True) == 0
    if not PYTHON.exists():
        _say(f"creating {VENV} with Python {sys.version.split()[0]}")
        options = ["--system-site-packages"] if lends_torch else []
        if _run([sys.executable, "-m", "venv", *options, str(VENV)]):
            return _fail("python -m venv failed; on Debian: apt-get install python3-venv")
    _say(f"installing rose[{','.join(extras)}]")
    if _install(extras) != 0:
        return _fail(
            "installation failed; the lines above say why (no network? set PIP_FIND_LINKS)"
        )
    previous = stamp.read_text() if stamp.exists() else ""
    stamp.write_text(previous + wanted + "\n")
    return 0


def _fingerprint(extras: list[str]) -> str:
    text = (ROOT / "pyproject.toml").read_bytes() + ",".join(sorted(extras)).encode()
    return hashlib.sha256(text + sys.version.encode()).hexdigest()[:16]


def _install(extras: list[str]) -> int:
    target = f"{ROOT}[{','.join(extras)}]"
    environment = dict(os.environ)
    find_links = environment.get("UV_FIND_LINKS") or environment.get("PIP_FIND_LINKS", "")
    if find_links:
        environment["UV_FIND_LINKS"] = find_links
    _run([str(PYTHON), "-m", "pip", "install", "-q", "uv"], quiet=True)
    uv = VENV / "bin" / "uv"
    code = 1
    if uv.exists():
        command = [str(uv), "pip", "install", "-q", "--python", str(PYTHON), "--compile-bytecode"]
        if not find_links:
            command += ["--torch-backend", "auto" if shutil.which("nvidia-smi") else "cpu"]
        code = _run([*command, "-e", target], environment=environment)
    if code:
        _say("uv is not usable here; taking pip, which is slower")
        code = _run([str(PYTHON), "-m", "pip", "install", "-q", "-e", target])
    if code == 0 and "test" in extras:
        command = [
            str(PYTHON),
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--ignore-requires-python",
        ]
        code = _run([*command, *_IGNORES_PYTHON])
    return code


def _run(
    command: list[str], *, quiet: bool = False, environment: dict[str, str] | None = None
) -> int:
    output = subprocess.DEVNULL if quiet else None
    return subprocess.call(command, stdout=output, stderr=output, env=environment)


def _say(text: str) -> None:
    print(f"[rose] {text}", flush=True)


def _fail(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    tomllib.loads(
        (ROOT / "pyproject.toml").read_text()
    )  # a broken file is named before anything is made
    sys.exit(main(sys.argv[1:] or ["engine"]))
