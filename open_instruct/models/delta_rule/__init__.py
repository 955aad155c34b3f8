"""Layers of the gated delta rule, in the place of attention."""
