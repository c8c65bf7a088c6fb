"""What a learner's model and arguments must be, and stay."""
