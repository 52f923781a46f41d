"""What tokens cost: latency x GPUs x price of a GPU hour / tokens."""

from __future__ import annotations

from typing import Any

PRICE = 3.0
"""US dollars for one H200 for one hour, the price of the seed's published figures."""
PRICED_DEVICE = "H200"
"""In the names of devices that have this price; what others cost is not known."""


def is_priced(line: dict[str, Any]) -> bool:
    """Whether a result line comes from the device that the price is of."""
    return PRICED_DEVICE in str(line.get("device"))


def usd_per_million(*, seconds: float, tokens: float, gpus: int = 1, price: float = PRICE) -> float:
    """Return the dollars for a million tokens when so many take so long.

    Units    price in dollars per GPU and hour
    """
    return seconds * gpus * price / 3600 / tokens * 1e6


def line_cost(line: dict[str, Any], *, price: float = PRICE) -> tuple[str, float] | None:
    """Return what kind of tokens a result line made and what a million cost; None for other benches and devices."""
    if not is_priced(line):
        return None
    gpus = line.get("gpus") or line.get("tp", 1) * line.get("dp", 1)
    bench, common = line.get("bench"), {"gpus": gpus, "price": price}
    if bench == "prefill":
        cost = usd_per_million(seconds=line["median"], tokens=line["tokens"], **common)
        return "input", cost
    if bench in ("decode", "decode_filled"):
        cost = usd_per_million(seconds=line["median"] / 1e3, tokens=line["batch"], **common)
        return "output", cost
    if bench == "load":
        cost = usd_per_million(seconds=1.0, tokens=line["output_tokens_per_s"], **common)
        return "output", cost
    if bench == "prefill_many":
        cost = usd_per_million(seconds=1.0, tokens=line["tokens_per_s"], **common)
        return "input", cost
    return None
