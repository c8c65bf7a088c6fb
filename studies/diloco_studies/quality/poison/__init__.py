"""Learners of the lab that send what they did not learn, and how far learners agree."""
