"""Results and errors of one rank, told to all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ampwise.distributed.host_group import HostGroup, everyone
from ampwise.errors import TaskError
from tests.distributed.ranks import Ranks
from tests.distributed.small import me


def _results() -> tuple[list[int], int, int]:
    ranks = everyone()
    return ranks.all(lambda: 10 * me()), ranks.agree(lambda: 10 * me()), ranks.first(lambda: me())


def test_what_each_rank_has_is_known_to_all(ranks: Ranks) -> None:
    assert ranks(_results) == [([0, 10], 0, 0), ([0, 10], 10, 0)]


def _raised(how: str, bad: tuple[int, ...], kind: type[Exception]) -> tuple[str, str, bool]:
    def work() -> None:
        if me() in bad:
            raise kind("not here")

    exchange: Callable[..., object] = getattr(everyone(), how)
    try:
        exchange(work)
    except Exception as error:
        return type(error).__name__, str(error), error.__cause__ is not None
    return "", "", False


@pytest.mark.parametrize("how", ["all", "agree"])
def test_the_first_ranks_error_is_raised_on_all(ranks: Ranks, how: str) -> None:
    first, second = ranks(_raised, how, (1,), TaskError)
    assert first == ("TaskError", "rank 1: not here", False)
    assert second == ("TaskError", "rank 1: not here", True)


@pytest.mark.parametrize(
    ("how", "bad"), [("all", (0, 1)), ("agree", (0, 1)), ("first", (0,)), ("first", (0, 1))]
)
def test_an_error_of_all_or_of_the_first_has_no_number(
    ranks: Ranks, how: str, bad: tuple[int, ...]
) -> None:
    for kind, words, _ in ranks(_raised, how, bad, TaskError):
        assert (kind, words) == ("TaskError", "not here")


def test_any_error_is_told(ranks: Ranks) -> None:
    for kind, words, _ in ranks(_raised, "agree", (1,), ValueError):
        assert (kind, words) == ("RankError", "rank 1: not here")


def test_alone_nothing_is_told() -> None:
    alone = HostGroup(None)
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.all(lambda: 3) == [3]
    with pytest.raises(ZeroDivisionError):
        alone.agree(lambda: 1 / 0)
