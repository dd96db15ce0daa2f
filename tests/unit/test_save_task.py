from __future__ import annotations

from typing import Any

import pytest
from prefect.states import Failed

from relax_pipeline.errors import CheckpointError, TrainerError
from tasks import training


@pytest.mark.parametrize(
    ("error", "again"),
    [(CheckpointError("step-0000030 was not saved: disk"), True), (TrainerError("trainer rank 0 died"), False)],
)
def test_a_save_is_tried_again_unless_its_trainer_is_gone(error: Exception, *, again: bool) -> None:
    condition: Any = training.save.retry_condition_fn
    assert condition(training.save, None, Failed(data=error)) is again
