"""What fills the memory of one compiled program, and how two programs differ."""
