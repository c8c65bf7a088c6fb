"""`diloco bench kills`: decoupled, elastic and fixed data-parallel training under the same kills, loss by wall time."""
