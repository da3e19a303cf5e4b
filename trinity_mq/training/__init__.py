"""The trainer: packing, the learner, optimizers, models, checkpoints and rank communication."""
