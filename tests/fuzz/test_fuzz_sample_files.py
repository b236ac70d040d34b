"""A fixed sample of every harness of files: policies, what a user writes, a role's own disk.

`make fuzz` is the long run (docs/fuzzing.md).
"""

from __future__ import annotations

import pytest

from tests.fuzz import targets_disk, targets_models, targets_operator
from tests.fuzz.sampling import check_sample

MODULES = (targets_models, targets_operator, targets_disk)


@pytest.mark.parametrize("name", [name for module in MODULES for name in module.HARNESSES])
def test_every_input_is_accepted_or_refused_as_documented(name, tmp_path):
    check_sample(name, tmp_path)
