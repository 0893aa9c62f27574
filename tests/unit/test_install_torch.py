"""Which torch is installed, and how: a CPU build where there is no GPU, whatever the user's pip offers."""

import json

import pytest

from deploy.install_torch import Candidate, Step, plan, read_report

PLAIN = Candidate("2.13.0", ("filelock", 'sympy; extra == "optree"'))
CPU = Candidate("2.13.0+cpu", ("filelock",))
CUDA = Candidate("2.13.0", ("filelock", "nvidia-cudnn-cu13==9.1; platform_system == 'Linux'", "triton==3.5"))
CUDA_BINDINGS = Candidate("2.14.1", ("filelock", "cuda-bindings<14; platform_system == 'Linux'"))
LOCAL_CUDA = Candidate("2.13.0+cu130", ("filelock",))


@pytest.mark.parametrize(
    ("candidate", "want_cuda", "steps"),
    [
        (CPU, False, [Step.PIP]),
        (PLAIN, False, [Step.PIP]),
        (CUDA, False, [Step.UV_CPU, Step.PIP]),
        (CUDA_BINDINGS, False, [Step.UV_CPU, Step.PIP]),
        (LOCAL_CUDA, False, [Step.UV_CPU, Step.PIP]),
        (None, False, [Step.UV_CPU, Step.PIP]),
        (CUDA, True, [Step.PIP]),
        (LOCAL_CUDA, True, [Step.PIP]),
        (CPU, True, [Step.UV_AUTO, Step.PIP]),
        (None, True, [Step.UV_AUTO, Step.PIP]),
    ],
)
def test_plan(candidate, want_cuda, steps):
    """pip alone when its candidate is the right kind; else uv first, and pip's as the last resort."""
    assert plan(candidate, want_cuda) == steps


def test_the_candidate_is_read_out_of_pips_report():
    """Other packages in the report do not count."""
    torch = {"name": "torch", "version": "2.13.0+cpu", "requires_dist": ["filelock"]}
    report = {"install": [{"metadata": {"name": "numpy", "version": "2.0"}}, {"metadata": torch}]}
    assert read_report(json.dumps(report)) == CPU


@pytest.mark.parametrize("report", ["", "[]", "{}", '{"install": [{}]}', '{"install": []}'])
def test_a_report_that_says_nothing_is_no_candidate(report):
    """An old pip or an odd answer must not stop the installation."""
    assert read_report(report) is None
