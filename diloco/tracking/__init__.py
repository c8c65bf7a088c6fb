"""`diloco watch --to`: curves in TensorBoard or Weights & Biases, written beside a run. Learners carry no tracker."""
