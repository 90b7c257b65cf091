"""What the commands of `remat` share."""
