"""Which paths are walked, and in which order."""

from __future__ import annotations

from ampwise_lint.path.oracle import Oracle, explore


def test_the_options_of_the_file_are_tried_before_those_of_others():
    asked: list[dict[str, bool]] = []

    def walk(oracle: Oracle) -> None:
        for key in ("wide", "deep", "heads"):
            oracle.ask(key, default=True, own=False)
        for key in ("one", "other", "precision Eq 'fp16'"):
            oracle.ask(key, default=False)
        asked.append(dict(oracle.decided))

    list(explore(walk, 7))
    changed = [{key for key, value in each.items() if value != asked[0][key]} for each in asked]
    both = [{"one", "other"}, {"one", "precision Eq 'fp16'"}, {"other", "precision Eq 'fp16'"}]
    assert changed[1] == {"precision Eq 'fp16'"}
    assert all(each in changed for each in both)
    assert not set().union(*changed) & {"wide", "deep", "heads"}
