"""What all tests have in common: how many examples laws get, and that hypothesis does not mind how long one takes, on a
machine that may be busy.

    pytest --hypothesis-profile=thorough     # many more: after a change to what a law is about

Laws whose examples are dear take a share of the profile's number, `tests.toy.examples(0.4)`."""

import pytest
from hypothesis import settings

settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile("quick")


@pytest.fixture(scope="module")
def running_store():
    """An object store on this machine."""
    from tests.object_store import object_store

    with object_store() as store:
        yield store
