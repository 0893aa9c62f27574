"""Settings for all tests."""

import os

from hypothesis import settings

# A run on a CI machine must not depend on luck: there the same examples are tried every time, elsewhere new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
