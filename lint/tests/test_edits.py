"""Edits at a place: made where they fit, told apart where not; several of one finding go together."""

from __future__ import annotations

from ampwise_lint.edits import apply
from ampwise_lint.findings import Edit, Finding
from ampwise_lint.fix import _applied

TEXT = "a = 1\nb = 2; c = 3\nif a:\n\t# why\n\td = é(4)  # what\n\te = 5\n"


def test_an_edit_of_a_statement_that_shares_its_line_does_not_fit():
    fits, does_not = Edit("before", 1, 0, 1, 5, "x = 0"), Edit("after", 2, 0, 2, 5, "y = 0")
    assert apply(TEXT, [fits, does_not, fits]) == ("x = 0\n" + TEXT, {does_not})


def test_statements_are_put_below_a_header_with_their_comments_and_indentation():
    changed, unfit = apply(TEXT, [Edit("wrap", 5, 1, 6, 6, "with f():")])
    assert not unfit
    assert changed.endswith("if a:\n\t# why\n\twith f():\n\t\td = é(4)  # what\n\t\te = 5\n")


def test_a_header_around_statements_of_two_blocks_does_not_fit():
    edit = Edit("wrap", 1, 0, 5, 10, "with f():")
    assert apply(TEXT, [edit]) == (TEXT, {edit})


def test_a_decorator_goes_below_another():
    text = "@staticmethod  # first\ndef f(): pass\n"
    changed, _ = apply(text, [Edit("decorator", 1, 1, 1, 13, "g(1)")])
    assert changed == "@staticmethod  # first\n@g(1)\ndef f(): pass\n"


def finding(*edits: Edit) -> Finding:
    return Finding("x.py", 1, 1, "AMP112", "x", "info", "x", "unsafe", edits)


def test_all_edits_of_a_finding_are_made_or_none():
    fits, does_not = Edit("before", 1, 0, 1, 5, "x = 0"), Edit("after", 2, 0, 2, 5, "y = 0")
    other = finding(Edit("replace", 6, 5, 6, 6, "6"))
    changed, made = _applied(TEXT, [finding(fits, does_not), other])
    assert made == [other]
    assert changed == TEXT.replace("e = 5", "e = 6")
