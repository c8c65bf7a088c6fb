"""What a region's line carries: `diloco bench region`."""
