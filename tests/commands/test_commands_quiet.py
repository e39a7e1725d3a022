"""What a person sees besides the answer: nothing."""

import os
import subprocess
import sys

from problems import tiny_model


def test_no_bars_of_other_libraries(tmp_path):
    tiny_model(num_channels=1, num_labels=10).save_pretrained(tmp_path)
    command = [
        sys.executable,
        "-m",
        "odevit",
        "eval",
        str(tmp_path),
        "--data",
        "digits",
        "--max-images",
        "50",
        "--json",
    ]
    seen = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert seen.returncode == 0, seen.stderr
    assert len(seen.stdout.splitlines()) == 1
    assert "Loading weights" not in seen.stderr
    assert "%|" not in seen.stderr
