"""Reading JSON objects by a table of what their fields hold."""

from __future__ import annotations

import pytest

from services.router.api.json_fields import ANY, INTEGER, NUMBER, TEXT, nested, typed
from slipstream.errors import InvalidArgument

SHAPE = {"name": TEXT, "seed": INTEGER, "share": NUMBER, "stop": ANY}


def test_what_is_of_its_kind_is_read_as_it_is() -> None:
    body = {"name": "a", "seed": 3, "share": 1, "stop": ["x"]}
    assert typed(body, SHAPE) is body
    assert typed(dict.fromkeys(SHAPE), SHAPE) == dict.fromkeys(SHAPE)  # null counts as left out


def test_whole_numbers_may_be_written_as_fractions() -> None:
    body = {"seed": 2.0, "share": 2.0}
    given = typed(body, SHAPE)
    assert given == {"seed": 2, "share": 2.0} and type(given["seed"]) is int
    assert type(body["seed"]) is float  # what was parsed stays as it is


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"seed": 2.5}, "seed", "must be a whole number"),
        ({"seed": float("inf")}, "seed", "must be a whole number"),
        ({"seed": "2"}, "seed", "must be a number"),
        ({"seed": True}, "seed", "must be a number"),
        ({"share": False}, "share", "must be a number"),
        ({"name": 1.0}, "name", "must be a string"),
        ({"name": 1, "sed": 1}, "sed", "is not a known field"),
        ({"name": 1, "store": True}, "store", "is not supported"),
    ],
)
def test_the_first_unknown_name_is_told_and_else_the_first_wrong_type(
    body: dict[str, object], field: str, words: str
) -> None:
    for path, where in (("", field), ("messages[1]", f"messages[1].{field}")):
        with pytest.raises(InvalidArgument) as refused:
            typed(body, SHAPE, no_effect={"store": (False,)}, path=path)
        assert (refused.value.field, refused.value.message) == (where, f"{where}: {words}")


def test_an_object_in_an_object() -> None:
    assert nested({}, "options", SHAPE) is None
    assert nested({"options": {"name": "a"}}, "options", SHAPE) == {"name": "a"}
    with pytest.raises(InvalidArgument, match=r"tools\.options: must be an object"):
        nested({"options": []}, "options", SHAPE, path="tools")
