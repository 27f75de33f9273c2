"""What the model reads and what it writes in the tasks of the 225 actions, in words.

Reading: a system message with the instructions and the actions, the same for all examples or for
all of a scene, so that its tokens are computed once; then the goal, what has been done, and what is
observed. Of SmolLM2's tokens the instructions are 163, all 225 actions 1,177, those of a scene some
200, the rest some 40. Writing: one JSON object, of some 180 tokens, 17 of them a step.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from data.alfred_actions import ACTION_IDS, VERBS, objects, split_action
from rewards.alfred import FIELDS

SHAPE = """{"visual_state_description":"where you are and what you hold",\
"reasoning_and_reflection":"what is done, what comes next","language_plan":"the plan in words",\
"executable_plan":[{"action_id":0,"action_name":"goto alarmclock"}]}"""
INSTRUCTIONS = f"""You plan for a household robot that has one hand. It goes to places and things, \
picks things up, puts down what it holds, turns lamps on, cools, cleans and heats what it holds, \
slices what lies there with a knife that it holds. Given a goal and the actions done so far, plan \
the actions that remain. Answer with one JSON object of this shape and nothing else:
{SHAPE}
The actions are a verb and an object; before the object is the number of the action:"""


def chat(goal: str, done: Sequence[str], actions: str, observation: str) -> list[dict[str, str]]:
    """The prompt. actions: a listing. The observation has a line of its own, which is the place for
    an image, later."""
    done_so_far = ", ".join(done) or "nothing"
    return [
        {"role": "system", "content": f"{INSTRUCTIONS}\n{actions}"},
        {
            "role": "user",
            "content": f"Goal: {goal}\nDone: {done_so_far}\nObservation: {observation}",
        },
    ]


def listing(actions: Collection[str]) -> str:
    """Some of the 225, a line a verb, each object behind its action's id.

    >>> listing(["goto bed", "goto desk", "pickup pen"])
    'goto: 6 bed 21 desk\\npickup: 98 pen'
    """
    lines = []
    for verb in VERBS:
        names = {name: f"{verb} {name}" for name in objects(verb)}
        line = " ".join(f"{ACTION_IDS[a]} {name}" for name, a in names.items() if a in actions)
        lines += [f"{verb}: {line}"] * bool(line)
    return "\n".join(lines)


def observe(done: Sequence[str]) -> str:
    """Where the actions have led the agent and what it holds, if they all succeeded.

    >>> observe(["goto desk", "pickup pen", "goto shelf"])
    'At the shelf, with the pen in hand.'
    """
    place, held = "start", ""
    for verb, target in map(split_action, done):
        if verb == "goto":
            place = target
        elif verb == "pickup":
            held = target
        elif verb == "put":
            held = ""
    return f"At the {place}, with {f'the {held} in hand' if held else 'nothing in hand'}."


def write_answer(done: Sequence[str], remaining: Sequence[str], words: Sequence[str] = ()) -> str:
    """The JSON of a plan, as SFT imitates it. words: a sentence for each action, done or remaining;
    with fewer of them, or more, the names of the actions serve."""
    sentences = [sentence(text) for text in words]
    if len(sentences) != len(done) + len(remaining) or not all(sentences):
        sentences = [sentence(action) for action in (*done, *remaining)]
    now = len(done)
    before = f"Done: {sentences[now - 1]}" if done else "Nothing is done yet."
    values = (
        observe(done),
        f"{before} Next: {sentences[now]}",
        " ".join(sentences[now:]),
        [{"action_id": ACTION_IDS.get(a), "action_name": a} for a in remaining],
    )
    # Without blanks between the parts: 17 tokens a step, not 21.
    answer = dict(zip(FIELDS, values, strict=True))
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":"))


def sentence(text: str) -> str:
    """
    >>> sentence(" walk to the  desk ")
    'Walk to the desk.'
    """
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + "." * (text[-1:] not in ("", ".", "!", "?"))
