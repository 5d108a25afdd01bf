"""What all tests have in common: hypothesis does not mind how long an example takes, on a machine that may be busy."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
