"""Of the patches that hold, the one that a reviewer would take: near on all steps, then small."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest

from ampwise.numerics.remedy.choice import Held, best_of, enough_db, may_win, why
from ampwise.numerics.remedy.patches import Grade, Proposal
from ampwise.numerics.remedy.search import Search
from ampwise.numerics.remedy.verify import Outcome

BEFORE = b"a\nb\nc\nd\n"
MOST = enough_db("float16")


def held(what, grade, step_db, *next_db, lines=1, own=False, left="", near=""):
    data = b"x\n" * lines + b"".join(BEFORE.splitlines(keepends=True)[lines:])
    outcome = Outcome("", own, step_db, 5, next_db=list(next_db), left=left, near=near)
    return Held(1, Proposal(what, "", data, grade), outcome)


EPS = held("eps", Grade.CONSTANT, 62, 40, 56, 16)
FLOAT32 = held("float32", Grade.FLOAT32, 64, 51, 54, 66)


@pytest.mark.parametrize(
    ("taken", "other"),
    [
        (FLOAT32, EPS),
        (held("eps", Grade.CONSTANT, 60, 50), held("float32", Grade.FLOAT32, 60, 12)),
        (held("formula", Grade.FORMULA, 60, 50), held("float32", Grade.FLOAT32, 62, 53)),
        (held("kernel", Grade.FORMULA, 60, 23), held("float32", Grade.FLOAT32, 65, 58)),
        (held("float32", Grade.FLOAT32, 65, 58), held("kernel", Grade.FORMULA, 60, 16)),
        (held("float32", Grade.FLOAT32, 65, 58), held("eps", Grade.CONSTANT, 60, 43)),
        (held("float32", Grade.FLOAT32, 60, 50), held("function", Grade.FUNCTION, 68, 66)),
        (held("float32", Grade.FLOAT32, 30, 29), held("function", Grade.FUNCTION, 38, 38)),
        (held("function", Grade.FUNCTION, 45, 44), held("float32", Grade.FLOAT32, 30, 29)),
        (held("one", Grade.FLOAT32, 60, 50), held("two", Grade.FLOAT32, 60, 55, lines=2)),
        (held("worse", Grade.FLOAT32, 60, 50), held("ends", Grade.FORMULA, 60, -math.inf)),
    ],
)
def test_the_patch_that_is_near_on_all_steps_is_taken_and_then_the_small_one(taken, other):
    for both in ([taken, other], [other, taken]):
        assert best_of(both, MOST, BEFORE) is taken


def test_a_line_in_place_of_another_is_as_small_as_a_line_more():
    first = held("a cast", Grade.FLOAT32, 60, 44)
    added = Proposal("a name", "", b"a\na\nb\nc\nd\n", Grade.FLOAT32)
    more = Held(2, added, held("", Grade.FLOAT32, 60, 44).outcome)
    assert (first.lines(BEFORE), more.lines(BEFORE)) == (1, 1)
    assert best_of([more, first], MOST, BEFORE) is first
    assert why(first, [first, more], MOST, BEFORE).endswith("about as near and as small")
    two = held("two", Grade.FLOAT32, 60, 44, lines=2)
    said = why(first, [first, two], MOST, BEFORE)
    assert said.endswith("about as near, and fewer lines change")


def test_a_nearer_patch_is_not_called_small():
    every = [
        held("a statement", Grade.STATEMENTS, 50, 50),
        held("names", Grade.FLOAT32, 45, 45, lines=2),
        held("operand", Grade.FLOAT32, 43, 43),
    ]
    assert best_of(every, MOST, BEFORE) is every[1]
    assert why(every[1], every[1:], MOST, BEFORE).endswith("(43 dB at worst): it is nearer")


def test_a_patch_that_leaves_something_wrong_is_taken_only_where_all_do():
    wrong = held("a name", Grade.FLOAT32, 64, 60, left="the loss is 226 and should be 375")
    right = held("the function", Grade.FUNCTION, 50, 44)
    assert may_win(right.proposal, wrong, MOST)
    assert best_of([wrong, right], MOST, BEFORE) is right
    assert "there the loss is 226 and should be 375" in why(right, [wrong, right], MOST, BEFORE)
    also = held("the function", Grade.FUNCTION, 50, 44, left=wrong.outcome.left)
    assert best_of([wrong, also], MOST, BEFORE) is wrong


def test_layers_in_float32_are_not_looked_at_where_another_patch_is_near():
    layers = held("the caller", Grade.LAYERS, 106, 105)
    assert not may_win(layers.proposal, held("a statement", Grade.STATEMENTS, 66, 37), MOST)
    assert may_win(layers.proposal, held("a statement", Grade.STATEMENTS, 30, 12), MOST)


def test_layers_stay_in_16_bits_where_one_step_of_ten_is_worse_without_them():
    layers = held("the caller", Grade.LAYERS, *[63] * 12, 39)
    statement = held("a statement", Grade.STATEMENTS, *[53] * 12, 18)
    assert not may_win(layers.proposal, statement, MOST)
    assert best_of([statement, layers], MOST, BEFORE) is statement
    worse = held("a statement", Grade.STATEMENTS, *[53] * 11, 18, 18)
    assert best_of([worse, layers], MOST, BEFORE) is layers
    assert may_win(layers.proposal, held("a statement", Grade.STATEMENTS, 53, 53, 18), MOST)


def test_what_cannot_be_compared_is_taken_as_it_comes():
    first = held("clamp", Grade.LIMIT, 60, own=True)
    assert best_of([first, FLOAT32], MOST, BEFORE) is first
    assert not may_win(FLOAT32.proposal, first, MOST)
    zero = held("var", Grade.FORMULA, -256)  # of a gradient that is 0
    assert best_of([zero, held("float32", Grade.FLOAT32, -177)], MOST, BEFORE) is zero
    assert not may_win(FLOAT32.proposal, zero, MOST)


def test_nothing_more_is_tried_where_nothing_could_be_better():
    assert may_win(FLOAT32.proposal, EPS, MOST)
    assert not may_win(EPS.proposal, FLOAT32, MOST)
    assert may_win(held("formula", Grade.FORMULA, 0).proposal, FLOAT32, MOST)


def test_the_reason_is_said_with_its_figures():
    assert why(FLOAT32, [EPS, FLOAT32], MOST, BEFORE) == (
        "taken before eps (16 dB at worst): it is nearer"
    )
    function = held("the function", Grade.FUNCTION, 68, 66)
    said = why(FLOAT32, [FLOAT32, function], MOST, BEFORE)
    assert said.endswith("(66 dB at worst): about as near, and float32 is only where it is needed")


def test_patches_that_lose_for_one_reason_are_named_together():
    others = [held(f"eps {number}", Grade.CONSTANT, 16) for number in range(4)]
    assert why(FLOAT32, [FLOAT32, *others], MOST, BEFORE) == (
        "taken before eps 0 (16 dB at worst), eps 1 (16 dB at worst) and 2 more: it is nearer"
    )


def test_layers_stay_in_16_bits_where_a_statement_in_float32_is_enough():
    statement = held("statement", Grade.STATEMENTS, 45, 37)
    whole = held("function", Grade.FUNCTION, 74, 58)
    layers = replace(whole, proposal=replace(whole.proposal, has_layers=True))
    assert best_of([statement, whole], MOST, BEFORE) is whole
    assert best_of([statement, layers], MOST, BEFORE) is statement
    assert not may_win(layers.proposal, statement, MOST)
    assert "what its function calls is in float32" in why(
        statement, [statement, layers], MOST, BEFORE
    )
    several = replace(statement, proposal=replace(statement.proposal, has_layers=True))
    assert best_of([several, layers], MOST, BEFORE) in (several, layers)
    noisy = held("statement", Grade.STATEMENTS, 45, 17)
    assert best_of([noisy, layers], MOST, BEFORE) is layers
    enough = held("statement", Grade.STATEMENTS, 45, 19)  # of a loss far from linear
    assert best_of([enough, layers], MOST, BEFORE) is enough


class Tries:
    """Outcomes by the parts that a patch has left."""

    over = False
    in_words = staticmethod(lambda outcome: outcome.in_words(1))
    cost_of = staticmethod(lambda number: None)

    def __init__(self, outcomes):
        self.outcomes = outcomes
        self.tried = []

    def of(self, number, data, beside):
        self.tried.append((number, data))
        return self.outcomes[data]


def test_float32_that_leaves_its_neighbour_near_the_end_of_the_format_is_passed_over():
    near = held("operand", Grade.FLOAT32, 60, 58, near="line 7 comes to 33,440 of 65,504")
    wide = held("name", Grade.FLOAT32, 61, 58, lines=2)
    assert may_win(wide.proposal, near, MOST)
    assert best_of([near, wide], MOST, BEFORE) is wide
    assert "line 7 comes to 33,440" in why(wide, [near, wide], MOST, BEFORE)
    layers = held("layers", Grade.LAYERS, 61, 58)
    noisy = held("name", Grade.FLOAT32, 45, 40)
    assert not may_win(layers.proposal, near, MOST)
    assert best_of([near, layers, noisy], MOST, BEFORE) is near


SITE = mock.Mock(compute_dtype="float16")
SITE.source.data = BEFORE


def parted(kept):
    data = ",".join(map(str, sorted(kept))).encode()
    return Proposal("casts", "", data, Grade.FLOAT32, 3, parted)


def test_an_edit_that_nothing_is_lost_without_is_left_out():
    good, worse = (
        Outcome("", False, 60.0, 5, next_db=[55.0]),
        Outcome("", False, 60.0, 5, next_db=[50.0]),
    )
    whole = parted([0, 1, 2])
    tries = Tries({whole.data: good, b"0,1": good, b"0": worse, b"1": Outcome("not finite")})
    search = Search(SITE, [whole], tries, mock.Mock())
    search.run()
    assert search.tried[-1].verified
    assert search.tried[-1].proposal.data == b"0,1"
    assert [data for _, data in tries.tried] == [whole.data, b"0,1", b"0", b"1"]
    assert len({number for number, _ in tries.tried}) == 4


def test_a_statement_may_leave_an_island_at_the_cost_of_digits_that_no_layer_keeps():
    """And only from its ends; a cast is left out only where nothing is lost."""
    near, rounded = Outcome("", sqnr_db=84.0), Outcome("", sqnr_db=MOST + 5)

    def island(kept):
        if {1, 3} <= set(kept) and 2 not in kept:
            return None
        data = ",".join(map(str, sorted(kept))).encode()
        return Proposal("island", "", data, Grade.FUNCTION, 4, island, statements=3)

    lost = Outcome("not finite")
    tries = Tries({
        b"0,1,2,3": near, b"0,1,2": rounded, b"0,1": lost, b"0,2": rounded, b"2": rounded,
        b"": lost, b"0": lost,
    })  # fmt: skip
    search = Search(SITE, [island(range(4))], tries, mock.Mock())
    search.run()
    assert search.tried[-1].proposal.data == b"2"
    tries.outcomes[b"2"] = Outcome("", sqnr_db=MOST + 3)
    search = Search(SITE, [island(range(4))], tries, mock.Mock())
    search.run()
    assert search.tried[-1].proposal.data == b"0,2"


def test_a_format_of_an_update_that_keeps_enough_as_it_is_stays():
    """Momenta in 16 bits beside squares that have to be float32."""
    exact, rounded = (Outcome("", sqnr_db=each, updates=9) for each in (MOST + 10, MOST - 0.5))
    tries = Tries({b"0,1,2": exact, b"0,1": rounded, b"0": Outcome("", sqnr_db=20, updates=9),
                   b"1": rounded})  # fmt: skip
    search = Search(SITE, [parted(range(3))], tries, mock.Mock())
    search.run()
    assert search.tried[-1].proposal.data == b"1"


def test_what_reaches_further_back_is_tried_where_all_that_holds_is_noise_on_some_step():
    narrow = held("operand", Grade.FLOAT32, 40, 30, 15)
    back = held("from above", Grade.STATEMENTS, 50, 48, 46, lines=2)
    beyond = held("helpers", Grade.FUNCTION, 60, 58, 57, lines=3)
    outcomes = {each.proposal.data: each.outcome for each in (narrow, back, beyond)}
    found, further = [narrow.proposal], [back.proposal, beyond.proposal]
    tries = Tries(outcomes)
    search = Search(SITE, found, tries, mock.Mock(), further)
    search.run()
    assert search.tried[-1].proposal is back.proposal
    assert [data for _, data in tries.tried] == [narrow.proposal.data, back.proposal.data]
    assert search.tried[0].status.startswith("holds, too: 15 dB at worst")
    near = held("operand", Grade.FLOAT32, 40, 30, 21)
    tries = Tries(outcomes | {near.proposal.data: near.outcome})
    Search(SITE, found, tries, mock.Mock(), further).run()
    assert len(tries.tried) == 1


def test_what_was_passed_over_may_reach_further_back():
    """A proposal that came after enough others that hold is tried where these are noise."""
    noisy, near = (held("", Grade.FLOAT32, 40, 30, worst).outcome for worst in (15, 29))
    few = [Proposal("operand", "", f"{n}\n".encode(), Grade.FLOAT32) for n in range(5)]
    back = Proposal("from above", "", b"back\n", Grade.FLOAT32)
    tries = Tries({back.data: near} | {each.data: noisy for each in few})
    search = Search(SITE, [*few, back], tries, mock.Mock(), [few[0], back])
    search.run()
    assert search.tried[-1].proposal is back
    assert len({data for _, data in tries.tried}) == len(tries.tried)


def test_what_held_is_told_if_the_time_is_over():
    """Of a script that waits: `progress` ends the search."""
    progress = mock.Mock()
    progress.stage.side_effect = [None, TimeoutError]
    tries = Tries({EPS.proposal.data: EPS.outcome})
    search = Search(SITE, [EPS.proposal, FLOAT32.proposal], tries, progress)
    with pytest.raises(TimeoutError):
        search.run()
    assert [each.verified for each in search.tried] == [True]
