"""OpenMP's waiting is settled before torch is there, or another process on the machine slows every operation down."""

import subprocess
import sys

from worker.openmp import SHORT_SPIN, spin_briefly


def test_openmp_sleep_soon_by_default():
    env = {"PATH": "/bin"}
    spin_briefly(env)
    assert env == {"PATH": "/bin", **SHORT_SPIN}


def test_what_the_user_decided_stays():
    for name in (*SHORT_SPIN, "OMP_WAIT_POLICY"):
        env = {name: "mine"}
        spin_briefly(env)
        assert env == {name: "mine"}


def test_it_is_settled_when_torch_is_imported():
    """The library reads its settings when it is loaded, so they must stand before anything imports torch."""
    script = """
import os, sys
class Torch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            raise SystemExit
sys.meta_path.insert(0, Torch())
import worker.main
import worker.models.resolve as resolve
resolve.resolve_model = lambda config, report: resolve.ResolvedModel("m", None)
from common.config import WorkerConfig
worker.main.load_engine(WorkerConfig())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={"PATH": ""})
    assert run.stdout.strip() == SHORT_SPIN["GOMP_SPINCOUNT"], run.stderr
