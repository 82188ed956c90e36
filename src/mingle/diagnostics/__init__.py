"""What is wrong with a machine, judged from facts: one implementation for ``doctor`` and for the library's errors."""
