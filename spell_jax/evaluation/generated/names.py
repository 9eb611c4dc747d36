"""Random names without collisions, for the keys and values of needles."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np

# 256 adjectives x 256 nouns are 65,536 names. A haystack of a million tokens made of needles, 18
# tokens each, needs fewer keys. No adjective is the end of another and no noun is the beginning of
# another, so no name is part of another.
_ADJECTIVES = """
    able acute agile airy alert aloof amber ample ancient arctic ardent astute awake azure balanced
    balmy basic bitter bland blank bleak blithe blue blunt bogus bold bouncy brave brazen brief
    bright brisk broad broken bronze brown bulky bumpy burly busy calm candid careful cheap chief
    chilly civic classic clean clever cloudy coarse cobalt common cosmic cosy crimson crisp cross
    crude cunning curly curved daily damp dapper daring deep deft deluxe dense dim distant dizzy
    double dreamy drowsy dry dual dull dusty eager early earnest eerie elated elder empty epic exact
    exotic faint fair famous fancy fast fatal feisty feral fertile festive fickle fierce final firm
    fixed flat fleet flimsy floral fluent fluffy foggy fond formal frail frank free fresh frosty
    frozen frugal full funny fuzzy gentle giant gifted glad global gloomy glossy golden grand grave
    gray green grim gritty groovy gusty handy happy hardy harsh hasty warm hearty heavy hidden high
    hollow honest huge humble humid icy ideal idle inner ivory jade jagged jolly joyful keen kind
    lame lanky large lavender lavish lazy legal lenient level linear little lively local lofty lone
    loud loyal lucid lucky lunar lush magic major malty marble marine meek mellow merry mighty mild
    minor misty modest moody muddy murky mute narrow native neat nifty nimble noble noisy normal odd
    opaque orange outer oval pale pastel patient peachy perky placid plain plump polar polite
    prickly prime prompt proud pure quaint quick quiet rapid rare regal rich rigid robust rough
    round royal rustic salty scarlet sharp shy silent silver slender smooth snowy solar
"""
_NOUNS = """
    abbey acorn actor album alley anchor angel apple apron arrow artist atlas attic badge bagel
    baker bamboo banner barn basin basket beacon beaver bench berry bishop blade blanket boat bonnet
    border bottle branch brick bridge brook bucket bugle butter button cabin camel canal candle
    canoe canyon castle cavern cedar cellar chapel cherry circle citrus clock cloud coast comet
    copper coral cottage cousin cradle crane creek cricket crown crystal curtain dagger dancer delta
    desert diamond doctor dolphin donkey dragon drum eagle easel echo elbow ember engine falcon
    farmer feather fence fiddle field finger flame flute forest fossil fountain galaxy garden garlic
    gate geyser ginger glacier glove goblet gravel guitar hammer harbor harvest hawk hazel helmet
    heron hill hornet horse hotel island jacket jaguar jasmine jewel jungle kettle kitchen knight
    ladder lagoon lantern laurel lemon lever library lily lion lizard lobster magnet mango mantle
    maple market meadow melon mirror monkey mortar mountain museum mustard needle nest nickel oasis
    ocean olive onion orchard otter oyster paddle palace panther parrot pebble pepper piano pigeon
    pillow planet plaza pocket pond prairie puzzle quarry rabbit raven ribbon river robin rocket
    saddle salmon sandal satchel saucer scarf school scooter sculptor seal sentry shadow shovel
    shutter sickle signal singer skillet sloop snail sparrow spider spindle spruce squirrel stable
    stadium statue stream studio summit sunset swan tablet tailor teapot temple thicket thimble
    thistle thunder tiger timber toaster tower tractor trumpet tulip tunnel turbine turnip turtle
    umbrella valley vase velvet village violin volcano voyage waffle wagon walnut walrus warden
    water weasel whistle willow window winter wizard
"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())


class Names:
    """Random names without repetition; none of them occurs in `text`."""

    def __init__(self, rng: np.random.Generator, text: str = ""):
        self._text = text
        self._seen: set[str] = set()
        self._order = iter(rng.permutation(len(ADJECTIVES) * len(NOUNS)).tolist())
        self._makers: dict[str, Callable[[], str]] = {
            "word": self._word,
            "number": lambda: str(rng.integers(10**6, 10**7)),
            "uuid": lambda: str(uuid.UUID(bytes=rng.bytes(16), version=4)),
            "code": lambda: letters(rng, 6),
            "variable": lambda: letters(rng, 5).upper(),
        }

    def draw(self, kind: str) -> str:
        """Sample a "word", "number" (7 digits), "uuid", "code" (6 letters) or "variable" (5)."""
        while (name := self._makers[kind]()) in self._seen or name in self._text:
            pass
        self._seen.add(name)
        return name

    def _word(self) -> str:
        if (index := next(self._order, None)) is None:
            raise ValueError(f"length: needs more than the {len(ADJECTIVES) * len(NOUNS)} names")
        return f"{ADJECTIVES[index // len(NOUNS)]}-{NOUNS[index % len(NOUNS)]}"


def letters(rng: np.random.Generator, count: int) -> str:
    """Random string of `count` letters a to z."""
    return bytes(rng.integers(ord("a"), ord("z") + 1, count).tolist()).decode()
