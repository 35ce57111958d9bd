"""python -m bmoe.cli"""

import sys

from bmoe.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
