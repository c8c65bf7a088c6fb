"""From deltas to the next version of a fragment: merge rules and outer step."""
