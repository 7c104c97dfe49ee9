"""Parts of :mod:`dataproto_audit.protocol`; import from there."""
