"""Every table that things register in refuses a second entry of the same name."""

import pytest

from odevit.analysis import ANALYSES, load_analyses
from odevit.data.augment import MIXES, OPERATIONS
from odevit.distill.losses import LOSSES, register_loss
from odevit.distill.meeting import PLACEMENTS
from odevit.model.solvers import SOLVERS
from odevit.registry import Registry
from odevit.teachers.families import TEACHERS

load_analyses()
TABLES = [SOLVERS, LOSSES, PLACEMENTS, TEACHERS, ANALYSES, OPERATIONS, MIXES]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.kind)
def test_a_second_entry_of_the_same_name_is_refused(table):
    name, entry = next(iter(table.items()))
    with pytest.raises(ValueError, match=f"there is a {table.kind} named {name!r} already"):
        table[name] = entry
    assert table[name] is entry


def test_a_loss_by_the_name_of_another_is_refused():
    def kl(meeting):
        return meeting

    with pytest.raises(ValueError, match="loss named 'kl'"):
        register_loss(kl)


def test_a_registry_keeps_the_order_and_frees_a_deleted_name():
    table: Registry[int] = Registry("number", {"two": 2})
    table["one"] = 1
    del table["two"]
    table["two"] = 3
    assert list(table.items()) == [("one", 1), ("two", 3)]
