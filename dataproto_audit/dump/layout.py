"""Names of the files in a run folder."""

TABLES_DIR = "tables"
SUMMARY = "summary.json"
"""Written last: a run without it did not finish."""
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
OWN_FILES = (SUMMARY, CONFIG, ENVIRONMENT)
