"""Long scans and deep stacks in the memory of a few segments."""
