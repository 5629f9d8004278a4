from matcher import Matcher

from .registry import MATCHERS

MATCHERS["hungarian"] = Matcher
