"""Words that questions are made of, and made-up ones, so that nothing can be learnt by heart."""

from __future__ import annotations

import random


def _list(text: str, separator: str = " ") -> tuple[str, ...]:
    return tuple(text.split(separator))


CITIES = _list(
    "Paris Oslo Lima Tokyo Cairo Berlin Madrid Toronto Nairobi Sydney Vienna Lisbon Rome Athens Dublin Prague "
    "Warsaw Helsinki Zurich Geneva Boston Chicago Denver Seattle Havana Quito Bogota Santiago Accra Lagos Tunis "
    "Dakar Delhi Mumbai Hanoi Manila Seoul Osaka Perth Auckland Riga Vilnius Porto Seville Lyon Turin Bergen "
    "Malmo Ghent Utrecht"
)
COUNTRIES = _list(
    "France Norway Peru Japan Egypt Germany Spain Canada Kenya Australia Austria Portugal Italy Greece Ireland "
    "Poland Finland Chile Ghana India Vietnam Korea Latvia Belgium"
)
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")
FIRST_NAMES = _list(
    "Ana Ben Carla David Emma Felix Grace Hugo Iris Jonas Karin Leo Mia Noah Olga Paul Quinn Rosa Sam Tara Uma "
    "Victor Wendy Yara Zoe Adam Bella Chen Dora Elias"
)
LAST_NAMES = _list(
    "Brown Smith Garcia Weber Novak Rossi Larsen Dubois Silva Kim Tanaka Singh Khan Okafor Moreau Fischer Costa "
    "Nilsen Petrov Horvath"
)
JOBS = _list(
    "nurse teacher baker pilot farmer lawyer painter driver doctor plumber writer singer gardener tailor"
)
NOUNS = _list(
    "apple river stone window garden bridge candle forest mountain letter engine mirror pocket silver table "
    "winter yellow orange basket button castle desert feather hammer island jacket kettle ladder market needle "
    "ocean pencil rabbit saddle tunnel valley wagon anchor bottle carpet dragon emerald flower guitar helmet "
    "insect jungle kitchen lemon magnet napkin onion paper quilt ribbon shadow ticket umbrella violin wallet "
    "yogurt zebra barrel cabin drum eagle fence glove harbor lamp"
)
DEEDS = _list("get set move open close send make delete check start stop find add read write")
PROPERTIES = _list(
    "color level room id size note speed target mode label amount text enabled code title owner unit path count x y"
)
TOPICS = _list(
    "solar panels, ancient coins, deep sea fish, steam engines, wild bees, paper folding, night trains, salt mines, "
    "moon dust, river dams, ice cores, stone bridges, old maps, wind farms, desert plants, clay pots, green tea, "
    "snow leopards",
    ", ",
)
CAPITALS = {
    "France": "Paris", "Norway": "Oslo", "Peru": "Lima", "Japan": "Tokyo", "Egypt": "Cairo", "Germany": "Berlin",
    "Spain": "Madrid", "Kenya": "Nairobi", "Austria": "Vienna", "Portugal": "Lisbon", "Italy": "Rome",
    "Greece": "Athens", "Ireland": "Dublin", "Poland": "Warsaw", "Finland": "Helsinki", "Chile": "Santiago",
    "Ghana": "Accra", "India": "Delhi", "Vietnam": "Hanoi", "Korea": "Seoul", "Latvia": "Riga",
}  # fmt: skip
SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_ONSETS = _list("b br c d dr f fl g gr h j k l m n p pl qu r s st t tr v w z")
_VOWELS = _list("a e i o u ai ea oo")
_ENDS = ["", "", "n", "r", "l", "s", "m", "x", "nd", "rk"]


def made_word(source: random.Random) -> str:
    """Return a lower-case word of two or three syllables that is in no dictionary, mostly."""
    syllables = [
        source.choice(_ONSETS) + source.choice(_VOWELS) for _ in range(source.randint(2, 3))
    ]
    return "".join(syllables) + source.choice(_ENDS)


def place(source: random.Random) -> str:
    """Return a city, real or made up."""
    if source.random() < 0.5:
        return source.choice(CITIES)
    return made_word(source).capitalize()


def person(source: random.Random) -> str:
    """Return a name."""
    first = source.choice(FIRST_NAMES) if source.random() < 0.6 else made_word(source).capitalize()
    return f"{first} {source.choice(LAST_NAMES)}"


def symbols(source: random.Random, length: int) -> str:
    """Return capitals and digits at random: each is a token of its own in the embedded vocabulary."""
    return "".join(source.choices(SYMBOLS, k=length))


def sentence(source: random.Random) -> str:
    """Return a plain sentence of 6 to 12 words."""
    who, what = source.choice(FIRST_NAMES), source.choice(NOUNS)
    verb = source.choice(["sees", "carries", "paints", "finds", "sells", "repairs", "hides"])
    where = source.choice(["near", "behind", "under", "inside", "beside"])
    adjective = source.choice(["old", "small", "red", "quiet", "broken", "bright", "heavy"])
    return f"{who} {verb} the {adjective} {what} {where} the {source.choice(NOUNS)} of {place(source)}."
