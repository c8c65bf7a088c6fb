"""The learner program: text in, steps, schedule, evaluation; models, data; the data-parallel baseline."""
