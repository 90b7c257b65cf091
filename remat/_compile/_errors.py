class CompileError(RuntimeError):
    """XLA could not compile a program, for another reason than its size."""
