"""From deltas to the next version of a fragment: merge rules, outer step, repair."""
