"""Imported before `preloaded`, which has it on again: libraries that are being imported are no
garbage.
"""

import gc

gc.disable()
