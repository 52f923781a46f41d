"""Write tests/data/harmony_golden.json: conversations as the published Harmony libraries render them.

Two libraries share one import name, so each run writes one form of replayed calls and keeps the other:
    python tools/harmony_golden.py recipient_first     with openai-harmony 0.0.8 (the extra `test` brings it)
    python tools/harmony_golden.py channel_first       with oss-harmony 0.0.11, installed into a folder of its own that
                                                       stands first on PYTHONPATH
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "data" / "harmony_golden.json"
LIBRARIES = {"recipient_first": "openai-harmony", "channel_first": "oss-harmony"}
NUM_CASES = 24
SEED = 2026


def bodies() -> list[dict]:
    """Return the conversations; those with calls first, since their headers are what differs."""
    sys.path.insert(0, str(ROOT / "tests" / "frontend" / "formatters" / "harmony"))
    from bodies import Bodies

    drawn = [Bodies(SEED + number).body() for number in range(200)]
    drawn.sort(key=lambda body: "tool_calls" not in json.dumps(body["messages"]))
    # The libraries write 1e20 differently, as 1e20 and 1e+20.
    return [b for b in drawn if len(json.dumps(b)) < 4000 and "1e+20" not in json.dumps(b)][
        :NUM_CASES
    ]


def encoding() -> object:
    """Return the library's encoding, its vocabulary from the installed package, so that it needs no network."""
    import openai_harmony

    folder = tempfile.mkdtemp()
    packed = resources.files("bpe_openai").joinpath("data", "o200k_base.tiktoken.gz").read_bytes()
    (Path(folder) / "o200k_base.tiktoken").write_bytes(gzip.decompress(packed))
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def main(form: str) -> int:
    """Render everything in one form."""
    from bodies import oracle_tokens

    library = LIBRARIES[form]
    golden = json.loads(FILE.read_text()) if FILE.exists() else {"libraries": {}, "cases": []}
    golden["libraries"][form] = f"{library} {metadata.version(library)}"
    golden["cases"] = golden["cases"] or [{"body": body} for body in bodies()]
    oracle = encoding()
    for case in golden["cases"]:
        case[form] = oracle_tokens(oracle, case["body"])
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    FILE.write_text(text.replace('{"body"', '\n{"body"') + "\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in LIBRARIES:
        sys.exit(f"usage: harmony_golden.py {' | '.join(LIBRARIES)}")
    bodies()
    sys.exit(main(sys.argv[1]))
