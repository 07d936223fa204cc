"""How a script ends that is stopped, finds the disk full, or is not read any more."""

import errno
import sys
from collections.abc import Callable

from training.errors import EXIT_FAILED, EXIT_INTERRUPTED, output_closed

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def ended(main: Callable[[], int]) -> int:
    """The exit code of ``main``. Ctrl-C and a file that could not be written for want of room are
    said in a sentence, a closed pipe is not; files are whole or not there in any case
    (``run_folder.replacing``)."""
    try:
        return main()
    except KeyboardInterrupt:
        print("\ninterrupted; what was written before stays", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return output_closed()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        where = f" for {error.filename}" if error.filename else ""
        print(f"error: no room{where} ({error.strerror}); make some and run again", file=sys.stderr)
        return EXIT_FAILED
