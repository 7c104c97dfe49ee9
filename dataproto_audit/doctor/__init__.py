"""What an environment can audit, and what a configuration would run into: ``doctor``."""

from dataproto_audit.doctor.report import examine, examine_environment

__all__ = ["examine", "examine_environment"]
