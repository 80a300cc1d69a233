"""The ``diptych`` command: one small module per subcommand, imported when it is used."""

from diptych.cli.main import main

__all__ = ["main"]
