"""Errors of the integration."""

import pickle

import pytest

from odevit.model.errors import NonFiniteLogitsError, NonFiniteStateError


@pytest.mark.parametrize(
    "error", [NonFiniteStateError(3, 0.25), NonFiniteStateError(None, 0.5), NonFiniteLogitsError()], ids=str
)
def test_an_error_of_a_worker_process_arrives_as_it_was(error):
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.step == error.step
