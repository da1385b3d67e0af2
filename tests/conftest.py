"""Settings of all tests: random inputs are the same in every run, so a verdict can be repeated.

`--hypothesis-profile=explore` draws new ones.
"""

from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")
