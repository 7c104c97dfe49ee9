"""Checking a batch that is at hand: without a trainer, and in any environment."""

from dataproto_audit.checker.api import check, check_concat, check_dump, check_union

__all__ = ["check", "check_concat", "check_dump", "check_union"]
