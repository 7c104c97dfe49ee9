"""Commands that ``cli.py`` registers, grouped by what they work on; thin, as it is itself."""
