"""ALFRED's 225 actions: names like "pickup apple", each with the id that is its place here.

They are the distinct actions of the plans in ALFRED's train set (MIT licence, Shridhar et al. 2020,
arXiv 1912.01734), numbered as the published action map of Reinforced Reasoning for Embodied
Planning (arXiv 2505.22050) does: a block of ids a verb, alphabetical inside it. They are written
down here so that a machine without ALFRED has them; tests compare them with both sources.
"""

from __future__ import annotations

from collections.abc import Collection

# What can be picked up can be put down, in the same order.
_PORTABLE = """
alarmclock apple baseballbat basketball book bowl box bread butterknife candle cd cellphone
cloth creditcard cup dishsponge egg fork glassbottle handtowel kettle keychain knife ladle
laptop lettuce mug newspaper pan pen pencil peppershaker pillow plate plunger pot potato
remotecontrol saltshaker soapbar soapbottle spatula spoon spraybottle statue tennisracket
tissuebox toiletpaper tomato vase watch wateringcan winebottle
"""

# By verb, in the order of the ids. To go to, there are places and things.
_OBJECTS = {
    "goto": """
        alarmclock apple armchair baseballbat basketball bathtubbasin bed bowl box bread
        butterknife cabinet candle cart cellphone cloth coffeemachine coffeetable countertop
        creditcard cup desk desklamp diningtable dishsponge drawer dresser egg floorlamp
        fork fridge garbagecan handtowelholder keychain knife laptop lettuce microwave mug
        newspaper ottoman pan pen pencil plate plunger pot potato remotecontrol safe shelf
        sidetable sinkbasin soapbar soapbottle sofa spatula spoon statue stoveburner
        tennisracket tissuebox toilet toiletpaper toiletpaperhanger tomato vase watch
        wateringcan
    """,
    "pickup": _PORTABLE,
    "put": _PORTABLE,
    "toggle": "desklamp floorlamp",
    "cool": """
        apple bowl bread cup egg lettuce mug pan plate pot potato tomato winebottle
    """,
    "slice": "apple bread lettuce potato tomato",
    "clean": """
        apple bowl butterknife cloth cup dishsponge egg fork kettle knife ladle lettuce mug
        pan plate pot potato soapbar spatula spoon tomato
    """,
    "heat": "apple bread cup egg knife mug plate potato tomato",
}

VERBS: tuple[str, ...] = tuple(_OBJECTS)
ACTIONS: tuple[str, ...] = tuple(
    f"{verb} {name}" for verb in VERBS for name in _OBJECTS[verb].split()
)
ACTION_IDS: dict[str, int] = {name: index for index, name in enumerate(ACTIONS)}
OBJECTS: tuple[str, ...] = tuple(dict.fromkeys(" ".join(_OBJECTS.values()).split()))


def objects(verb: str) -> tuple[str, ...]:
    """The objects of a verb, in the order of their ids; KeyError for what is no verb.

    >>> objects("toggle")
    ('desklamp', 'floorlamp')
    """
    return tuple(_OBJECTS[verb].split())


def actions_on(there: Collection[str]) -> list[str]:
    """The actions whose object is one of these, in the order of their ids.

    >>> actions_on({"desk", "pen"})
    ['goto desk', 'goto pen', 'pickup pen', 'put pen']
    """
    return [action for action in ACTIONS if split_action(action)[1] in there]


def split_action(name: str) -> tuple[str, str]:
    """The verb and the object of an action's name, whether or not it is one of the 225.

    >>> split_action("pickup apple"), split_action("clean")
    (('pickup', 'apple'), ('clean', ''))
    """
    verb, _, target = name.partition(" ")
    return verb, target
