"""What the Talkers read of prompts, worked out by hand."""

from __future__ import annotations

import json

import numpy as np

from tritone.models.omni.heard import Heard, hear_all, hear_user

TURN, SYSTEM, USER, ASSISTANT, TEXT, SOUND = 1, 2, 3, 4, 9, 7
ROLES = {"turn": TURN, "user": USER, "assistant": ASSISTANT, "media": frozenset((SOUND,))}


def ids(*parts: list[int]) -> np.ndarray:
    return np.array([token for part in parts for token in part], np.int32)


def test_users_turns_and_the_last_of_the_assistant() -> None:
    prompt = ids(
        [TURN, SYSTEM, TEXT],
        [TURN, USER, TEXT, TEXT],
        [TURN, ASSISTANT, TEXT],
        [TURN, USER, SOUND, SOUND, TEXT, SOUND],
        [TURN, ASSISTANT, TEXT],
    )
    heard = hear_user(prompt, None, **ROLES)  # type: ignore[arg-type]
    assert heard == Heard(19, ((3, 7), (10, 16)), ((12, 14), (15, 16)), 16, None)
    assert Heard.from_json(json.loads(json.dumps(heard.to_json()))) == heard


def test_turns_move_to_where_the_one_before_has_ended() -> None:
    """An image of 2 x 2 takes two positions of each axis; what comes after it begins behind the largest."""
    image = [TURN, USER, SOUND, SOUND, SOUND, SOUND]
    prompt = ids([TURN, SYSTEM, TEXT], image, [TURN, ASSISTANT], [TURN, USER], [TURN, ASSISTANT])
    axes = [
        [0, 1, 2, 3, 4, 5, 5, 5, 5, 7, 8, 9, 10, 11, 12],
        [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 8, 9, 10, 11, 12],
        [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10, 11, 12],
    ]
    heard = hear_user(prompt, np.array(axes, np.int32), **ROLES)  # type: ignore[arg-type]
    assert heard.positions == ((0, 1, 2, 2, 2, 2, 4, 5), (0, 1, 2, 2, 3, 3, 4, 5), (0, 1, 2, 3, 2, 3, 4, 5))
    assert hear_all(prompt, np.array(axes, np.int32)).positions == tuple(map(tuple, axes))
    assert hear_all(prompt, None) == Heard(15, ((0, 15),))


def test_without_a_user_nothing_but_the_opening_is_heard() -> None:
    assert hear_user(ids([TURN, ASSISTANT, TEXT]), None, **ROLES) == Heard(3, (), (), 0, None)  # type: ignore[arg-type]
