"""The bytes of a message about changed weights, which learners send and plans count.

A learner's message about its parts of some tensors has a row for each part; behind the rows are, of each part, all
values, or a place and a value for each that has changed, or a place, a length and the values of each run of them.
"""

PLACE_BYTES = 4  # also a length's
ROW_BYTES = 4 * 8
