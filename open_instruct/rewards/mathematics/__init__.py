"""When two answers of mathematics are the same: the rules around math-verify."""
