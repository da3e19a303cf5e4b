"""A model's folder and opened learners, for all files here."""

from tests.unit.training.test_learner import folder, opened

__all__ = ["folder", "opened"]
