"""`python -m relume.controlplane.cli.relume_command` is the `relume` command."""

import sys

from relume.controlplane.cli.relume_command import main

if __name__ == "__main__":
    sys.exit(main())
