"""Models that only the lab trains: a mixture of experts, a vision transformer, a vision-language model."""
