"""Names of the files in a run folder, and what their readers and writers must agree on."""

TABLES_DIR = "tables"
SUMMARY = "summary.json"
"""Written last: a run without it did not finish."""
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
OWN_FILES = (SUMMARY, CONFIG, ENVIRONMENT)

MEAN_OVER = 3
"""First and last steps that ``reward_first`` and ``reward_last`` of the summary are means of."""
