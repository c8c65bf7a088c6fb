"""`diloco watch --to`: write a run's curves to TensorBoard or Weights & Biases. Learners have no tracker."""
