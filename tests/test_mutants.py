"""The list of mutations is whole: each applies once to the source of today and gives a program; see mutants.py."""

import pytest
from mutants import MUTATIONS, ROOT, mutants, mutated


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: f"{mutant.file}: {mutant.old.strip()[:40]}")
def test_every_mutation_applies(mutant):
    compile(mutated(mutant), mutant.file, "exec")
    assert (ROOT / "tests" / mutant.tests.split(" -k ")[0]).is_file()
    assert mutant.old != mutant.new


def test_there_are_enough():
    assert sum(map(len, MUTATIONS.values())) >= 60
    assert len(set(mutants())) == len(list(mutants()))
