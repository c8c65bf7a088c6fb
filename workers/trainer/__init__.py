"""The built-in trainer: text, models, training steps, schedule and evaluation; also the data-parallel baseline."""
