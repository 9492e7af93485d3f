"""Only read, never imported: a real one needs much."""

raise ImportError("this pipeline must not be imported to find out whether it can run")
