"""Pages and drawings for people: of a run, of several runs, of a plan, in the terminal."""
