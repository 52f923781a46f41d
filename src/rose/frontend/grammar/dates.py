"""Days and times as regular expressions that allow no other: the grammar library takes 29 February of any year.

Every text that matches is one of RFC 3339; of its freedoms those that readers know least (leap seconds, small letters,
the year 0) are left out.
"""

from __future__ import annotations

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAYS = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_4}|{_BY_4}00)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"

_DATE = f"(?:{_YEAR}-{_DAYS}|{_LEAP_YEAR}-02-29)"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Format -> its pattern."""
