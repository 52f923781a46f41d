"""What `import rose` gives, and what it says where the engine's packages are not installed."""

from __future__ import annotations

import subprocess
import sys

import rose


def test_public_names_that_need_no_torch_are_there():
    assert rose.SamplingParams is not None
    assert rose.EngineConfig(model="x").device == "auto"


def test_without_torch_the_extra_is_named():
    program = "import sys; sys.modules['torch'] = None; from rose import LLMEngine"
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: rose.LLMEngine needs torch")
    assert "pip install 'rose-engine[engine]'" in last
