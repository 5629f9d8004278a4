"""Patches in a diagnosis: shown where they are worth reading, and nothing in them acts."""

from __future__ import annotations

import io

from ampwise.numerics.result import Diagnosis, Fix
from ampwise.report.diagnosis import render, to_html, to_markdown
from ampwise_lint.base import neutral
from ampwise_lint.base.console import Console

PATCH = """--- a/model.py
+++ b/model.py
@@ -1,3 +1,3 @@
 x = "```"
-y = "<b>old</b>"
+y = "<b>new</b>\x1b[31m"
"""


def diagnosis(status: str) -> Diagnosis:
    verified = status.startswith("verified")
    found = Diagnosis("fault", "t", "fp16", "cpu", 1, cause="RANGE_OVERFLOW", phase="forward")
    found.fixes = [Fix("scale first", "why", verified, "cost", patch=PATCH, patch_status=status)]
    return found


def terminal(found: Diagnosis, width: int = 120) -> str:
    text = io.StringIO()
    render(found, Console(file=text, width=width))
    return text.getvalue()


def test_a_verified_patch_is_shown_with_how_it_was_shown():
    found = diagnosis("verified: the patched source, in a fresh process, makes step 1 finite")
    shown = terminal(found)
    assert '    +y = "<b>new</b>\\x1b[31m"' in shown
    assert "in a fresh process" in shown
    text = to_markdown(found)
    assert "````diff\n--- a/model.py\n" in text
    assert '+y = "<b>new</b>\\x1b[31m"\n````\n' in text
    page = to_html(found)
    assert "+y = &#34;&lt;b&gt;new&lt;/b&gt;\\x1b[31m&#34;" in page
    assert "in a fresh process" in page


def test_a_patch_can_be_copied_from_a_narrow_terminal():
    shown = terminal(diagnosis("verified: makes step 1 finite"), width=12)
    lines = [neutral.line(f"    {line}") for line in PATCH.splitlines()]
    assert "\n".join(lines) in shown


def test_of_a_patch_that_did_not_mend_only_that_is_said():
    found = diagnosis("suggestion: tried in a fresh process: still not finite")
    for text in (terminal(found), to_markdown(found), to_html(found)):
        assert "new" not in text
        assert "scale first" in text


def test_a_patch_that_was_not_run_is_a_suggestion_and_shown():
    found = diagnosis("suggestion: not run: the batch holds sockets")
    for text in (terminal(found), to_markdown(found), to_html(found)):
        assert "new" in text
        assert "suggestion: not run" in text


def test_patches_come_back_from_json():
    found = diagnosis("verified: x")
    again = Diagnosis.from_json(found.to_json())
    assert again.fixes == found.fixes
    assert found.to_json()["fixes"][0]["patch"] == PATCH
    old = found.to_json()
    del old["fixes"][0]["patch"], old["fixes"][0]["patch_status"]
    assert Diagnosis.from_json(old).fixes[0].patch is None


def test_a_patch_that_holds_beside_the_one_taken_is_not_called_unverified():
    found = diagnosis("holds, too: 43 dB at worst, where the one taken keeps 44 dB")
    assert found.fixes[0].outcome == "holds, too"
    for text in (terminal(found), to_markdown(found), to_html(found)):
        assert "not verified" not in text
        assert "suggestion" not in text
        assert "43 dB at worst" in text
