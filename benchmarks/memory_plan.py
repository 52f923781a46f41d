"""The memory plan beside what a GPU then takes: planned from configuration alone, measured after the model is there.

    python benchmarks/memory_plan.py --size 20b --json plan.jsonl

One JSON line per run: bytes planned and measured of weights with tables, of the largest step and of the decode graphs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from rose.bench.record import Origin, append
from rose.config.engine import EngineConfig
from rose.config.quant import QuantConfig
from rose.decoders.build import build_decoder
from rose.models.gpt_oss.config import published, tiny
from rose.models.gpt_oss.synthetic import synthetic_model
from rose.models.registry import entry
from rose.runtime.before_load import Planner
from rose.runtime.memory_words import is_as_planned
from rose.utils.device import detect, free_bytes


def main() -> None:
    """Plan, load, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("20b", "120b", "tiny"), default="20b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try it")
    parser.add_argument("--weights", default="mxfp4")
    parser.add_argument("--json", type=Path, help="append the line to this file")
    parser.add_argument("--commit")
    options = parser.parse_args()
    device = detect(options.device)
    config = EngineConfig(model="m", quant=QuantConfig(weights=options.weights))
    config = config.resolve(device, checkpoint_format="mxfp4")
    model_config = tiny() if options.size == "tiny" else published(options.size)
    free_before = free_bytes(device)
    planner = Planner(
        entry=entry("gpt_oss"), model_config=model_config, device=device, free_bytes=free_before
    )
    begin = time.monotonic()
    plan = planner.plan(config)
    plan_s = time.monotonic() - begin
    print("\n".join(planner.lines(config, plan)))
    model = synthetic_model(model_config, config, device, seed=0)
    built = build_decoder(model, config, device, print, planned=plan)
    print("\n".join(built.lines()))
    graphs_free = free_bytes(device)
    measured = built.assembly.measured
    line = {
        "bench": "memory_plan",
        "size": options.size,
        "weights": options.weights,
        "torch": torch.__version__,
        "plan_s": round(plan_s, 2),
        "planned": {**asdict(plan.use), "kv": plan.kv_bytes, "total": plan.total},
        "measured": asdict(measured),
        "is_as_planned": is_as_planned(plan.use, measured),
        "taken_in_all": free_before - graphs_free,
        "reserved": torch.cuda.memory_reserved(),
    }
    line = Origin.here(
        device=device.name, config=f"weights={options.weights}", commit=options.commit,
        command=shlex.join(["python", "benchmarks/memory_plan.py", *sys.argv[1:]]),
    ).stamp(line)  # fmt: skip
    print(json.dumps(line))
    append(options.json, line)


if __name__ == "__main__":
    main()
