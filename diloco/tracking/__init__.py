"""`diloco watch --to`: write a run's curves to a tracker, such as TensorBoard. Learners have no tracker."""
