"""Pages and drawings that people look at: a run, several runs beside each other, a plan, a curve in
the terminal.
"""
