"""The quality lab: real gradients in virtual time, under the production protocol."""
