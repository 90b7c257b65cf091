"""Name every intermediate value of a region, and list what would be kept."""
