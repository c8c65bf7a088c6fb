"""All network work of a learner, in a thread of its own: joining, pulling, publishing, reporting, claiming data."""
