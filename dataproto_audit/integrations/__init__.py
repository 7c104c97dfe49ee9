"""Attaching to trainers of others: boundaries of their loops reach our auditor, nothing is edited.

``attach`` is the way in by code, :mod:`dataproto_audit.verl_plugin` the one by environment. What
differs between versions of a framework stands in one table beside its driver.
"""
