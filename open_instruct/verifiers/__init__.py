"""How answers are judged: one class a kind of answer, registered by name."""
