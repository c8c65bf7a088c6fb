"""`diloco watch --to`: write a run's curves to TensorBoard or Weights & Biases, beside it. Learners have none."""
