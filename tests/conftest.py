"""Settings that all tests share."""

import os

import hypothesis

# Compilation dominates and the first example pays for it, so there is no deadline per example.
hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=10, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
