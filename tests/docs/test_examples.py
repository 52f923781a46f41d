"""What the documentation prints to be copied works as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rose.cli.demo import WEATHER_TOOL
from rose.cli.serve import EMBEDDED_MODEL

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def _curl_bodies() -> list[dict]:
    pages = ("api.md", "responses.md")
    text = "\n".join((DOCS / page).read_text() for page in pages).replace("\\\n", " ")
    commands = re.findall(r"^    (curl .*?\}')$", text, re.MULTILINE | re.DOTALL)
    return [json.loads(words[words.index("-d") + 1]) for words in map(shlex.split, commands)]


def test_curl_examples_name_the_model_that_rose_serve_runs():
    bodies = [body for body in _curl_bodies() if "model" in body]  # /tokenize needs none
    assert len(bodies) == 4
    assert {body["model"] for body in bodies} == {EMBEDDED_MODEL.name}


def test_the_tool_of_the_curl_example_is_the_one_the_embedded_model_was_trained_on():
    [tools] = [body["tools"] for body in _curl_bodies() if "tools" in body]
    assert tools == [WEATHER_TOOL]


@pytest.mark.timeout(60)
def test_the_python_example_runs():
    [program] = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reasoning, content = done.stdout.splitlines()
    assert "2" in reasoning
    assert content.startswith("2")
