"""Python runs this in the programs of `Host.run`: each line of theirs is written at once, and in one piece.

Where ``PYTHONUNBUFFERED`` is set ``print`` writes a line and its end in two pieces, and the lines of ranks that share
the output of one launcher mix; where it is not, lines wait for the end of the program.
"""

import sys

if sys.stdout is not None:  # pythonw, or a closed descriptor
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
