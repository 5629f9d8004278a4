"""What the linter and ampwise both stand on: errors, output, files. Knows nothing of linting.

ampwise depends on this distribution, never the other way, so what both need lives here; nothing
here imports torch, or ampwise.
"""
