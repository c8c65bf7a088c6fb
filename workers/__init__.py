"""The learners and the evaluator: everything that computes with torch."""
