"""Megatron-core as a training engine: tensor, pipeline, context and data parallel.

Only :mod:`.options` and :mod:`.layout` can be imported without megatron-core.
"""
