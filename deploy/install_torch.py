"""Install torch into the environment of the Python that runs this, as a CPU build where no NVIDIA GPU is visible.

    python deploy/install_torch.py [--backend auto|cpu|cuda] [SPEC]

PyPI's own Linux wheel brings several gigabytes of CUDA libraries along, of no use without a GPU. Whether the user's
pip offers a CPU build by itself depends on its configuration, so pip is asked first, without installing anything. If
it does not, uv, which knows where torch's CPU builds are, does the installing; and if that fails, pip's wheel is
taken: larger, but it works. Standard library only; runs before anything else is installed.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

DEFAULT_SPEC = "torch==2.13.0"
"""Pinned: with == pip takes a build with a local version such as +cpu wherever its sources offer one."""

CUDA_REQUIREMENT = re.compile(r"^(nvidia-|cuda-|triton\b)")


class Step(Enum):
    """A way of installing torch."""

    PIP = "pip"
    UV_CPU = "uv --torch-backend=cpu"
    UV_AUTO = "uv --torch-backend=auto"


@dataclass(frozen=True)
class Candidate:
    """The torch that pip would install: its version and its requirements."""

    version: str
    requirements: tuple[str, ...]

    @property
    def cpu_only(self) -> bool:
        """Whether this build comes without CUDA."""
        _, _, build = self.version.partition("+")
        if build:
            return build == "cpu"
        return not any(CUDA_REQUIREMENT.match(requirement) for requirement in self.requirements)


def plan(candidate: Candidate | None, want_cuda: bool) -> list[Step]:
    """Return the ways to try, best first. `candidate` is None when pip cannot tell or finds none."""
    if candidate is not None and candidate.cpu_only != want_cuda:
        return [Step.PIP]
    return [Step.UV_AUTO if want_cuda else Step.UV_CPU, Step.PIP]


def read_report(report: str) -> Candidate | None:
    """Return torch out of pip's installation report."""
    try:
        for item in json.loads(report)["install"]:
            metadata = item["metadata"]
            if metadata["name"] == "torch":
                return Candidate(metadata["version"], tuple(metadata.get("requires_dist", ())))
    except (ValueError, LookupError, TypeError):
        return None
    return None


def ask_pip(spec: str) -> Candidate | None:
    """Ask pip what it would install for `spec`, reading metadata only."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "-qq", "--no-deps", "--ignore-installed"]
    answer = subprocess.run([*command, "--report", "-", spec], capture_output=True, text=True)
    return read_report(answer.stdout) if answer.returncode == 0 else None


def gpu_visible() -> bool:
    """Return whether this machine shows an NVIDIA GPU."""
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        return listed.returncode == 0 and "GPU" in listed.stdout
    return Path("/dev/nvidia0").exists()


def install(step: Step, spec: str) -> bool:
    """Install `spec` in one way; return whether it worked."""
    pip = [sys.executable, "-m", "pip", "install", "-qq"]
    if step is Step.PIP:
        return subprocess.run([*pip, spec]).returncode == 0
    if subprocess.run([*pip, "uv"]).returncode != 0:
        return False
    backend = "auto" if step is Step.UV_AUTO else "cpu"
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    return subprocess.run([*uv, f"--torch-backend={backend}", spec]).returncode == 0


def installed() -> bool:
    """Return whether a torch is here already."""
    shown = subprocess.run([sys.executable, "-m", "pip", "show", "--quiet", "torch"], capture_output=True)
    return shown.returncode == 0


def main() -> int:
    """Install torch unless it is there; return the exit code."""
    parser = argparse.ArgumentParser(description="Install torch: a CPU build where there is no GPU.")
    parser.add_argument("spec", nargs="?", default="", help=f"what to install (default: {DEFAULT_SPEC})")
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto")
    arguments = parser.parse_args()
    spec = arguments.spec or DEFAULT_SPEC
    if not arguments.spec and installed():
        return 0
    want_cuda = gpu_visible() if arguments.backend == "auto" else arguments.backend == "cuda"
    steps = plan(ask_pip(spec), want_cuda)
    for step in steps:
        print(f"Installing {spec} for {'CUDA' if want_cuda else 'the CPU'} with {step.value}", flush=True)
        if step is Step.PIP and len(steps) > 1 and not want_cuda:
            print("No CPU build could be had: taking the default one, which is larger.", flush=True)
        if install(step, spec):
            return 0
    print(f"torch could not be installed; choose another with TORCH_SPEC (tried {spec})", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
