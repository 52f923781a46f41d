"""schemathesis draws requests from our own description and finds no failure of ours, and no answer not described."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fakes.servers import scripted_server

ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>"


@pytest.mark.slow
def test_drawn_requests_find_no_failure(tmp_path):
    pytest.importorskip(
        "schemathesis", reason="schemathesis is not installed: it is in the extra `soak`"
    )
    options = ["--phases", "examples,coverage,fuzzing", "--max-examples", "40", "--seed", "1"]
    # The schema cannot say all that a request must hold, such as that a tool's answer needs a call before it.
    options += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
    options += ["--suppress-health-check", "all", "--continue-on-failure", "--no-color"]
    # A time-out that passes before anything could be done is answered as what it is.
    expected = 'checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]\n'
    (tmp_path / "schemathesis.toml").write_text(expected)
    with scripted_server(tmp_path, [{"text": ANSWER}], "--no-log-requests") as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        found = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
        metrics = server.http.get("/metrics").text
    assert "generated" in found.stdout
    lines = [line for line in metrics.splitlines() if line.startswith("rose_requests_total")]
    assert any('endpoint="chat",finish="stop",status="200"' in line for line in lines), lines
    assert not any('status="50' in line and 'status="504"' not in line for line in lines), lines
