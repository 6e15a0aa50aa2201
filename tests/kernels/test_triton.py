"""Triton's kernels equal torch's functions: on a GPU where there is one, else in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU = torch.cuda.is_available()
CASES = [  # of three processes, as long as each other: starting one takes as long as most of these
    ["decode_cases.py", "host_gather_cases.py", "layer_ops_cases.py", "fp8_cases.py"],
    ["scoring_cases.py", "quantized_decode_cases.py", "prefill_attention_cases.py", "cache_cases.py"],
    ["selection_cases.py", "retrieval_attention_cases.py", "slotted_cases.py", "vote_cases.py"],
]


@pytest.mark.parametrize("cases", CASES, ids=" ".join)
def test_kernels_equal_the_reference(cases, pytestconfig):
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *(str(Path(__file__).with_name(each)) for each in cases),
    ]
    if most := pytestconfig.getoption("--cases"):
        command += ["--cases", str(most)]
    environment = os.environ | ({} if GPU else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
