"""The learner program: text in, steps, schedule, evaluation; models, data and baselines."""
