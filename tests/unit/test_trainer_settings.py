"""The command line's trainer settings and the trainer's own defaults are the same numbers."""

from __future__ import annotations

from trainer.config import TrainerConfig
from troth.settings import TrainerSettings


def test_defaults_are_the_trainers():
    settings = TrainerSettings().model_dump(exclude={"base"})
    assert settings
    assert TrainerConfig(**settings) == TrainerConfig()
