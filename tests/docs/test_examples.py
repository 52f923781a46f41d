"""What the documentation prints to be copied works as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from fakes.servers import RunningServer
from rose.cli.demo import WEATHER_TOOL
from rose.cli.main import COMMANDS, run
from rose.cli.serve import EMBEDDED_MODEL, EMBEDDED_WORDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"


def test_readme_has_every_command():
    listed = re.findall(r"^\| `rose (\w+)[^|]*` \|", README.read_text(), re.M)
    assert sorted(listed) == sorted(COMMANDS)


@dataclass(frozen=True)
class Curl:
    """A curl command as a page prints it, and the answer below it where there is one."""

    page: str
    path: str
    headers: dict[str, str]
    body: str
    answer: str


def _curls() -> list[Curl]:
    found = []
    for page in (README, DOCS / "api.md", DOCS / "responses.md"):
        text = page.read_text().replace("\\\n", " ")
        printed = re.findall(r"^ *(curl .*?\}')$(?:\n +(\{[^\n]*\})$)?", text, re.M | re.S)
        assert len(printed) == len(re.findall(r"^ *curl ", text, re.M)), f"{page}: not read"
        found += [_curl(page.name, command, answer) for command, answer in printed]
    return found


def _curl(page: str, command: str, answer: str) -> Curl:
    # What curl sends with -d unless it is told another; the server refuses it.
    headers = {"content-type": "application/x-www-form-urlencoded"}
    path = body = ""
    _, *words = shlex.split(command)
    while words:
        word = words.pop(0)
        if word == "-H":
            name, value = words.pop(0).split(": ")
            headers[name.lower()] = value
        elif word == "-d":
            body = words.pop(0)
        elif not word.startswith("-"):
            path = re.sub(r"^(http://)?(localhost|127\.0\.0\.1):8000(?=/)", "", word)
        else:
            assert word in ("-s", "-sN"), f"{page}: this test does not know {word}"
    return Curl(page, path, headers, body, answer)


def test_curl_examples_name_the_model_that_rose_serve_runs():
    names = [(curl.page, json.loads(curl.body).get("model")) for curl in _curls()]
    assert [model for page, model in names if page == "README.md"] == [EMBEDDED_MODEL.name]
    others = [model for page, model in names if page != "README.md"]
    assert len(others) == 6
    assert set(others) == {EMBEDDED_MODEL.name, None}  # /tokenize and /detokenize need none


def test_the_tool_of_the_curl_example_is_the_one_the_embedded_model_was_trained_on():
    bodies = [json.loads(curl.body) for curl in _curls()]
    [tools] = [body["tools"] for body in bodies if "tools" in body]
    assert tools == [WEATHER_TOOL]


@pytest.mark.timeout(120)
def test_examples_are_answered_as_printed(capsys):
    pytest.importorskip("torch", reason="the engine needs torch")
    server = RunningServer("--device", "cpu")
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for curl in _curls():
                response = http.post(curl.path, headers=curl.headers, content=curl.body)
                assert response.status_code == 200, f"{curl}: {response.text}"
                assert not curl.answer or response.text == curl.answer, curl
        # Who asks for more than the examples do has been told what answers.
        assert server.lines.count(EMBEDDED_WORDS) == 1
        [terms] = re.findall(r'^rose chat --once "What is (.*)\?"$', README.read_text(), re.M)
        question = f"What is {terms}?"
        assert run(["chat", "--url", server.url, "--temperature", "0", "--once", question]) == 0
        assert f"{terms} = {sum(map(int, terms.split(' + ')))}." in capsys.readouterr().out
    finally:
        server.stop()


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
