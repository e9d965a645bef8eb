"""The error tree: as drawn, coded, and whole after a trip through pickle."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator

import pytest

from tokenplane.schemas import errors
from tokenplane.schemas.errors import TokenplaneError


def subclasses(cls: type[TokenplaneError]) -> Iterator[type[TokenplaneError]]:
    for sub in cls.__subclasses__():
        if sub.__module__ == errors.__name__:
            yield sub
            yield from subclasses(sub)


CLASSES: list[type[TokenplaneError]] = [TokenplaneError, *subclasses(TokenplaneError)]
LINE = re.compile(r"^    (?P<indent>[│├└─ ]*)(?P<name>\w+Error)\b(?P<rest>.*)$", re.MULTILINE)
BASES = {"ValueError", "KeyError", "TimeoutError"}


def drawn() -> dict[str, tuple[str | None, str]]:
    """name -> (parent's name, the rest of its line), as the docstring draws it."""
    tree: dict[str, tuple[str | None, str]] = {}
    path: list[str] = []
    for match in LINE.finditer(errors.__doc__ or ""):
        depth = len(match["indent"]) // 4
        del path[depth:]
        assert match["name"] not in tree
        tree[match["name"]] = (path[-1] if path else None, match["rest"])
        path.append(match["name"])
    return tree


def test_the_drawn_tree_is_the_class_tree() -> None:
    real = {
        cls.__name__: None
        if cls is TokenplaneError
        else next(base.__name__ for base in cls.__bases__ if issubclass(base, TokenplaneError))
        for cls in CLASSES
    }
    assert {name: parent for name, (parent, _) in drawn().items()} == real
    public = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, TokenplaneError)
    }
    assert public == set(real)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_line_of_the_tree_tells_code_retry_and_further_bases(cls: type[TokenplaneError]) -> None:
    _, rest = drawn()[cls.__name__]
    own = [base.__name__ for base in cls.__bases__ if not issubclass(base, TokenplaneError)]
    also = re.search(r"\(also an? (\w+)\)", rest)
    assert (own if cls is not TokenplaneError else []) == ([also[1]] if also else [])
    words = rest.split()
    assert ("retryable" in words) == cls.retryable
    if words and "_" in words[0]:
        assert words[0] == cls.code
    else:  # the root, or a class with one code per cause
        assert cls is TokenplaneError or "one code per" in rest


def test_codes_are_unique_and_machine_readable() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)+|[a-z]+", code) for code in codes)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_survives_pickle_and_copy(cls: type[TokenplaneError]) -> None:
    error = cls("what went wrong", code="narrower_code", key="r/c/1", expected=3, got=[1, "é"])
    error.add_note("seen on worker 2")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        same_error(pickle.loads(pickle.dumps(error, protocol)), error)
    same_error(copy.copy(error), error)
    same_error(copy.deepcopy(error), error)
    plain = pickle.loads(pickle.dumps(cls("x")))
    assert (plain.code, plain.key, plain.expected, plain.got) == (cls.code, None, None, None)
    assert (plain.message, plain.args) == ("x", ("x",))


def same_error(got: TokenplaneError, error: TokenplaneError) -> None:
    assert type(got) is type(error)
    assert vars(got) == vars(error)
    assert got.args == error.args
    assert str(got) == str(error)
    assert got.retryable == error.retryable
    assert (got.code, got.key, got.message) == ("narrower_code", "r/c/1", "what went wrong")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_message_gives_what_was_expected_what_came_and_the_key(
    cls: type[TokenplaneError],
) -> None:
    assert str(cls("bad length", expected=3, got=0, key="k")) == (
        "bad length; expected 3; got 0; key 'k'"
    )
    assert str(cls()) == cls.code
    assert str(cls("only this")) == "only this"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_further_bases_catch_it(cls: type[TokenplaneError]) -> None:
    for base in cls.__mro__:
        if base.__name__ in BASES:
            with pytest.raises(base):
                raise cls("x")
