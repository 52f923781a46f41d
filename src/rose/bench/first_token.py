"""The child of `rose bench start`: build an engine, answer a warm-up request, say so in one JSON line.

usage: python -m rose.bench.first_token '{"size": "20b", ...}'      arguments of `build.setup`
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rose.utils.errors import RoseError
from rose.utils.log import configure_logging

WARM_UP_TOKENS = 64
EXIT_REFUSED = 2
"""The last lines of standard error are for the user."""


def main(choices: dict[str, Any]) -> dict[str, Any]:
    """Return what ran and when each stage ended, in seconds after Python had started."""
    begin = time.perf_counter()
    stages: dict[str, float] = {}

    def ended(stage: str) -> None:
        stages[stage] = round(time.perf_counter() - begin, 3)

    from rose.bench.build import build_engine, build_model, setup
    from rose.bench.sweep import PromptSource, prefill_seconds

    ended("imports")
    bench = setup(**choices)
    model = build_model(bench)
    ended("weights")
    engine = build_engine(model, bench, say)
    ended("engine")
    prefill_seconds(engine, PromptSource(bench.model_config.vocab_size), WARM_UP_TOKENS)
    ended("first token")
    return {
        "config": bench.name,
        "device": bench.device.name,
        "kv": bench.config.quant.kv,
        "is_option": bench.is_option,
        "stages": stages,
    }


def say(text: str) -> None:
    """Report on standard error, whose last lines the parent shows where no token came."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    configure_logging()
    try:
        print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)  # noqa: T201
    except RoseError as error:
        say(json.dumps(str(error)))  # one line of what may be several
        sys.exit(EXIT_REFUSED)
