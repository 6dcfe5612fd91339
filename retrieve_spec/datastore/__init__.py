"""Datastores on disk: built once, memory-mapped by any process, drafted from with provenance."""
